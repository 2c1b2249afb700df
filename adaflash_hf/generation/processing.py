"""The user's logits processors and warpers on the target's scores, applied as plain `generate` would.

Processors are taken at one of three speeds. Those that look at scores only run once on all packed positions. Those
of transformers that also read a row's tokens, and nothing else, run row by row as far as drafts are accepted. Any
other processor may keep state, so it is called exactly as in plain `generate`: once per committed token, with all
rows at the same length. There the rows of a batch accept as many drafts as the least fortunate of them.
"""

import copy

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from .rows import Rows
from .verification import greedy_verify, residual_distribution, row_starts, sample_verify


_SCORES_ONLY = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
)
# Functions of one row's tokens and scores, without memory.
_ROW_BY_ROW = (
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
)


class TargetChoice:
    """Turns the target's logits into committed tokens.

    Args:
        processors: as prepared by `generate`, warpers included.
        do_sample: sample, or take the argmax.
        keep_scores: also return processed scores of every committed token.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, keep_scores: bool = False):
        self.processors, self.do_sample, self.keep_scores = processors, do_sample, keep_scores
        self.scores_only = all(type(processor) in _SCORES_ONLY for processor in processors)
        self.row_by_row = all(type(processor) in _SCORES_ONLY + _ROW_BY_ROW for processor in processors)

    @property
    def temperature(self) -> float:
        """The temperature that drafts are best drawn at."""
        for processor in self.processors:
            if isinstance(processor, hf.TemperatureLogitsWarper):
                return float(processor.temperature)
        return 1.0

    def rounds(self, logits, tokens, counts: list[int], probabilities, rows: Rows):
        """Accepts drafts, in one round or one token at a time; the caller commits a round before it asks for the
        next, and stops asking when a row has ended.

        Args:
            logits: `[T, V]` at the packed tokens.
            tokens: int64 `[T]`, anchor and drafts of each row.
            counts: tokens per row.
            probabilities: `[T - rows, V]`, q of the drafts, or `None` when greedy.
            rows: the live rows, in the order of `counts`.

        Yields:
            per live row the accepted drafts and the bonus token, or the next of these tokens, as lists, and the
            processed scores of each `[tokens, V]` (`None` unless `keep_scores`).
        """
        if probabilities is not None:
            probabilities = probabilities.to(logits.device)
        if self.scores_only:
            yield self._all_at_once(logits, tokens, counts, probabilities)
        elif self.row_by_row:
            yield self._row_by_row(logits, tokens, counts, probabilities, rows)
        else:
            yield from self._in_step(logits, tokens, counts, probabilities, rows)

    def _all_at_once(self, logits, tokens, counts, probabilities):
        scores = logits.float() if self.processors else logits
        if self.processors:
            scores = self.processors(tokens[:, None], scores)
        count_tensor = torch.tensor(counts, device=logits.device)
        if self.do_sample:
            if probabilities is None:
                probabilities = scores.new_zeros(0, scores.shape[1])
            accepted, bonus = sample_verify(scores, probabilities, tokens, count_tensor)
        else:
            accepted, bonus = greedy_verify(scores, tokens, count_tensor)
        accepted, bonus = torch.stack([accepted, bonus]).tolist()
        drafted = tokens.tolist()
        starts = row_starts(torch.tensor(counts)).tolist()
        taken = list(zip(starts, accepted, strict=True))
        new = [[*drafted[s + 1 : s + 1 + a], b] for (s, a), b in zip(taken, bonus, strict=True)]
        return new, [scores[s : s + a + 1].float() for s, a in taken] if self.keep_scores else None

    def _row_by_row(self, logits, tokens, counts, probabilities, rows: Rows):
        new, kept = [], []
        for row, start in enumerate(row_starts(torch.tensor(counts)).tolist()):
            prefix, row_new, row_scores, matched = rows.prefix(row), [], [], True
            processors = self._of_row(rows.live[row])
            while matched:
                scores = processors(prefix, logits[start + len(row_new)][None].float())[0]
                token, matched = self._at(scores, tokens, counts, probabilities, row, start, len(row_new))
                row_new.append(int(token))
                row_scores.append(scores)
                prefix = torch.cat([prefix, token[None].to(prefix)], dim=1)
            new.append(row_new)
            kept.append(torch.stack(row_scores) if self.keep_scores else None)
        return new, kept if self.keep_scores else None

    def _of_row(self, index: int) -> LogitsProcessorList:
        """The processors for one row alone: a repetition penalty knows the rows' padding."""
        alone = LogitsProcessorList(self.processors)
        for i, processor in enumerate(alone):
            if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
                alone[i] = copy.copy(processor)
                alone[i].prompt_ignore_length = processor.prompt_ignore_length[index : index + 1]
        return alone

    def _in_step(self, logits, tokens, counts, probabilities, rows: Rows):
        starts, step, all_matched = row_starts(torch.tensor(counts)).tolist(), 0, True
        while all_matched:
            # Finished rows are shown as plain `generate` pads them; what is said about them is not used.
            whole = logits.new_zeros(len(rows.tokens), logits.shape[1], dtype=torch.float32)
            whole[rows.live] = logits[[start + step for start in starts]].float()
            length = rows.lengths[rows.live[0]]
            scores = self.processors(rows.tokens[:, :length].clone(), whole)[rows.live]
            new = []
            for row, start in enumerate(starts):
                token, matched = self._at(scores[row], tokens, counts, probabilities, row, start, step)
                new.append([int(token)])
                all_matched &= matched
            yield new, scores[:, None] if self.keep_scores else None
            step += 1

    def _at(self, scores, tokens, counts, probabilities, row: int, start: int, step: int):
        """The choice at the `step`-th packed token of a row that starts at `start`."""
        draft = tokens[start + step + 1 : start + step + 2] if step + 1 < counts[row] else None
        # Drafts are packed without the anchors, so a row's drafts start one place earlier for each row before it.
        q = probabilities[start - row + step] if draft is not None and probabilities is not None else None
        return self._choose(scores, draft, q)

    def _choose(self, scores, draft, q) -> tuple[torch.Tensor, bool]:
        """The token `[1]` at one position, and whether it is the accepted draft."""
        if not self.do_sample:
            token = scores.argmax(dim=-1, keepdim=True)
            return token, draft is not None and bool(token == draft)
        p = scores.softmax(dim=-1)
        if draft is None:
            return torch.multinomial(p, 1), False
        if torch.rand((), device=p.device) * q[draft] < p[draft]:
            return draft, True
        return torch.multinomial(residual_distribution(p, q.to(p)), 1), False
