"""What a call returns beside its sequences: scores and logits per step, and the filled cache."""

import torch
from transformers import GenerationConfig

from .rows import Rows


def fill_cache(cache, finished_keys: dict[int, list], rows: Rows) -> None:
    """Writes every row's keys and values into the caller's cache, left-padded as plain `generate` leaves it."""
    longest = max(rows.lengths) - 1
    for layer in range(len(finished_keys[0])):
        keys, values = [], []
        for index in range(len(rows.lengths)):
            for store, states in zip((keys, values), finished_keys[index][layer], strict=True):
                whole = states.new_zeros(states.shape[0], longest, states.shape[2])
                whole[:, rows.padding[index] : rows.padding[index] + states.shape[1]] = states
                store.append(whole)
        cache.update(torch.stack(keys), torch.stack(values), layer)


class Outputs:
    """Scores and raw logits per generated token, in the shape of plain `generate`: one `[b, V]` tensor per step.
    Where a row had already finished, the entry is 0."""

    def __init__(self, batch_size: int, config: GenerationConfig):
        self.wanted = {"logits": config.output_logits, "scores": config.output_scores}
        self.rows = {name: [[] for _ in range(batch_size)] for name in self.wanted}

    def add(self, index: int, logits: torch.Tensor, scores: torch.Tensor | None) -> None:
        for name, values in (("logits", logits), ("scores", scores)):
            if self.wanted[name]:
                self.rows[name][index].extend(values.float())

    def _steps(self, name: str):
        if not self.wanted[name]:
            return None
        rows = self.rows[name]
        blank = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in rows])
            for step in range(max(len(row) for row in rows))
        )

    def logits(self):
        return self._steps("logits")

    def scores(self):
        return self._steps("scores")
