"""Attention over blocks against a dense mask, and anchors."""

import pytest
import torch
from tiny import make_drafter
from torch.nn import functional as F

from adaflash_hf.training import anchors as anchors_module
from adaflash_hf.training.anchors import BlockAttention, sample_anchors


def dense_mask(anchors, used, length, config, sliding):
    """Bool `[b, A*B, n + A*B]`, position by position."""
    batch, blocks, size = *anchors.shape, config.block_size
    mask = torch.zeros(batch, blocks * size, length + blocks * size, dtype=torch.bool)
    causal = config.sliding_window_causal
    reach = (config.sliding_window or 0) - causal
    for b in range(batch):
        for a in range(blocks):
            for i in range(size):
                row = mask[b, a * size + i]
                position = int(anchors[b, a]) + i
                for j in range(int(anchors[b, a]) if used[b, a] else 0):
                    row[j] = not sliding or j >= position - reach
                for j in range(size):
                    row[length + a * size + j] = not sliding or (abs(i - j) <= reach and not (causal and j > i))
    return mask


@pytest.mark.parametrize("elements", [2**25, 4000, 1], ids=["plain", "recomputed", "block by block"])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"sliding_window": 4}, {"sliding_window": 4, "sliding_window_causal": False}],
    ids=["full", "causal window", "window"],
)
def test_block_attention_equals_dense_attention(overrides, elements, monkeypatch):
    monkeypatch.setattr(anchors_module, "_GROUP_ELEMENTS", elements)
    drafter = make_drafter(**overrides)
    module, config, length = drafter.layers[0].self_attn, drafter.config, 17
    loss_mask = torch.ones(3, length, dtype=torch.bool)
    loss_mask[0, :12] = loss_mask[2] = False
    anchors, used = sample_anchors(loss_mask, 6)
    slots = 6 * config.block_size
    query = torch.randn(3, 4, slots, 8, requires_grad=True)
    key, value = (torch.randn(3, 2, length + slots, 8, requires_grad=True) for _ in range(2))
    attention = BlockAttention(anchors, used, length, config)
    ours, _ = attention.attention(module, query, key, value, None, scaling=0.3, dropout=0.0)
    mask = dense_mask(anchors, used, length, config, bool(overrides))[:, None]
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), (query, key, value)),
        torch.autograd.grad((expected.transpose(1, 2) * weight).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_anchors():
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()
    anchors, used = sample_anchors(loss_mask, 4)
    assert [row[mask].tolist() for row, mask in zip(anchors, used, strict=True)] == [[2, 3], [1, 2, 3, 4], []]
    few, used = sample_anchors(loss_mask, 2)
    assert used.sum(1).tolist() == [2, 2, 0] and len(set(few[1].tolist())) == 2
