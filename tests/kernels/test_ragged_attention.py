"""Ragged attention: the Triton kernel against its twin, which `tests/generation/test_attention.py` checks by hand.

Tolerances are on outputs of size about 1: the softmax weights are rounded to the value's dtype in both, in another
order of sums. Triton's interpreter multiplies the bits of bfloat16 as integers, so there float16 stands for bfloat16.
"""

import pytest
import torch

from adaflash_hf import AdaFlashValueError
from adaflash_hf.kernels import RaggedQueries, ragged_attention, ragged_attention_with_weights, use_backend


TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def queries_of(counts, past, device, block=0):
    """`counts[r]` queries after `past[r]` slots; with `block`, the row's queries see up to its end."""
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    positions = torch.cat([torch.arange(p, p + c) for p, c in zip(past, counts, strict=True)])
    ends = torch.tensor([p + c - 1 for p, c in zip(past, counts, strict=True)])
    tensors = (t.to(device) for t in (rows, positions))
    longest = int(ends.max()) + 1
    return RaggedQueries(*tensors, len(counts), longest, list(counts), block_ends=ends.to(device))


def tensors(queries, heads, kv_heads, size, dtype, device, spare=5):
    """Query, key and value as the model hands them over: strided, the cache longer than needed."""
    total, slots = len(queries.query_rows), queries.longest + spare
    query = torch.randn(heads, total, size, device=device).to(dtype).transpose(0, 1)
    key, value = (torch.randn(queries.num_rows, kv_heads, slots, size, device=device).to(dtype) for _ in range(2))
    for store in (key, value):
        for row in range(queries.num_rows):  # what was rejected or never written must not be read
            last = int(queries.block_ends[row])
            store[row, :, last + 1 : queries.longest] = 1e4
        store[:, :, queries.longest :] = float("nan")
    return query, key, value


def check(both, queries, arguments, dtype, **options):
    expected, ours = both(ragged_attention, *arguments, queries, **options)
    assert ours.dtype == dtype and ours.shape == expected.shape
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "counts, past, shape, dtype, options",
    [
        ((1,), (0,), (1, 1, 8), torch.float32, {}),
        ((1,), (130,), (9, 3, 64), torch.bfloat16, {}),
        ((1, 16, 3), (70, 0, 5), (4, 2, 16), torch.float32, {}),
        ((5, 2), (90, 3), (8, 2, 80), torch.float16, {"window": 7}),
        ((5, 5), (4, 60), (4, 4, 32), torch.float32, {"causal": False}),
        ((5, 5), (20, 9), (4, 2, 32), torch.float32, {"causal": False, "window": 6}),
        ((3, 1), (30, 2), (4, 2, 16), torch.float32, {"softcap": 5.0, "scale": 1.0}),
        ((40, 17), (0, 0), (4, 2, 16), torch.float32, {"window": 9}),
        ((2, 3), (20, 1), (7, 1, 16), torch.float32, {"sinks": True, "window": 4}),
        ((0, 1, 0), (9, 6, 3), (4, 2, 16), torch.float32, {"window": 4}),
        ((0, 5, 2), (9, 6, 3), (4, 2, 16), torch.float32, {"causal": False}),
    ],
)
def test_equals_twin(both, device, counts, past, shape, dtype, options):
    if dtype == torch.bfloat16 and device.type == "cpu":
        dtype = torch.float16
    queries = queries_of(counts, past, device)
    if options.get("sinks"):
        options = {**options, "sinks": torch.randn(shape[0], device=device) * 3}
    check(both, queries, tensors(queries, *shape, dtype, device), dtype, **options)


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"sinks": True}], ids=str)
def test_split_context_gives_the_same(monkeypatch, both, device, options):
    """Parts in which a query sees nothing take no part."""
    from adaflash_hf.kernels import ragged_attention_triton

    monkeypatch.setattr(ragged_attention_triton, "multiprocessors", lambda device: 100)
    queries = queries_of((2, 1), (700, 40), device)
    if options.get("sinks"):
        options = {"sinks": torch.randn(2, device=device) * 3}
    check(both, queries, tensors(queries, 2, 1, 16, torch.float32, device), torch.float32, **options)


def test_extreme_logits(both, device):
    queries = queries_of((3, 2), (6, 0), device)
    query, key, value = tensors(queries, 2, 1, 16, torch.float32, device)
    check(both, queries, (query * 1e4, key, value), torch.float32)
    check(both, queries, (query * 1e4, key, value), torch.float32, softcap=30.0)
    check(both, queries, (query * 0, key, value), torch.float32)


def test_refusals(device):
    queries = queries_of((2,), (3,), device)
    query, key, value = tensors(queries, 4, 2, 16, torch.float32, device)
    with pytest.raises(AdaFlashValueError, match="multiple"):
        ragged_attention(query[:, :3], key, value, queries)
    with pytest.raises(AdaFlashValueError, match="5 slots"):
        ragged_attention(query, key[:, :, :4], value[:, :, :4], queries)
    with use_backend("triton"), pytest.raises(AdaFlashValueError, match="`key` is strided"):
        ragged_attention(query, key.transpose(2, 3).contiguous().transpose(2, 3), value, queries)
    queries.block_ends = None
    with pytest.raises(AdaFlashValueError, match="block_ends"):
        ragged_attention(query, key, value, queries, causal=False)


@pytest.mark.parametrize("causal, window", [(True, None), (True, 3), (False, None), (False, 20)])
@pytest.mark.parametrize(
    "counts", [(1, 1, 11, 1, 1, 1, 2, 1), (0, 0, 6, 0, 0), (6, 6, 6), (1, 5, 1), (2, 2, 40, 3, 2)], ids=str
)
def test_long_rows_on_their_own_equal_padding(counts, causal, window):
    """On a CPU, rows with many more queries than the others, or the only ones with any, are not padded to."""
    torch.manual_seed(sum(counts))
    past = torch.randint(0, 60, (len(counts),)).tolist()
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    positions = torch.cat([torch.arange(p, p + c) for p, c in zip(past, counts, strict=True)])
    ends = torch.tensor([p + max(c, 1) - 1 for p, c in zip(past, counts, strict=True)])
    queries = RaggedQueries(rows, positions, len(counts), int(ends.max()) + 1, list(counts), ends)
    query, key, value = tensors(queries, 4, 2, 16, torch.float32, "cpu")
    expected, _ = ragged_attention_with_weights(query, key, value, queries, causal, window)
    torch.testing.assert_close(ragged_attention(query, key, value, queries, causal, window), expected)
    assert bool(queries.parts(causal, window, query.dtype)[2]) == (max(counts) > 5 + min(counts))
