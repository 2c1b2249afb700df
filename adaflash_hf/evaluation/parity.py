"""Where two generated sequences part, and whether rounding explains it.

In bfloat16 a pass over several tokens rounds differently from one over a single token, so two exact decoders can
choose differently where the two highest logits are nearly equal. `parting` measures that instead of assuming it.
"""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass
class Parting:
    """The first generated token at which two sequences differ.

    Attributes:
        position: its index among the generated tokens.
        gap: the target's logit of the first sequence's token minus that of the other's.
        spacing: distance of neighbouring numbers of the model's dtype at these logits.
    """

    position: int
    gap: float
    spacing: float

    @property
    def is_rounding(self) -> bool:
        """Whether the two logits lie within a few roundings of each other (4 steps of the dtype)."""
        return abs(self.gap) <= 4 * self.spacing


@torch.no_grad()
def parting(model: PreTrainedModel, plain: torch.Tensor, other: torch.Tensor, prompt_length: int) -> Parting | None:
    """Compares rows int64 `[n]` and `[m]` that share a prompt; `None` when they are equal."""
    length = min(len(plain), len(other))
    different = (plain[:length] != other[:length]).nonzero()
    if not len(different):
        if len(plain) == len(other):
            return None
        raise ValueError(f"One sequence ends at {length} where the other goes on: a stop condition was missed.")
    at = int(different[0])
    logits = model(plain[None, :at].to(model.device)).logits[0, -1].float()
    first, second = logits[plain[at]].item(), logits[other[at]].item()
    spacing = torch.finfo(model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(first), abs(second), 1e-6)))
    return Parting(at - prompt_length, first - second, spacing)
