"""Stopping criteria, applied token by token."""

import torch
from transformers import StoppingCriteriaList
from transformers.generation import stopping_criteria as hf


class Stopping:
    """Applies stopping criteria token by token, so that a row ends at the first token that any of them names."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.eos: set[int] = set()
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is hf.EosTokenCriteria:
                self.eos.update(criterion.eos_token_id.tolist())
            elif type(criterion) is not hf.MaxLengthCriteria:
                self.others.append(criterion)

    def cut(self, new_tokens: list[int], prefix: torch.Tensor, room: int) -> tuple[list[int], bool]:
        """The new tokens that are kept, and whether the row is finished."""
        new_tokens = new_tokens[:room]
        for k, token in enumerate(new_tokens):
            finished = token in self.eos or k + 1 == room
            if self.others:
                tail = torch.tensor([new_tokens[: k + 1]], device=prefix.device)
                finished |= bool(self.others(torch.cat([prefix, tail], dim=1), None).all())
            if finished:
                return new_tokens[: k + 1], True
        return new_tokens, False
