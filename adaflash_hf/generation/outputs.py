"""What a call returns or streams beside its sequences, in the shapes of plain `generate`.

Where a row had already finished, or is padded, entries are 0.
"""

import torch
from transformers import GenerationConfig

from .integration import attention_implementation
from .passes import Pass
from .prefill import Prefill
from .rows import Rows


class Outputs:
    """Scores, raw logits, hidden states and attention weights of committed tokens.

    Args:
        config: says which of them are wanted.
        rows: the rows of the call; what lies beyond a row's length when the results are read is left out.
        prefill: the pass over the prompts.
    """

    def __init__(self, config: GenerationConfig, rows: Rows, prefill: Prefill):
        keep = config.return_dict_in_generate
        self.rows, self.prefill = rows, prefill
        self.wanted = {
            "logits": bool(keep and config.output_logits),
            "scores": bool(keep and config.output_scores),
            "hidden_states": bool(keep and config.output_hidden_states),
            "attentions": bool(keep and config.output_attentions),
        }
        self.steps = {name: [[] for _ in rows.lengths] for name in self.wanted}

    def keeps_weights(self, model) -> bool:
        """Whether passes have to collect attention weights: only eager attention gives any."""
        return self.wanted["attentions"] and attention_implementation(model) == "eager"

    def add(self, index: int, of: Pass, first: int, count: int, scores: torch.Tensor | None) -> None:
        """Keeps what pass `of` says about `count` committed tokens of row `index`.

        Args:
            first: packed index of the token before the first of them.
            scores: `[count or more, V]`, processed.
        """
        if self.wanted["logits"]:
            self.steps["logits"][index].extend(of.logits[first : first + count].float())
        if self.wanted["scores"]:
            self.steps["scores"][index].extend(scores[:count].float())
        if of is self.prefill:
            return
        if self.wanted["hidden_states"]:
            self.steps["hidden_states"][index].extend(
                [layer[0, at] for layer in of.hidden_states] for at in range(first, first + count)
            )
        if self.wanted["attentions"]:
            self.steps["attentions"][index].extend(of.attention_rows(at) for at in range(first, first + count))

    def scores(self, columns: int | None = None):
        """Processed scores per step, up to `columns` columns; `None` where not wanted."""
        return self._values("scores", columns)

    def logits(self):
        return self._values("logits")

    def _values(self, name: str, columns: int | None = None):
        if not self.wanted[name]:
            return None
        lengths = [min(length, columns or length) - self.rows.prompt_width for length in self.rows.lengths]
        rows = self.steps[name]
        blank = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([row[step] if step < n else blank for row, n in zip(rows, lengths, strict=True)])
            for step in range(max(lengths))
        )

    def hidden_states(self):
        """Per step and layer `[b, n, d]`: n is 1, at the first step the prompt's width."""
        if not self.wanted["hidden_states"]:
            return None
        return (self.prefill.hidden_states, *self._later_steps("hidden_states", lambda row, state, step: state[None]))

    def attentions(self):
        """Per step and layer `[b, heads, n, keys]`; nothing in each step where the target's attention gives none."""
        if not self.wanted["attentions"]:
            return None
        return (self.prefill.attentions, *self._later_steps("attentions", self._weights))

    def _later_steps(self, name: str, shaped):
        # The token of step s comes from the pass over the token of step s - 1; step 0 is the prompt.
        lengths = [length - self.rows.prompt_width - 1 for length in self.rows.lengths]
        for step in range(max(lengths)):
            rows = [row[step] if step < n else None for row, n in zip(self.steps[name], lengths, strict=True)]
            layers = len(next(row for row in rows if row is not None))
            yield tuple(self._stack(rows, layer, step, shaped) for layer in range(layers))

    def _stack(self, rows: list, layer: int, step: int, shaped) -> torch.Tensor:
        made = [None if row is None else shaped(i, row[layer], step) for i, row in enumerate(rows)]
        blank = torch.zeros_like(next(value for value in made if value is not None))
        return torch.stack([blank if value is None else value for value in made])

    def _weights(self, index: int, kept: tuple[torch.Tensor, int | None], step: int) -> torch.Tensor:
        """Weights `[heads, 1, keys]` over the columns that plain `generate`'s cache holds at this step."""
        weights, window = kept
        columns = self.rows.past + self.rows.prompt_width + step + 1
        slots = self.rows.prompt_slots[index] + step + 1
        whole = weights.new_zeros(weights.shape[0], 1, columns)
        whole[:, 0, columns - slots :] = weights[:, :slots]
        return whole if window is None else whole[..., -window:]


class Stream:
    """Hands final tokens to the caller's streamer, one step of all rows at a time, as plain `generate` does."""

    def __init__(self, streamer, rows: Rows):
        self.streamer, self.rows, self.sent = streamer, rows, rows.prompt_width

    def put(self, settled: int) -> None:
        """Streams the columns before `settled`."""
        if self.streamer is not None:
            for column in range(self.sent, settled):
                self.streamer.put(self.rows.tokens[:, column].cpu())
        self.sent = max(self.sent, settled)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


def fill_cache(cache, finished_keys: dict[int, list], rows: Rows) -> None:
    """Appends every row's keys and values that `cache` doesn't hold, padded as plain `generate` leaves it."""
    held = cache.get_seq_length()
    # The last token was committed but never read.
    longest = rows.past + max(rows.lengths) - 1
    if longest <= held:
        return
    for layer in range(len(finished_keys[0])):
        if finished_keys[0][layer] is None:  # a layer that attends to another one's keys
            continue
        keys, values = [], []
        for index in range(len(rows.lengths)):
            slots = rows.slots(index) - 1
            first = rows.past + rows.prompt_width - rows.prompt_slots[index]
            for store, states in zip((keys, values), finished_keys[index][layer], strict=True):
                whole = states.new_zeros(states.shape[0], longest, states.shape[2])
                whole[:, first : first + slots] = states[:, :slots]
                store.append(whole[:, held:])
        keys, values = torch.stack(keys), torch.stack(values)
        # Not by the cache's own `update` where it can be helped: that one offloads layers as a forward pass needs it.
        if layer < len(cache.layers):
            cache.layers[layer].update(keys, values)
        else:
            cache.update(keys, values, layer)
