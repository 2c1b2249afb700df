"""Packed attention against a plain per-row reference."""

from types import SimpleNamespace

import pytest
import torch

from adaflash_hf.generation.attention import PackedBatch
from adaflash_hf.generation.cache import RaggedCache


def reference(query, key, value, visible, scaling, softcap, sink):
    """One query row: query `[H, D]`, key and value `[Hkv, S, D]`, visible bool `[S]`."""
    groups = query.shape[0] // key.shape[0]
    out = []
    for head in range(query.shape[0]):
        logits = key[head // groups] @ query[head] * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits.masked_fill(~visible, float("-inf"))
        if sink is not None:
            logits = torch.cat([logits, sink[head : head + 1]])
        weights = logits.softmax(-1)[: key.shape[1]]
        out.append(weights @ value[head // groups])
    return torch.stack(out)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (5.0, False), (None, True)])
@pytest.mark.parametrize("counts", [(1, 3, 2), (2, 2), (1,), (4,)])
def test_against_reference(window, causal, softcap, sinks, counts):
    heads, kv_heads, size, past = 4, 2, 8, [2, 0, 5][: len(counts)]
    cache = RaggedCache()
    keys, values = torch.randn(3, kv_heads, 20, size), torch.randn(3, kv_heads, 20, size)

    def batch(counts, first):
        rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        positions = torch.cat([torch.arange(f, f + c) for f, c in zip(first, counts, strict=True)])
        ends = torch.tensor([f + c - 1 for f, c in zip(first, counts, strict=True)])
        longest = int(ends.max()) + 1
        span = (first[0], longest) if len(counts) == 1 else None
        return PackedBatch(rows, positions, len(counts), longest, list(counts), block_ends=ends, span=span)

    def write(packed):
        cache.begin(packed)
        at = packed.key_rows, slice(None), packed.key_positions
        return cache.update(keys[at].transpose(0, 1)[None], values[at].transpose(0, 1)[None], 0)

    if max(past) > 0:
        write(batch([max(p, 1) for p in past], [0] * len(past)))
    packed = batch(counts, past)
    key, value = write(packed)
    query = torch.randn(1, heads, sum(counts), size)
    sink = torch.randn(heads) if sinks else None
    module = SimpleNamespace(is_causal=causal)
    output, _ = packed.attention(
        module, query, key, value, scaling=0.3, sliding_window=window, softcap=softcap, s_aux=sink
    )
    for t, (row, position) in enumerate(zip(packed.query_rows.tolist(), packed.query_positions.tolist(), strict=True)):
        slots = torch.arange(20)
        visible = slots <= (position if causal else past[row] + counts[row] - 1)
        if window is not None:
            visible &= slots >= position - (window - 1 if causal else window)
        expected = reference(query[0, :, t], keys[row], values[row], visible, 0.3, softcap, sink)
        torch.testing.assert_close(output[0, t], expected, rtol=1e-4, atol=1e-5)
