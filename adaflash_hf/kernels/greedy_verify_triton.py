"""Greedy verification in two kernels: the argmax of every packed token in one pass over the scores, split over the
vocabulary when there are few tokens, then the leading matches of each row."""

import torch
import triton
import triton.language as tl

from .dispatch import num_splits, on_its_device
from .greedy_verify import no_tokens


BLOCK_V = 4096
BLOCK_K = 16
_NO_INDEX = tl.constexpr(2147483647)


@triton.jit
def argmax_kernel(
    scores,  # [T, V]
    best_values,  # float32 [T, splits], NaN where the part holds one
    best_ids,  # int32 [T, splits]
    stride,  # of a row of `scores`
    vocab_size,
    part,  # ids per split
    BLOCK: tl.constexpr,
):
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    first = split * part
    last = tl.minimum(first + part, vocab_size)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + lanes
    has_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(first, last, BLOCK):
        ids = start + lanes
        x = tl.load(scores + token * stride + ids, mask=ids < last, other=float("-inf")).to(tl.float32)
        # Strictly greater, so that each lane keeps the lowest id of equal maxima.
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
        has_nan |= (x != x).to(tl.int32)
    value = tl.max(best, axis=0)
    index = tl.min(tl.where(best == value, best_id, _NO_INDEX), axis=0)
    value = tl.where(tl.max(has_nan, axis=0) > 0, float("nan"), value)
    at = token * tl.num_programs(1) + split
    tl.store(best_values + at, value)
    tl.store(best_ids + at, index)


@triton.jit
def _combine(best_values, best_ids, positions, exists, splits, BLOCK_S: tl.constexpr):
    """The argmax at packed `positions` `[K]`, -1 where a part holds NaN."""
    parts = tl.arange(0, BLOCK_S)
    at = positions[:, None] * splits + parts[None, :]
    mask = exists[:, None] & (parts < splits)[None, :]
    values = tl.load(best_values + at, mask=mask, other=float("-inf"))
    ids = tl.load(best_ids + at, mask=mask, other=_NO_INDEX)
    has_nan = tl.max((values != values).to(tl.int32), axis=1) > 0
    values = tl.where(values != values, float("-inf"), values)
    highest = tl.max(values, axis=1)
    choice = tl.min(tl.where(values == highest[:, None], ids, _NO_INDEX), axis=1)
    return tl.where(has_nan, -1, choice)


@triton.jit
def accept_argmax_kernel(
    best_values,  # float32 [T, splits]
    best_ids,  # int32 [T, splits]
    tokens,  # int64 [T]
    offsets,  # int64 [rows + 1]
    accepted,  # int64 [rows]
    bonus,  # int64 [rows]
    splits,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - start
    steps = tl.arange(0, BLOCK_K)
    stop = count - 1
    for first in range(0, count - 1, BLOCK_K):
        k = first + steps
        exists = k < count - 1
        choice = _combine(best_values, best_ids, start + k, exists, splits, BLOCK_S)
        following = tl.load(tokens + start + k + 1, mask=exists, other=-2)
        stop = tl.minimum(stop, tl.min(tl.where(exists & (choice != following), k, count), axis=0))
    here = steps < tl.minimum(count, 1)
    choice = _combine(best_values, best_ids, start + stop + steps * 0, here, splits, BLOCK_S)
    choice = tl.max(tl.where(here, choice, -1), axis=0)
    tl.store(accepted + row, tl.maximum(stop, 0))
    tl.store(bonus + row, choice.to(tl.int64))


@on_its_device
def greedy_verify_triton(scores: torch.Tensor, tokens: torch.Tensor, offsets: torch.Tensor):
    """Launches the kernels; arguments and results as in `greedy_verify`."""
    num_tokens, vocab_size = scores.shape
    rows = len(offsets) - 1
    if not num_tokens or not rows:
        return no_tokens(offsets)
    splits = num_splits(num_tokens, vocab_size, BLOCK_V, scores.device)
    best_values = torch.empty(num_tokens, splits, dtype=torch.float32, device=scores.device)
    best_ids = torch.empty(num_tokens, splits, dtype=torch.int32, device=scores.device)
    accepted = torch.empty(rows, dtype=torch.long, device=scores.device)
    bonus = torch.empty_like(accepted)
    part = triton.cdiv(vocab_size, splits)
    argmax_kernel[(num_tokens, splits)](
        scores, best_values, best_ids, scores.stride(0), vocab_size, part, BLOCK=BLOCK_V, num_warps=8
    )
    accept_argmax_kernel[(rows,)](
        best_values,
        best_ids,
        tokens.contiguous(),
        offsets.contiguous(),
        accepted,
        bonus,
        splits,
        BLOCK_K=BLOCK_K,
        BLOCK_S=triton.next_power_of_2(splits),
        num_warps=1,
    )
    return accepted, bonus
