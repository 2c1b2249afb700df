"""Rejection sampling in four kernels: normalisers of all packed scores in one pass (split over the vocabulary when
there are few tokens), the drafts that each row keeps, the exponential race at the one position per row that yields
its next token, and the winner of the race's parts."""

import torch
import triton
import triton.language as tl

from .dispatch import num_splits, on_its_device
from .greedy_verify import no_tokens
from .noise import ACCEPT, RACE, key_words
from .noise_triton import exponential_of, philox_words, uniform_of
from .sample_verify import packed_draft_rows


BLOCK_V = 4096
BLOCK_RACE = 1024  # counters, each for four tokens
# Products and sums rounded one by one, as in the twin, so that the two differ as little as can be.
EXACT = {"enable_fp_fusion": False}
BLOCK_K = 16
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_NO_INDEX = tl.constexpr(2147483647)
_ACCEPT, _RACE = tl.constexpr(ACCEPT), tl.constexpr(RACE)


@triton.jit
def logsumexp_kernel(
    scores,  # [N, V]
    sums,  # float32 [N, splits], logsumexp of each part
    stride,  # of a row of `scores`
    vocab_size,
    part,  # tokens per split
    temperature,
    BLOCK: tl.constexpr,
):
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    first = split * part
    last = tl.minimum(first + part, vocab_size)
    # A finite floor, because -inf - -inf is NaN. Each lane keeps its own maximum: one exponential per element.
    highest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first, last, BLOCK):
        ids = start + lanes
        x = tl.load(scores + token * stride + ids, mask=ids < last, other=float("-inf")).to(tl.float32) / temperature
        decay = tl.exp(-tl.abs(x - highest))
        total = tl.where(x > highest, total * decay + 1.0, total + decay)
        highest = tl.maximum(highest, x)
    top = tl.max(highest, axis=0)
    total = tl.sum(total * tl.exp(highest - top), axis=0)
    value = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(sums + token * tl.num_programs(1) + split, tl.where(total != total, float("nan"), value))


@triton.jit
def _normaliser(sums, positions, exists, splits, BLOCK_S: tl.constexpr):
    """logsumexp at packed `positions` `[K]` from its parts; 0 where `exists` is false."""
    parts = tl.arange(0, BLOCK_S)
    mask = exists[:, None] & (parts < splits)[None, :]
    x = tl.load(sums + positions[:, None] * splits + parts[None, :], mask=mask, other=float("-inf"))
    top = tl.maximum(tl.max(tl.where(x != x, _LOWEST, x), axis=1), _LOWEST)
    total = tl.sum(tl.exp(x - top[:, None]), axis=1)
    value = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    value = tl.where(total != total, float("nan"), value)
    return tl.where(exists, value, 0.0)


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit(do_not_specialize=["key0", "key1"])
def accept_sampled_kernel(
    scores,  # [T, V]
    sums,  # float32 [T, splits]
    draft_scores,  # [D, W]
    draft_sums,  # float32 [D, draft_splits]
    draft_columns,  # int32 [V]
    tokens,  # int64 [T]
    offsets,  # int64 [rows + 1]
    draft_rows,  # int64 [rows]
    accepted,  # int64 [rows]
    stride,
    draft_stride,
    splits,
    draft_splits,
    temperature,
    draft_temperature,
    key0,
    key1,
    HAS_DRAFT_SCORES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DRAFT_BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0)
    start = tl.load(offsets + row)
    drafts = tl.load(offsets + row + 1) - start - 1
    steps = tl.arange(0, BLOCK_K)
    stop = drafts
    for first in range(0, drafts, BLOCK_K):
        k = first + steps
        exists = k < drafts
        x = tl.load(tokens + start + k + 1, mask=exists, other=0)
        log_p = _normaliser(sums, start + k, exists, splits, BLOCK_S)
        score = tl.load(scores + (start + k) * stride + x, mask=exists, other=0.0).to(tl.float32)
        p = tl.exp(score / temperature - log_p)
        valid = _is_finite(log_p)
        q = tl.full([BLOCK_K], 1.0, tl.float32)
        if HAS_DRAFT_SCORES:
            at = tl.load(draft_rows + row) + k
            log_q = _normaliser(draft_sums, at, exists, draft_splits, DRAFT_BLOCK_S)
            column = x
            if HAS_COLUMNS:
                column = tl.load(draft_columns + x, mask=exists, other=0).to(tl.int64)
            known = exists & (column >= 0)
            score = tl.load(draft_scores + at * draft_stride + column, mask=known, other=0.0).to(tl.float32)
            q = tl.where(known, tl.exp(score / draft_temperature - log_q), 0.0)
            valid = valid & _is_finite(log_q)
        words, _, _, _ = philox_words(k, row, _ACCEPT, key0, key1)
        kept = valid & (uniform_of(words) * q < p)
        stop = tl.minimum(stop, tl.min(tl.where(exists & (kept == 0), k, drafts), axis=0))
    tl.store(accepted + row, tl.maximum(stop, 0))


@triton.jit(do_not_specialize=["key0", "key1"])
def race_kernel(
    scores,  # [T, V]
    sums,  # float32 [T, splits]
    draft_scores,  # [D, W]
    draft_sums,  # float32 [D, draft_splits]
    draft_columns,  # int32 [V]
    tokens,  # int64 [T]
    offsets,  # int64 [rows + 1]
    draft_rows,  # int64 [rows]
    accepted,  # int64 [rows]
    best_values,  # float32 [2, rows, parts]: the race on the residual, and on p; NaN where there is no distribution
    best_ids,  # int32 [2, rows, parts]
    stride,
    draft_stride,
    vocab_size,
    quarter,  # counters: a quarter of the vocabulary, rounded up
    part,  # counters per program
    splits,
    draft_splits,
    temperature,
    draft_temperature,
    key0,
    key1,
    HAS_DRAFT_SCORES: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DRAFT_BLOCK_S: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    start = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - start
    kept = tl.load(accepted + row)
    lanes = tl.arange(0, BLOCK)
    one = tl.arange(0, 1)
    position = start + kept
    log_p = tl.sum(_normaliser(sums, position + one, one < count, splits, BLOCK_S), axis=0)
    rejected = kept < count - 1
    valid = (count > 0) & _is_finite(log_p)
    rejected_token = tl.load(tokens + position + 1, mask=rejected, other=-1)
    log_q, draft_at = 0.0, kept * 0
    if HAS_DRAFT_SCORES:
        draft_at = tl.load(draft_rows + row) + kept
        exists = one < count - 1 - kept
        log_q = tl.sum(_normaliser(draft_sums, draft_at + one, exists, draft_splits, DRAFT_BLOCK_S), axis=0)
        valid = valid & _is_finite(log_q)

    best = tl.full([BLOCK], 0.0, tl.float32)
    best_id = tl.full([BLOCK], _NO_INDEX, tl.int32)
    best_p = tl.full([BLOCK], 0.0, tl.float32)
    best_p_id = tl.full([BLOCK], _NO_INDEX, tl.int32)
    last = tl.where(valid, tl.minimum((split + 1) * part, quarter), 0)
    drafted_size = tl.where(rejected, vocab_size, 0)  # q is 0 everywhere where no draft was rejected
    for first in range(split * part, last, BLOCK):
        counter = first + lanes
        words = philox_words(counter, row, _RACE, key0, key1)
        # Ids grow from quarter to quarter within a lane, but not from block to block, so ties compare ids too.
        for j in tl.static_range(4):
            ids = j * quarter + counter
            mask = (counter < last) & (ids < vocab_size)
            score = tl.load(scores + position * stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
            p = tl.exp(score / temperature - log_p)
            if HAS_DRAFT_SCORES:
                column = ids
                known = mask & (ids < drafted_size)
                if HAS_COLUMNS:
                    column = tl.load(draft_columns + ids, mask=known, other=-1)
                    known = known & (column >= 0)
                score = tl.load(draft_scores + draft_at * draft_stride + column, mask=known, other=0.0).to(tl.float32)
                q = tl.where(known, tl.exp(score / draft_temperature - log_q), 0.0)
            else:
                q = (ids == rejected_token).to(tl.float32)
            inverse = 1.0 / exponential_of(words[j])
            value, value_p = (p - q) * inverse, p * inverse
            better = mask & ((value > best) | ((value == best) & (value > 0) & (ids < best_id)))
            best, best_id = tl.where(better, value, best), tl.where(better, ids, best_id)
            better = mask & ((value_p > best_p) | ((value_p == best_p) & (ids < best_p_id)))
            best_p, best_p_id = tl.where(better, value_p, best_p), tl.where(better, ids, best_p_id)
    at = row * tl.num_programs(1) + split
    size = tl.num_programs(0) * tl.num_programs(1)
    top, top_p = tl.max(best, axis=0), tl.max(best_p, axis=0)
    tl.store(best_values + at, tl.where(valid, top, float("nan")))
    tl.store(best_ids + at, tl.min(tl.where(best == top, best_id, _NO_INDEX), axis=0))
    tl.store(best_values + size + at, top_p)
    tl.store(best_ids + size + at, tl.min(tl.where(best_p == top_p, best_p_id, _NO_INDEX), axis=0))


@triton.jit
def winner_kernel(
    best_values,  # float32 [2, rows, parts]
    best_ids,  # int32 [2, rows, parts]
    bonus,  # int64 [rows]
    parts,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < parts
    at = row * parts + lanes
    size = tl.num_programs(0) * parts
    values = tl.load(best_values + at, mask=mask, other=0.0)
    is_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    ids = tl.load(best_ids + at, mask=mask, other=_NO_INDEX)
    top = tl.max(tl.where(values != values, 0.0, values), axis=0)
    winner = tl.min(tl.where(values == top, ids, _NO_INDEX), axis=0)
    if top <= 0:
        # p and q equal to rounding: a rejection that should not have been leaves p itself.
        values = tl.load(best_values + size + at, mask=mask, other=-1.0)
        ids = tl.load(best_ids + size + at, mask=mask, other=_NO_INDEX)
        winner = tl.min(tl.where(values == tl.max(values, axis=0), ids, _NO_INDEX), axis=0)
    tl.store(bonus + row, tl.where(is_nan, -1, winner).to(tl.int64))


@on_its_device
def sample_verify_triton(
    scores, tokens, offsets, seed, temperature=1.0, draft_scores=None, draft_temperature=1.0, draft_columns=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the kernels; arguments and results as in `sample_verify`."""
    num_tokens, vocab_size = scores.shape
    rows, device = len(offsets) - 1, scores.device
    if not num_tokens or not rows:
        return no_tokens(offsets)
    tokens, offsets = tokens.contiguous(), offsets.contiguous()
    sums = _normalisers(scores, temperature)
    # Without drafts there is no draft score to read; the pointers still have to be some tensor's.
    has_scores = draft_scores is not None and len(draft_scores) > 0
    if not has_scores:
        draft_scores, draft_sums = scores, sums
    else:
        draft_sums = _normalisers(draft_scores, draft_temperature)
    has_columns = draft_columns is not None
    columns = draft_columns.contiguous() if has_columns else tokens
    draft_rows = packed_draft_rows(offsets)
    accepted = torch.empty(rows, dtype=torch.long, device=device)
    bonus = torch.empty_like(accepted)
    quarter = triton.cdiv(vocab_size, 4)
    parts = num_splits(rows, quarter, BLOCK_RACE, device)
    best_values = torch.empty(2, rows, parts, dtype=torch.float32, device=device)
    best_ids = torch.empty(2, rows, parts, dtype=torch.int32, device=device)
    inputs = (scores, sums, draft_scores, draft_sums, columns, tokens, offsets, draft_rows, accepted)
    strides = scores.stride(0), draft_scores.stride(0)
    common = (sums.shape[1], draft_sums.shape[1], float(temperature), float(draft_temperature), *key_words(seed))
    options = {
        "HAS_DRAFT_SCORES": has_scores,
        "HAS_COLUMNS": has_columns,
        "BLOCK_S": triton.next_power_of_2(sums.shape[1]),
        "DRAFT_BLOCK_S": triton.next_power_of_2(draft_sums.shape[1]),
    }
    accept_sampled_kernel[(rows,)](*inputs, *strides, *common, BLOCK_K=BLOCK_K, num_warps=1, **options, **EXACT)
    race_kernel[(rows, parts)](
        *inputs,
        best_values,
        best_ids,
        *strides,
        vocab_size,
        quarter,
        triton.cdiv(quarter, parts),
        *common,
        BLOCK=BLOCK_RACE,
        num_warps=8,
        **options,
        **EXACT,
    )
    winner_kernel[(rows,)](best_values, best_ids, bonus, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return accepted, bonus


def _normalisers(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 `[N, splits]` logsumexp of the parts of every row."""
    count, vocab_size = scores.shape
    splits = num_splits(count, vocab_size, BLOCK_V, scores.device)
    sums = torch.empty(count, splits, dtype=torch.float32, device=scores.device)
    logsumexp_kernel[(count, splits)](
        scores,
        sums,
        scores.stride(0),
        vocab_size,
        triton.cdiv(vocab_size, splits),
        float(temperature),
        BLOCK=BLOCK_V,
        num_warps=8,
        **EXACT,
    )
    return sums
