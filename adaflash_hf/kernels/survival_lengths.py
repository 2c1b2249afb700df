"""How many drafted tokens of each row to verify, so that expected committed tokens per second are highest.

Committing costs c(T), the time of one forward pass over T packed tokens, where T counts every row's anchor and the
drafted tokens put up for verification. A drafted position is committed with its survival, the probability that it and
all before it are accepted; every row also commits one token for certain. So positions are taken in order of survival
over all rows, and of all prefixes of that order the one with the highest (rows + sum of survivals) / c(T) is chosen.
Survival falls along a row, so what is taken of a row is a prefix of its draft.
"""

import numpy as np
import torch

from ..errors import AdaFlashValueError
from .dispatch import takes_triton


# Positions, padded, that one program of the Triton path looks through; more go to the twin.
MOST_POSITIONS = 4096


def survival_lengths(survival: torch.Tensor, costs: torch.Tensor, room: torch.Tensor | None = None) -> torch.Tensor:
    """Drafted tokens to verify per row, on the device of `survival`; the Triton path doesn't wait for the host.

    Args:
        survival: float32 `[rows, K]`, each row non-increasing (`AdaptiveLengthHead.survival`), maybe times a factor
            per row whose mean is 1. NaN and negative entries are never taken.
        costs: float32 or float64 `[most + 1]`, positive: `costs[T]` is the time of a forward pass over T tokens, in
            any unit. `costs[0]` isn't read. No more than `most` tokens are put up, anchors included.
        room: int64 `[rows]`, most drafted tokens that a row can use; K if left out.

    Returns:
        int64 `[rows]`. Between equal rates the fewest tokens; between equal survivals the shallower position, then the
        lower row.

    Raises:
        AdaFlashValueError: for shapes that don't fit together, or a table shorter than the anchors alone.
    """
    if survival.ndim != 2 or costs.ndim != 1 or len(costs) <= len(survival):
        raise AdaFlashValueError(
            f"`survival` is {list(survival.shape)} and `costs` {list(costs.shape)}: pass [rows, K] and a table that "
            "reaches at least the number of rows."
        )
    if room is None:
        room = torch.full_like(survival[:, 0], survival.shape[1], dtype=torch.long) if survival.shape[1] else None
    if not survival.numel():
        return torch.zeros(len(survival), dtype=torch.long, device=survival.device)
    survival = survival.float()
    if takes_triton(survival) and _padded_size(survival) <= MOST_POSITIONS:
        from .survival_lengths_triton import survival_lengths_triton

        return survival_lengths_triton(survival, costs, room)
    return survival_lengths_torch(survival, costs, room)


def survival_lengths_torch(survival: torch.Tensor, costs: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """The twin of `survival_lengths`, on the host: on so few numbers NumPy takes a third of the time of tensor
    operations."""
    rows, positions = survival.shape
    values, seconds, most = (x.detach().cpu().numpy() for x in (survival, costs, room))
    seconds = seconds.astype(np.float64)
    usable = (values >= 0) & (np.arange(positions) < most[:, None])
    # Position-major, so that a stable sort takes the shallower of equal survivals first.
    values = np.where(usable, values, -1.0).T.ravel()
    order = np.argsort(-values, kind="stable")
    # float64, so that the order of the sum hardly ever decides.
    values = values[order].astype(np.float64)
    totals = rows + np.arange(1, len(values) + 1)
    rates = (rows + values.cumsum()) / seconds[np.minimum(totals, len(seconds) - 1)]
    rates = np.where((values >= 0) & (totals < len(seconds)), rates, -1.0)
    best = np.concatenate([[rows / seconds[rows]], rates]).argmax()
    return torch.from_numpy(np.bincount(order[:best] % rows, minlength=rows)).to(survival.device)


def _padded_size(survival: torch.Tensor) -> int:
    """Positions with both sides rounded up to powers of two."""
    rows, positions = survival.shape
    return (1 << (rows - 1).bit_length()) * (1 << (positions - 1).bit_length())
