"""Stopping criteria, applied as plain `generate` would: a row ends at the first token that any of them names.

End tokens and the length limit concern one row and are looked at as tokens are committed. Any other criterion is
called once per step with all rows, as in plain `generate`, as soon as all rows have reached that step; rows that had
run ahead are then cut back.
"""

from transformers import StoppingCriteriaList
from transformers.generation import stopping_criteria as hf

from .rows import Rows


def longest(criteria: StoppingCriteriaList, prompt_width: int) -> int:
    """Columns at which every row ends. The user's length criteria take the place of the call's `max_length`, and as
    plain `generate` asks after a token has been chosen, one comes out whatever they say."""
    return max(min(c.max_length for c in criteria if type(c) is hf.MaxLengthCriteria), prompt_width + 1)


class Stopping:
    """When rows end.

    Args:
        criteria: as prepared by `generate`.
        rows: the rows of the call; cut back where a criterion fired behind a row's end.
    """

    def __init__(self, criteria: StoppingCriteriaList, rows: Rows):
        self.rows, self.others = rows, StoppingCriteriaList()
        self.end_tokens: set[int] = set()
        for criterion in criteria:
            if type(criterion) is hf.EosTokenCriteria:
                self.end_tokens.update(criterion.eos_token_id.tolist())
            elif type(criterion) is not hf.MaxLengthCriteria:
                self.others.append(criterion)
        # Plain `generate` pads finished rows only where a criterion carries end tokens; else they go on to the last.
        self.pads = any(getattr(criterion, "eos_token_id", None) is not None for criterion in criteria)
        self.ends: list[int | None] = [None] * len(rows.lengths)
        self.settled = rows.prompt_width

    def cut(self, index: int, new_tokens: list[int]) -> list[int]:
        """The new tokens of row `index` that its end tokens and its length leave."""
        length = self.rows.lengths[index]
        kept = new_tokens[: self.rows.max_length - length]
        at = next((k for k, token in enumerate(kept) if token in self.end_tokens), None)
        if at is not None:
            kept = kept[: at + 1]
        if at is not None or length + len(kept) == self.rows.max_length:
            self.ends[index] = min(self.ends[index] or self.rows.max_length, length + len(kept))
        return kept

    def leaving(self, scores) -> list[int]:
        """Live rows that are over, after newly committed tokens; `settled` is then the number of columns that are
        final in every row.

        Args:
            scores: function from a number of columns to the processed scores so far, as criteria are given them.
        """
        rows = self.rows
        if self.others:
            self._ask_others(scores)
        else:
            running = [rows.lengths[i] for i, end in enumerate(self.ends) if end is None]
            self.settled = max(self.settled, min(running, default=max(rows.lengths)))
        if self.pads or not self.others:
            return [row for row, index in enumerate(rows.live) if self.ends[index] is not None]
        # Without end tokens to pad after, all rows go on to where the last of them ends.
        last = rows.max_length if None in self.ends else max(self.ends)
        if min(rows.lengths) >= last:
            for index in range(len(self.ends)):
                rows.trim(index, last)
        return [row for row, index in enumerate(rows.live) if rows.lengths[index] >= last]

    def _ask_others(self, scores) -> None:
        rows = self.rows
        while True:
            column = self.settled + 1
            last = max((end for end in self.ends if end is not None), default=0)
            if None not in self.ends and self.settled >= last:
                return
            growing = [rows.lengths[i] for i, end in enumerate(self.ends) if end is None or not self.pads]
            if min(growing, default=column) < column:
                return
            ids = rows.tokens[:, :column].clone()
            for index, end in enumerate(self.ends):
                if self.pads and end is not None:
                    ids[index, end:] = rows.pad_token_id
            fired = self.others(ids, scores(column)).tolist()
            self.settled = column
            for index, yes in enumerate(fired):
                if yes and (self.ends[index] is None or self.ends[index] > column):
                    self.ends[index] = column
                    if self.pads:
                        rows.trim(index, column)
