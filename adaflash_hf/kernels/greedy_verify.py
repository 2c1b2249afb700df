"""Greedy verification: keep drafted tokens while each is the target's argmax, then add the target's own token.

Tokens of all rows are packed: each row's anchor, then its drafted tokens. The scores at one packed token are about
the next one. T = packed tokens, V = vocabulary, rows = sequences.
"""

import torch

from ..errors import AdaFlashValueError
from .dispatch import takes_triton


def greedy_verify(
    scores: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts the leading drafts that are the argmax, ties to the lowest id as in `torch.argmax`.

    Args:
        scores: `[T, V]`, the target's scores at the packed tokens; rows may be strided, the vocabulary may not.
        tokens: int64 `[T]`, anchor and drafts of each row.
        offsets: int64 `[rows + 1]`, from 0 to T; row r holds packed tokens `offsets[r]` to `offsets[r + 1] - 1`.

    Returns:
        `accepted` int64 `[rows]`, drafts kept, and `bonus` int64 `[rows]`, the token after them. A position whose
        scores hold NaN accepts nothing, and where the bonus token would come from one it is -1. A row without
        tokens has 0 and -1.

    Raises:
        AdaFlashValueError: for shapes that don't fit together or a strided vocabulary.
    """
    check_packed(scores, tokens, offsets)
    if takes_triton(scores):
        from .greedy_verify_triton import greedy_verify_triton

        return greedy_verify_triton(scores, tokens, offsets)
    return greedy_verify_torch(scores, tokens, offsets)


def greedy_verify_torch(scores, tokens, offsets) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch twin of `greedy_verify`."""
    if not len(tokens):
        return no_tokens(offsets)
    choice = scores.argmax(dim=-1)
    # argmax takes the first NaN for the maximum.
    choice = torch.where(scores.gather(1, choice[:, None])[:, 0].isnan(), -1, choice)
    following = tokens.roll(-1)
    return leading(choice == following, choice, offsets)


def leading(matches: torch.Tensor, choice: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Leading matches per row, and the choice that follows them.

    Args:
        matches: bool `[T]`, whether the draft after each packed token is kept; ignored at a row's last token.
        choice: int64 `[T]`, -1 where there is none.
        offsets: int64 `[rows + 1]`.
    """
    accepted = leading_count(matches, offsets)
    at = (offsets[:-1] + accepted).clamp(max=len(matches) - 1)
    return accepted, torch.where(offsets.diff() > 0, choice[at], -1)


def leading_count(matches: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Leading matches per row int64 `[rows]`, without a host synchronisation."""
    index = torch.arange(len(matches), device=matches.device)
    matches = matches & (offsets[row_of(index, offsets) + 1] - 1 != index)
    next_miss = torch.where(matches, len(matches), index).flip(0).cummin(0).values.flip(0)
    starts = offsets[:-1]
    return torch.where(offsets.diff() > 0, next_miss[starts.clamp(max=len(matches) - 1)] - starts, 0)


def row_of(index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The row that holds each packed token."""
    return torch.searchsorted(offsets, index, right=True) - 1


def no_tokens(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What every verification returns when all rows are empty."""
    accepted = torch.zeros(len(offsets) - 1, dtype=torch.long, device=offsets.device)
    return accepted, accepted - 1


def check_packed(scores: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor) -> None:
    """Refuses shapes that don't belong together."""
    if scores.ndim != 2 or tokens.shape != scores.shape[:1]:
        raise AdaFlashValueError(
            f"`scores` is {list(scores.shape)} and `tokens` {list(tokens.shape)}: pass [T, V] and [T]."
        )
    if offsets.ndim != 1 or not len(offsets) or offsets.dtype != torch.long or tokens.dtype != torch.long:
        raise AdaFlashValueError("`tokens` and `offsets` must be int64, and `offsets` [rows + 1].")
    check_rows_contiguous("scores", scores)


def check_rows_contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise AdaFlashValueError(f"`{name}` is strided along its last dimension: pass `{name}.contiguous()`.")
