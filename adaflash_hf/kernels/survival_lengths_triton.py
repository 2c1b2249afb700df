"""Length scheduling in one program: sort all positions by survival, sum, divide by the cost table, take the best
prefix, count what it took of every row."""

import torch
import triton
import triton.language as tl


_NO_INDEX = tl.constexpr(2147483647)


@triton.jit
def survival_lengths_kernel(
    survival,  # float32 [rows, K]
    costs,  # [most + 1]
    room,  # int64 [rows]
    lengths,  # int64 [rows]
    stride,  # of a row of `survival`
    rows,
    positions,  # K
    num_costs,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    SIZE: tl.constexpr = BLOCK_R * BLOCK_K
    # 1. One int64 per position: survival's bits (non-negative floats order as integers) above its place, position
    #    first, so that equal survivals go by depth and then by row. -1 for what can't be taken.
    index = tl.arange(0, SIZE)
    row, step = index % BLOCK_R, index // BLOCK_R
    exists = (row < rows) & (step < positions)
    value = tl.load(survival + row * stride + step, mask=exists, other=-1.0)
    usable = exists & (value >= 0) & (step < tl.load(room + row, mask=exists, other=0))
    # + 0.0 makes a negative zero positive.
    bits = (value + 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(usable, (bits << 32) | (index ^ _NO_INDEX).to(tl.int64), -1)

    # 2. The best prefix of the sorted order.
    ordered = tl.sort(keys, descending=True)
    survivals = tl.where(ordered >= 0, (ordered >> 32).to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    taken = index + 1
    possible = (ordered >= 0) & (rows + taken < num_costs)
    cost = tl.load(costs + rows + taken, mask=possible, other=1.0).to(tl.float64)
    rates = tl.where(possible, (rows + tl.cumsum(survivals.to(tl.float64), axis=0)) / cost, -1.0)
    highest = tl.max(rates, axis=0)
    best = tl.min(tl.where(rates == highest, taken, _NO_INDEX), axis=0)
    none = rows / tl.load(costs + rows).to(tl.float64) >= highest
    threshold = tl.sum(tl.where(taken == best, ordered, 0), axis=0)

    # 3. What it took of each row.
    chosen = ((keys >= threshold) & (keys >= 0)).to(tl.int64)
    counts = tl.sum(tl.reshape(chosen, [BLOCK_K, BLOCK_R]), axis=0)
    out = tl.arange(0, BLOCK_R)
    tl.store(lengths + out, tl.where(none, 0, counts), mask=out < rows)


def survival_lengths_triton(survival: torch.Tensor, costs: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Launches the kernel; arguments and result as in `survival_lengths`."""
    rows, positions = survival.shape
    lengths = torch.empty(rows, dtype=torch.long, device=survival.device)
    survival = survival.contiguous()
    survival_lengths_kernel[(1,)](
        survival,
        costs.contiguous().to(survival.device),
        room.contiguous().to(survival.device),
        lengths,
        survival.stride(0),
        rows,
        positions,
        len(costs),
        BLOCK_R=triton.next_power_of_2(rows),
        BLOCK_K=triton.next_power_of_2(positions),
        num_warps=8,
    )
    return lengths
