"""The sequences of a call: their committed tokens, their places in the caches, and which of them still generate.

A *column* counts from the left of the caller's `input_ids`, padding included. A *slot* is a place in a `RaggedCache`:
slot j of a row holds the j-th token that the row may look at, those of a reused cache included.
"""

import collections
from collections.abc import Sequence

import torch


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` int64 `[b, longest]` of prompts given as token ids, padded with 0."""
    width = max(map(len, prompts))
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    return {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}


# Columns that no row reaches: a tokenizer without a limit names 10**30, which no tensor holds.
_FOREVER = 2**40


class Rows:
    """Committed tokens of all rows of a call, and which of them are live.

    `tokens` is `[batch, capacity]` with the caller's left padding, and grows; `lengths[i]` counts row i's columns,
    padding included; `live` lists the batch indices of the rows still generating, in the order of the cache's rows;
    `waiting` those that have yet to start.

    Args:
        input_ids: int64 `[b, L]`.
        mask: bool `[b, past + L]`, columns that may be looked at; `past` of them are in a reused cache and not among
            the ids.
        max_length: most columns of a row.
        pad_token_id: fills the columns after a row's end.
    """

    def __init__(self, input_ids: torch.Tensor, mask: torch.Tensor, max_length: int, pad_token_id: int):
        batch, width = input_ids.shape
        self.prompt_width, self.max_length, self.pad_token_id = width, min(max_length, _FOREVER), pad_token_id
        self.past = mask.shape[1] - width
        self.tokens = input_ids
        self._reserve(width + 1)
        self.prompt_slots = mask.sum(dim=1).tolist()
        self.lengths = [width] * batch
        self.live: list[int] = []
        self.waiting = collections.deque(range(batch))
        self._visible = mask[:, self.past :]
        # Slot of a row's first token that this call's drafter gets to see.
        self.context_starts = [0] * batch

    def admit(self, most: int) -> None:
        """Makes up to `most` waiting rows live, behind the others."""
        self.live.extend(self.waiting.popleft() for _ in range(min(most, len(self.waiting))))

    def _reserve(self, columns: int) -> None:
        """Makes room for so many columns."""
        if columns > self.tokens.shape[1]:
            grown = min(max(columns, 2 * self.tokens.shape[1], 256), max(self.max_length, columns))
            missing = grown - self.tokens.shape[1]
            self.tokens = torch.nn.functional.pad(self.tokens, (0, missing), value=self.pad_token_id)

    def padding(self, index: int) -> int:
        """Columns before a row's prompt that it may not look at."""
        return self.prompt_width - int(self._visible[index].sum())

    def prompt(self, index: int) -> torch.Tensor:
        """The visible tokens of a row's prompt, int64 `[n]`."""
        return self.tokens[index, : self.prompt_width][self._visible[index]]

    def cached(self, index: int) -> torch.Tensor:
        """The tokens of a row that the caches hold, int64 `[n]`: all that it may look at, less the last."""
        return torch.cat([self.prompt(index), self.tokens[index, self.prompt_width : self.lengths[index]]])[:-1]

    def commit(self, index: int, tokens: list[int]) -> None:
        """Appends tokens to the row at a batch index."""
        length = self.lengths[index]
        self._reserve(length + len(tokens))
        self.tokens[index, length : length + len(tokens)] = torch.tensor(tokens, device=self.tokens.device)
        self.lengths[index] += len(tokens)

    def trim(self, index: int, length: int) -> None:
        """Takes back what lies beyond `length` columns."""
        self.tokens[index, length:] = self.pad_token_id
        self.lengths[index] = min(self.lengths[index], length)

    def slots(self, index: int) -> int:
        """Slots that row `index`'s committed tokens take."""
        return self.lengths[index] - self.prompt_width + self.prompt_slots[index]

    def prefix(self, row: int) -> torch.Tensor:
        index = self.live[row]
        return self.tokens[index : index + 1, : self.lengths[index]]

    def anchors(self) -> torch.Tensor:
        return torch.stack([self.tokens[i, self.lengths[i] - 1] for i in self.live])

    def positions(self) -> list[int]:
        """Slot of each live row's last committed token."""
        return [self.slots(i) - 1 for i in self.live]

    def drafter_positions(self) -> list[int]:
        """Position of each live row's last committed token in the drafter's context."""
        return [self.slots(i) - 1 - self.context_starts[i] for i in self.live]

    def room(self) -> list[int]:
        """Drafted tokens that each live row can use: what is left, less the bonus token."""
        return [self.max_length - self.lengths[i] - 1 for i in self.live]
