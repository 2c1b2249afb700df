"""The sequences of a call: their committed tokens and which of them still generate."""

import collections

import torch


class Rows:
    """Committed tokens of all rows of a call, and which of them are live.

    `tokens` is `[batch, capacity]` with the caller's left padding; `lengths[i]` counts row i's tokens, padding
    included; `live` lists the batch indices of the rows still generating, in the order of the cache's rows; `waiting`
    those that have yet to start.
    """

    def __init__(self, input_ids: torch.Tensor, attention_mask, max_length: int, pad_token_id: int):
        batch, width = input_ids.shape
        self.prompt_width, self.max_length = width, max_length
        self.tokens = input_ids.new_full((batch, max(max_length, width)), pad_token_id)
        self.tokens[:, :width] = input_ids
        if attention_mask is None:
            self.padding = [0] * batch
        else:
            self.padding = (width - attention_mask[:, :width].long().sum(dim=1)).tolist()
        self.lengths = [width] * batch
        self.live: list[int] = []
        self.waiting = collections.deque(range(batch))

    def admit(self, most: int) -> list[torch.Tensor]:
        """Makes up to `most` waiting rows live, behind the others; their prompts, int64 `[length]` without padding."""
        entering = [self.waiting.popleft() for _ in range(min(most, len(self.waiting)))]
        self.live.extend(entering)
        return [self.tokens[index, self.padding[index] : self.prompt_width] for index in entering]

    def commit(self, index: int, tokens: list[int]) -> None:
        """Appends tokens to the row at a batch index."""
        length = self.lengths[index]
        self.tokens[index, length : length + len(tokens)] = torch.tensor(tokens, device=self.tokens.device)
        self.lengths[index] += len(tokens)

    def prefix(self, row: int) -> torch.Tensor:
        index = self.live[row]
        return self.tokens[index : index + 1, : self.lengths[index]]

    def anchors(self) -> torch.Tensor:
        return torch.stack([self.tokens[i, self.lengths[i] - 1] for i in self.live])

    def positions(self) -> list[int]:
        """Position of each live row's last committed token, padding not counted."""
        return [self.lengths[i] - 1 - self.padding[i] for i in self.live]

    def room(self) -> list[int]:
        """Drafted tokens that each live row can use: what is left, less the bonus token."""
        return [self.max_length - self.lengths[i] - 1 for i in self.live]
