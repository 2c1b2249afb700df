"""Losses against a plain float64 reference, gradients included."""

import pytest
import torch
from torch import nn

from adaflash_hf.training import losses
from adaflash_hf.training.losses import distillation_loss, position_weights


def reference(student, teacher, labels, weights, alpha, divergence, clip):
    total = 0.0
    for s, t, y, w in zip(student, teacher, labels.tolist(), weights, strict=True):
        p_s, p_t = s.softmax(-1), t.softmax(-1)
        first, second = (p_s, p_t) if divergence == "reverse_kl" else (p_t, p_s)
        kl = (first * (first.log() - second.log())).sum()
        if clip is not None and kl > clip:
            kl = kl.detach() * 0 + clip
        ce = -p_s[y].log() if y >= 0 else 0.0
        total = total + w * (alpha * ce + (1 - alpha) * kl)
    return total


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("divergence", losses.DIVERGENCES)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_values_and_gradients(alpha, divergence, clip, monkeypatch):
    head = nn.Linear(6, 11, bias=False).requires_grad_(False)
    hidden, teacher = torch.randn(9, 6, requires_grad=True), torch.randn(9, 6)
    labels = torch.tensor([0, 3, -1, 10, 5, 5, 2, -1, 7])
    weights = torch.rand(9)
    options = {"alpha": alpha, "divergence": divergence, "clip": clip}
    expected = reference(hidden.double() @ head.weight.T.double(), head(teacher).double(), labels, weights.double(),
                         alpha, divergence, clip)  # fmt: skip
    expected_grad = torch.autograd.grad(expected, hidden)[0]
    for elements in (2**26, 22):
        monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", elements)
        total, hits = distillation_loss(hidden, teacher, head, labels, weights, **options)
        assert total.item() == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(torch.autograd.grad(total, hidden)[0], expected_grad, rtol=1e-4, atol=1e-6)
        assert torch.equal(hits, head(hidden).argmax(-1) == labels)


def test_the_clip_is_per_token():
    """Splitting a batch in two doesn't change the sum, as it would if the clip came after the average."""
    head = nn.Linear(6, 11, bias=False).requires_grad_(False)
    hidden, teacher, labels, weights = torch.randn(8, 6) * 9, torch.randn(8, 6), torch.zeros(8).long(), torch.ones(8)
    options = {"alpha": 0.0, "clip": 1.0}
    whole, _ = distillation_loss(hidden, teacher, head, labels, weights, **options)
    total = 0.0
    for rows in (slice(0, 4), slice(4, 8)):
        half, _ = distillation_loss(hidden[rows], teacher[rows], head, labels[rows], weights[rows], **options)
        total += half.item()
    assert whole.item() == pytest.approx(total)


def test_bfloat16_inputs_are_lifted_to_float32():
    student, teacher = torch.randn(4, 1000), torch.randn(4, 1000)
    full = losses.token_losses(student, teacher, torch.zeros(4).long(), 0.0, "reverse_kl", None)
    low = losses.token_losses(student.bfloat16(), teacher.bfloat16(), torch.zeros(4).long(), 0.0, "reverse_kl", None)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, full, rtol=0.02, atol=0.01)


def test_position_weights():
    torch.testing.assert_close(position_weights(3, 4.0), torch.tensor([1.0, 0.7788, 0.6065]), rtol=1e-4, atol=1e-4)
