"""Labels and loss of the adaptive length head, and a new head for a finished drafter.

Labels compare drafts with the teacher, never with the text, and never past the end of a response. `greedy`: position k
is accepted when the drafter's argmax is the teacher's. `sampling`: it is accepted with probability
a_k = sum_v min(p_k, q_k), as in rejection sampling at temperature 1.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..configuration_adaflash import AdaptiveLengthConfig
from ..errors import AdaFlashValueError
from ..modeling_adaflash import AdaFlashDrafter
from ..modeling_length_head import AdaptiveLengthHead


@dataclass
class HeadLabels:
    """What happens to m drafted blocks of k tokens.

    Attributes:
        matches: bool `[m, k]`, the drafter's argmax is the teacher's.
        going_on: bool `[m, k]`, `matches`, and the text goes on with that token, so that the next label holds.
        reached: bool `[m, k]`, supervised, and all before it in `going_on`.
        supervised: bool `[m, k]`.
        acceptance: float32 `[m, k]`, a_k, 1 where unsupervised; `None` for `greedy` labels.
    """

    matches: torch.Tensor
    going_on: torch.Tensor
    reached: torch.Tensor
    supervised: torch.Tensor
    acceptance: torch.Tensor | None = None

    @classmethod
    def of(cls, blocks, result) -> "HeadLabels":
        """From the `Blocks` of a step and its `DistillationLoss`."""
        going_on = result.hits & (blocks.labels == blocks.actual)
        before = torch.cat([torch.ones_like(going_on[:, :1]), going_on[:, :-1]], dim=1).cumprod(dim=1).bool()
        return cls(result.hits, going_on, before & blocks.supervised, blocks.supervised, result.acceptance)

    def targets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Per position, the probability of acceptance given that all before were accepted, and how often that
        position is reached: float32 `[m, k]` both."""
        if self.acceptance is None:
            return self.matches.float(), self.reached.float()
        before = torch.cat([torch.ones_like(self.acceptance[:, :1]), self.acceptance[:, :-1]], dim=1).cumprod(dim=1)
        return self.acceptance, before * self.supervised

    def accepted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted drafted tokens of each block, float32 `[m]` (expected ones for `sampling`), and bool `[m]`, whether
        that is known: not where the text ends, or leaves the path, before the first miss."""
        if self.acceptance is None:
            missed = (self.reached & ~self.matches).any(dim=1)
            known = missed | (self.going_on & self.reached).all(dim=1)
            return (self.matches & self.reached).sum(dim=1).float(), known
        return self.acceptance.cumprod(dim=1).sum(dim=1), self.supervised.all(dim=1)


def length_head_loss(logits, labels: HeadLabels, config: AdaptiveLengthConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of losses, and the count (or total weight) to divide it by.

    `survival` (logits `[m, k]`): cross-entropy at each position, weighted with how often it is reached. `length`
    (logits `[m]`): AdaFlash's squared error to (accepted + 1) / block_size, over blocks where that is known.
    """
    if config.kind == "survival":
        accepted, weight = labels.targets()
        losses = F.binary_cross_entropy_with_logits(logits, accepted, reduction="none")
        return (losses * weight).sum(), weight.sum()
    accepted, known = labels.accepted()
    label = (accepted + 1).clamp(max=config.block_size) / config.block_size
    return ((logits.sigmoid() - label) ** 2 * known).sum(), known.sum()


def attach_length_head(drafter: AdaFlashDrafter, kind: str = "survival", bottleneck_size: int = 256) -> None:
    """Gives a drafter without length head a new one, to be trained with `length_head_only`.

    Raises:
        AdaFlashValueError: when it has one already.
    """
    if drafter.length_head is not None:
        raise AdaFlashValueError("The drafter has a `length_head` already: train that one, or set it to `None` first.")
    config = drafter.config
    config.length_head = AdaptiveLengthConfig(
        kind=kind,
        hidden_size=config.hidden_size,
        block_size=config.block_size,
        num_drafted_tokens=config.num_drafted_tokens,
        bottleneck_size=bottleneck_size,
    )
    drafter.length_head = AdaptiveLengthHead(config.length_head).to(device=drafter.device, dtype=drafter.dtype)
