"""Greedy verification: keep drafted tokens while each is the target's argmax, then add the target's own token.

Tokens of all rows are packed: each row's anchor, then its drafted tokens. The scores at one packed token are about
the next one. T = packed tokens, V = vocabulary, rows = sequences.
"""

import itertools

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
    choice = argmax(scores)
    # argmax takes the first NaN for the maximum.
    choice = choice.masked_fill(scores.gather(1, choice[:, None])[:, 0].isnan(), -1)
    accepted = leading_count(choice == tokens.roll(-1), offsets)
    at = (offsets[:-1] + accepted).clamp(max=len(tokens) - 1)
    return accepted, choice[at].masked_fill_(offsets.diff() == 0, -1)


def argmax(scores: torch.Tensor) -> torch.Tensor:
    """int64 `[T]`, of scores `[T, V]`: as `torch.argmax`, which is ten times slower on a CPU than NumPy's. Scores that
    NumPy has no (fast) arithmetic for are widened row by row, in memory that stays in the processor's cache."""
    if scores.device.type != "cpu" or scores.dtype == torch.float64:
        return scores.argmax(dim=-1)
    scores = scores.detach()
    if scores.dtype == torch.float32:
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    row = torch.empty(scores.shape[1])
    values = row.numpy()
    choice = []
    for narrow in scores:
        row.copy_(narrow)
        choice.append(int(values.argmax()))
    return torch.tensor(choice, dtype=torch.long)


def leading_count(matches: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Leading matches per row int64 `[rows]`, from bool `[T]`, which is ignored at a row's last token. Counted on the
    host, which takes less time than two tensor operations."""
    flags, bounds = matches.tolist(), offsets.tolist()
    counts = []
    for start, end in itertools.pairwise(bounds):
        drafts = flags[start : end - 1] if end > start else []
        counts.append(drafts.index(False) if False in drafts else len(drafts))
    return torch.tensor(counts, device=offsets.device)


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
