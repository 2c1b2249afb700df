"""Ragged attention with an online softmax. A program takes one tile of a row's queries, all heads that share one key
head folded into it, so that keys and values are read once per tile; a few rows with long contexts are split along
the context, and the parts are joined by a second kernel."""

import torch
import triton
import triton.language as tl

from .dispatch import multiprocessors, on_its_device
from .ragged_attention import RaggedQueries, reach


NUM_WARPS, NUM_STAGES = 4, 2


@triton.jit
def ragged_attention_kernel(
    query,  # [T, H, D]
    key,  # [rows, Hkv, S, D]
    value,  # [rows, Hkv, S, D]
    output,  # [splits, T, H, D] contiguous: each part's own softmax average
    sums,  # float32 [splits, T, H]: log2 of each part's sum of exponentials
    offsets,  # int64 [rows + 1]
    positions,  # int64 [T]
    block_ends,  # int64 [rows]; read if not CAUSAL
    sinks,  # [H]; read if HAS_SINKS
    query_stride_t,
    query_stride_h,
    key_stride_r,
    key_stride_h,
    key_stride_s,
    value_stride_r,
    value_stride_h,
    value_stride_s,
    num_queries,  # T
    tiles,  # per row
    part,  # slots per split, a multiple of BLOCK_N
    look_back,  # slots before its own that a query sees; read if HAS_WINDOW
    scale,
    softcap,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    QUERIES: tl.constexpr = BLOCK_M // GROUPS
    row = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles) * QUERIES
    kv_head, split = tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - start
    if first >= count:
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    # Lanes past the tile's queries repeat the last one; they are computed and not stored.
    step = first + m // GROUPS
    live = (step < count) & (m < QUERIES * GROUPS)
    final = tl.minimum(first + QUERIES, count) - 1
    token = start + tl.minimum(step, final)
    head = kv_head * GROUPS + m % GROUPS
    position = tl.load(positions + token)
    if CAUSAL:
        last = position
        high = tl.load(positions + start + final) + 1
    else:
        high = tl.load(block_ends + row) + 1
        last = position * 0 + high - 1
    low = high * 0
    if HAS_WINDOW:
        low = tl.maximum(tl.load(positions + start + first) - look_back, 0)
    low = tl.maximum(low // BLOCK_N * BLOCK_N, split * part).to(tl.int32)
    high = tl.minimum(high, (split + 1) * part).to(tl.int32)

    q_at = token[:, None] * query_stride_t + head[:, None] * query_stride_h + d[None, :]
    q = tl.load(query + q_at, mask=d[None, :] < D, other=0.0)
    key += row * key_stride_r + kv_head * key_stride_h
    value += row * value_stride_r + kv_head * value_stride_h
    # Offsets within a tile are small; what can pass 2**31 is in the scalars before them.
    lanes = tl.arange(0, BLOCK_N)
    k_at = lanes[None, :] * key_stride_s + d[:, None]
    v_at = lanes[:, None] * value_stride_s + d[None, :]
    # A sink is a key without a value; the first part counts it.
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        if split == 0:
            highest = tl.load(sinks + head).to(tl.float32) * LOG2E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    average = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n_first in range(low, high, BLOCK_N):
        n = n_first + lanes
        first_slot = tl.cast(n_first, tl.int64)
        k_mask = (n < high)[None, :] & (d < D)[:, None]
        k = tl.load(key + first_slot * key_stride_s + k_at, mask=k_mask, other=0.0)
        logits = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which has the right limits where the exponential overflows.
            logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 / softcap * logits) + 1.0))
        logits = logits * LOG2E
        visible = (n[None, :] <= last[:, None]) & (n < high)[None, :]
        if HAS_WINDOW:
            visible = visible & (n[None, :] >= (position - look_back)[:, None])
        logits = tl.where(visible, logits, float("-inf"))
        new = tl.maximum(highest, tl.max(logits, axis=1))
        # Where nothing has been visible yet, subtract 0 instead of -inf.
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(logits - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, axis=1)
        v_mask = (n < high)[:, None] & (d < D)[None, :]
        v = tl.load(value + first_slot * value_stride_s + v_at, mask=v_mask, other=0.0)
        average = average * decay[:, None]
        average = tl.dot(weights.to(v.dtype), v, average, input_precision="ieee")
        highest = new
    empty = total == 0
    average = average / tl.where(empty, 1.0, total)[:, None]
    at = (split * num_queries + token) * (tl.num_programs(1) * GROUPS) + head
    tl.store(output + at[:, None] * D + d[None, :], average, mask=live[:, None] & (d < D)[None, :])
    total = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(sums + at, total, mask=live)


@triton.jit
def join_parts_kernel(
    parts,  # float32 [splits, T, H, D]
    sums,  # float32 [splits, T, H]
    output,  # [T, H, D]
    splits,
    D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    size = tl.num_programs(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    log_sum = tl.load(sums + s * size + at, mask=s < splits, other=float("-inf"))
    highest = tl.max(log_sum, axis=0)
    weights = tl.exp2(log_sum - tl.where(highest == float("-inf"), 0.0, highest))
    mask = (s < splits)[:, None] & (d < D)[None, :]
    values = tl.load(parts + (s[:, None] * size + at) * D + d[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, axis=0)
    result = tl.sum(values * weights[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(output + at * D + d, result, mask=d < D)


def block_sizes(dtype: torch.dtype, groups: int, width: int, head_dim: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and BLOCK_D for the queries of a row, `groups` heads each: the largest that don't spill
    registers. Exact float32 products run outside the tensor cores and need more of them."""
    block_n = 16 if dtype == torch.float32 else 64 if head_dim <= 128 else 32
    block_m = min(block_n, triton.next_power_of_2(groups * width))
    return max(16, block_m, triton.next_power_of_2(groups)), block_n, max(16, triton.next_power_of_2(head_dim))


@on_its_device
def ragged_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: RaggedQueries,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    splits: int | None = None,
) -> torch.Tensor:
    """Launches the kernels; arguments and result as in `ragged_attention`. `splits` overrides the number of parts of
    the context."""
    num_queries, heads, head_dim = query.shape
    kv_heads, device = key.shape[1], query.device
    groups = heads // kv_heads
    block_m, block_n, block_d = block_sizes(query.dtype, groups, queries.width, head_dim)
    tiles = triton.cdiv(queries.width, block_m // groups)
    if splits is None:
        # Two programs per multiprocessor, and no part under 256 slots.
        wanted = 2 * multiprocessors(device) // (queries.num_rows * tiles * kv_heads)
        splits = max(1, min(wanted, queries.longest // 256, 64))
    part = triton.cdiv(triton.cdiv(queries.longest, splits), block_n) * block_n
    result = torch.empty(num_queries, heads, head_dim, dtype=query.dtype, device=device)
    parts = result
    if splits > 1:
        parts = torch.empty(splits, num_queries, heads, head_dim, dtype=torch.float32, device=device)
    sums = torch.empty(splits, num_queries, heads, dtype=torch.float32, device=device)
    offsets, positions = queries.offsets.to(device), queries.query_positions.to(device)
    ragged_attention_kernel[(queries.num_rows * tiles, kv_heads, splits)](
        query,
        key,
        value,
        parts,
        sums,
        offsets,
        positions,
        positions if causal else queries.block_ends.to(device).contiguous(),
        query if sinks is None else sinks.contiguous(),
        query.stride(0),
        query.stride(1),
        *key.stride()[:3],
        *value.stride()[:3],
        num_queries,
        tiles,
        part,
        0 if window is None else reach(causal, window),
        float(scale),
        1.0 if softcap is None else float(softcap),
        GROUPS=groups,
        D=head_dim,
        CAUSAL=causal,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        enable_fp_fusion=True,
    )
    if splits > 1:
        join_parts_kernel[(num_queries * heads,)](
            parts,
            sums,
            result,
            splits,
            D=head_dim,
            BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_D=block_d,
            num_warps=1,
        )
    return result
