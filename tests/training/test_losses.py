"""Losses against a plain float64 reference, gradients included."""

import pytest
import torch
from torch import nn

from adaflash_hf.training import losses
from adaflash_hf.training.losses import distillation_loss, position_weights


HEAD = nn.Linear(6, 11, bias=False).requires_grad_(False)


def reference(student, teacher, labels, weights, alpha, divergence, clip, acceptance_weight):
    """Token by token in float64, gradients from autograd: logits `[m, k, v]`, labels and weights `[m, k]`."""
    total, accepted = 0.0, []
    for block in range(len(student)):
        running, share, count = 1.0, 0.0, 0
        for s, t, y, w in zip(student[block], teacher[block], labels[block].tolist(), weights[block], strict=True):
            if w == 0:
                accepted.append(1.0)
                continue
            q, p = s.softmax(-1), t.softmax(-1)
            first, second = (q, p) if divergence == "reverse_kl" else (p, q)
            kl = (first * (first.log() - second.log())).sum()
            if clip is not None and kl > clip:
                kl = kl.detach() * 0 + clip
            ce = -q[y].log() if y >= 0 else 0.0
            total = total + w * (alpha * ce + (1 - alpha) * kl)
            accepted.append(torch.minimum(p, q).sum())
            running, count = running * accepted[-1], count + 1
            share = share + running
        if count:
            total = total + acceptance_weight * (1 - share / count)
    return total, torch.tensor([float(torch.as_tensor(a).detach()) for a in accepted]).view(labels.shape)


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("divergence", losses.DIVERGENCES)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("acceptance_weight", [0.0, 0.7])
def test_values_and_gradients(alpha, divergence, clip, acceptance_weight, monkeypatch):
    hidden, teacher = torch.randn(4, 3, 6, requires_grad=True), torch.randn(4, 3, 6)
    labels = torch.tensor([[0, 3, -1], [10, 5, 5], [2, -1, 7], [1, 1, 1]])
    weights = torch.rand(4, 3)
    weights[2, 1:] = weights[3] = 0
    options = {"alpha": alpha, "divergence": divergence, "clip": clip, "acceptance_weight": acceptance_weight}
    expected, accepted = reference(hidden.double() @ HEAD.weight.T.double(), HEAD(teacher).double(), labels,
                                   weights.double(), **options)  # fmt: skip
    expected_grad = torch.autograd.grad(expected, hidden)[0]
    for elements in (2**20, 33):
        monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", elements)
        result = distillation_loss(hidden, teacher, HEAD, labels, weights, with_acceptance=True, **options)
        assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(torch.autograd.grad(result.loss, hidden)[0], expected_grad, rtol=1e-4, atol=1e-6)
        assert torch.equal(result.hits, (HEAD(hidden).argmax(-1) == labels) & (weights > 0))
        torch.testing.assert_close(result.acceptance, accepted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("elements", [2**20, 33])
def test_what_cannot_be_drafted_is_never_accepted(elements, monkeypatch):
    """The divergence compares within the draft vocabulary; acceptance is of the teacher's whole distribution."""
    monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", elements)
    whole = nn.Linear(6, 29, bias=False).requires_grad_(False)
    head = nn.Linear(6, 11, bias=False).requires_grad_(False)
    head.weight.copy_(whole.weight[:11])
    hidden, teacher = torch.randn(4, 3, 6, requires_grad=True), torch.randn(4, 3, 6)
    labels, weights = torch.full((4, 3), -1), torch.ones(4, 3)
    options = {"alpha": 1.0, "acceptance_weight": 1.0, "with_acceptance": True, "whole_head": whole}
    result = distillation_loss(hidden, teacher, head, labels, weights, **options)
    q = (hidden.double() @ head.weight.T.double()).softmax(-1)
    p = (teacher.double() @ whole.weight.T.double()).softmax(-1)[..., :11]
    accepted = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(result.acceptance.double(), accepted, rtol=1e-4, atol=1e-5)
    expected = (1 - accepted.cumprod(dim=1).mean(dim=1)).sum()
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    grads = [torch.autograd.grad(loss, hidden)[0] for loss in (result.loss, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_gradients_are_not_computed_in_evaluation():
    hidden, teacher, labels = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 3, 6), torch.ones(2, 3).long()
    with torch.no_grad():
        assert not distillation_loss(hidden, teacher, HEAD, labels, torch.ones(2, 3), alpha=0.5).loss.requires_grad


def test_the_gradient_passes_on_what_comes_after():
    hidden, teacher, labels = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 3, 6), torch.ones(2, 3).long()
    grads = []
    for factor in (1.0, 3.0):
        loss = distillation_loss(hidden, teacher, HEAD, labels, torch.ones(2, 3), alpha=0.5).loss
        grads.append(torch.autograd.grad(loss * factor, hidden)[0])
    torch.testing.assert_close(grads[1], 3 * grads[0])


def test_the_clip_is_per_token():
    """Splitting a batch in two doesn't change the sum, as it would if the clip came after the average."""
    hidden, teacher = torch.randn(8, 1, 6) * 9, torch.randn(8, 1, 6)
    labels, weights = torch.zeros(8, 1).long(), torch.ones(8, 1)
    options = {"alpha": 0.0, "clip": 1.0}
    whole = distillation_loss(hidden, teacher, HEAD, labels, weights, **options).loss
    total = 0.0
    for rows in (slice(0, 4), slice(4, 8)):
        total += distillation_loss(hidden[rows], teacher[rows], HEAD, labels[rows], weights[rows], **options).loss
    assert whole.item() == pytest.approx(total.item())


def test_bfloat16_logits_are_lifted_to_float32():
    """The reference takes the divergence in bfloat16, where a small one is off by a quarter."""
    head = nn.Linear(32, 5000, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    teacher = torch.randn(4, 1, 32).bfloat16() * 4
    hidden = (teacher + 0.1 * torch.randn(4, 1, 32)).bfloat16()
    low = distillation_loss(hidden, teacher, head, torch.zeros(4, 1).long(), torch.ones(4, 1), alpha=0.0).loss
    q, p = (torch.log_softmax(head(x).double(), -1) for x in (hidden, teacher))
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx((q.exp() * (q - p)).sum().item(), rel=1e-3)


def test_position_weights():
    torch.testing.assert_close(position_weights(3, 4.0), torch.tensor([1.0, 0.7788, 0.6065]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("divergence", losses.DIVERGENCES)
def test_autocast_leaves_the_divergence_in_float32(divergence):
    """A dot product is among what autocast takes in half precision."""
    head = nn.Linear(32, 5000, bias=False).requires_grad_(False)
    teacher = torch.randn(4, 1, 32) * 4
    hidden = teacher + 0.1 * torch.randn(4, 1, 32)
    options = {"alpha": 0.0, "divergence": divergence}
    with torch.autocast("cpu", torch.bfloat16):
        low = distillation_loss(hidden, teacher, head, torch.zeros(4, 1).long(), torch.ones(4, 1), **options).loss
        q, p = (torch.log_softmax(head(x).double(), -1) for x in (hidden, teacher))
    first, second = (q, p) if divergence == "reverse_kl" else (p, q)
    assert low.item() == pytest.approx((first.exp() * (first - second)).sum().item(), rel=1e-3)
