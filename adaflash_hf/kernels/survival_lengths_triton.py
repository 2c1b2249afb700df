"""Length scheduling in two kernels, without a sort: every position counts and sums the positions that are taken before
it, which gives the rate of stopping there; then the best stop is found, and what it took of every row is counted."""

import torch
import triton
import triton.language as tl

from .dispatch import on_its_device


BLOCK_I, BLOCK_J = 32, 64
_NO_INDEX = tl.constexpr(2147483647)


@triton.jit
def _keys(survival, room, index, stride, rows, positions, BLOCK_R: tl.constexpr):
    """Survival of the positions `index`, and an int64 that orders them: survival's bits (non-negative floats order as
    integers) above the place. Places are depth first, so equal survivals go by depth and then by row. -1 for what
    can't be taken."""
    row, step = index % BLOCK_R, index // BLOCK_R
    exists = (row < rows) & (step < positions)
    value = tl.load(survival + row * stride + step, mask=exists, other=-1.0)
    usable = exists & (value >= 0) & (step < tl.load(room + row, mask=exists, other=0))
    # + 0.0 makes a negative zero positive.
    bits = (value + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return value, tl.where(usable, (bits << 32) | (index ^ _NO_INDEX).to(tl.int64), -1)


@triton.jit
def rates_kernel(
    survival,  # float32 [rows, K]
    costs,  # [most + 1]
    room,  # int64 [rows]
    rates,  # float64 [BLOCK_K, BLOCK_R]: committed tokens over time if this position is the last one taken
    taken,  # int32 [BLOCK_K, BLOCK_R]: positions taken by then
    stride,  # of a row of `survival`
    rows,
    positions,  # K
    num_costs,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    _, key = _keys(survival, room, i, stride, rows, positions, BLOCK_R)
    count = tl.zeros([BLOCK_I], tl.int32)
    # float64, so that the order of the sum hardly ever decides.
    total = tl.zeros([BLOCK_I], tl.float64)
    for first in range(0, SIZE, BLOCK_J):
        value, other = _keys(survival, room, first + tl.arange(0, BLOCK_J), stride, rows, positions, BLOCK_R)
        before = other[None, :] >= key[:, None]
        count += tl.sum(before.to(tl.int32), axis=1)
        total += tl.sum(tl.where(before, value[None, :].to(tl.float64), 0.0), axis=1)
    usable = (key >= 0) & (i < SIZE)
    possible = usable & (rows + count < num_costs)
    cost = tl.load(costs + rows + count, mask=possible, other=1.0).to(tl.float64)
    tl.store(rates + i, tl.where(possible, (rows + total) / cost, -1.0), mask=i < SIZE)
    tl.store(taken + i, tl.where(usable, count, _NO_INDEX), mask=i < SIZE)


@triton.jit
def choose_kernel(
    rates,  # float64 [BLOCK_K, BLOCK_R]
    taken,  # int32 [BLOCK_K, BLOCK_R]
    costs,  # [most + 1]
    lengths,  # int64 [rows]
    rows,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.arange(0, BLOCK_R)
    at = tl.arange(0, BLOCK_K)[:, None] * BLOCK_R + row[None, :]
    rate, count = tl.load(rates + at), tl.load(taken + at)
    # Taking nothing commits one token per row; between equal rates the fewest tokens.
    none = rows / tl.load(costs + rows).to(tl.float64)
    highest = tl.max(tl.max(rate, axis=1), axis=0)
    best = tl.min(tl.min(tl.where(rate == highest, count, _NO_INDEX), axis=1), axis=0)
    best = tl.where(highest > none, best, 0)
    chosen = tl.sum((count <= best).to(tl.int64), axis=0)
    tl.store(lengths + row, chosen, mask=row < rows)


@on_its_device
def survival_lengths_triton(survival: torch.Tensor, costs: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Launches the kernels; arguments and result as in `survival_lengths`."""
    rows, positions = survival.shape
    device = survival.device
    block_r, block_k = triton.next_power_of_2(rows), triton.next_power_of_2(positions)
    size = block_r * block_k
    survival, costs, room = survival.contiguous(), costs.contiguous().to(device), room.contiguous().to(device)
    rates = torch.empty(size, dtype=torch.float64, device=device)
    taken = torch.empty(size, dtype=torch.int32, device=device)
    lengths = torch.empty(rows, dtype=torch.long, device=device)
    rates_kernel[(triton.cdiv(size, BLOCK_I),)](
        survival,
        costs,
        room,
        rates,
        taken,
        survival.stride(0),
        rows,
        positions,
        len(costs),
        SIZE=size,
        BLOCK_R=block_r,
        BLOCK_I=BLOCK_I,
        BLOCK_J=BLOCK_J,
        num_warps=4,
    )
    choose_kernel[(1,)](rates, taken, costs, lengths, rows, BLOCK_R=block_r, BLOCK_K=block_k, num_warps=4)
    return lengths
