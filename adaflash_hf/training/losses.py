"""Distillation losses per drafted position, in float32 over the vocabulary.

With student q and teacher p over the (draft) vocabulary and y the teacher's argmax:

    loss_k = alpha * CE(y, q) + (1 - alpha) * D,   D = KL(q || p) (reverse, AdaFlash) or KL(p || q)

Each divergence is clipped per token first and averaged with the position weights after, so that the clip does not
depend on how many tokens a batch holds. The end-to-end term of a block of g supervised positions is
1 - (1/g) sum_j prod_{i<=j} a_i with a_k = sum_v min(p_k, q_k): one minus the share of the block that rejection
sampling is expected to accept (teacher-forced).

Logits exist for one chunk of blocks at a time. Gradients of these losses with respect to logits have closed forms, so
each chunk's are pulled back to hidden states right away, and nothing of vocabulary size is kept or computed twice.
"""

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable


DIVERGENCES = ("reverse_kl", "forward_kl")
# Logits of one chunk: what fits a CPU's cache, and what keeps a GPU busy.
_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}


def position_weights(num_drafted_tokens: int, gamma: float) -> torch.Tensor:
    """exp(-(k - 1) / gamma) for drafted positions k = 1, 2, ... (DFlash; gamma 7 for blocks of 16, 4 for 8)."""
    return torch.exp(-torch.arange(num_drafted_tokens) / gamma)


@dataclass
class DistillationLoss:
    """What `distillation_loss` returns.

    Attributes:
        loss: float32 scalar with a gradient.
        hits: bool `[m, k]`, whether the student's argmax is the label; false where unsupervised.
        acceptance: float32 `[m, k]`, a_k = sum_v min(p_k, q_k), 1 where unsupervised; `None` unless asked for.
    """

    loss: torch.Tensor
    hits: torch.Tensor
    acceptance: torch.Tensor | None


def distillation_loss(
    hidden,
    teacher_hidden,
    head,
    labels,
    weights,
    *,
    alpha: float,
    divergence: str = "reverse_kl",
    clip: float | None = None,
    acceptance_weight: float | torch.Tensor = 0.0,
    with_acceptance: bool = False,
    whole_head=None,
) -> DistillationLoss:
    """The loss of m blocks of k drafted positions, summed with weights.

    Args:
        hidden: student hidden states `[m, k, d]`.
        teacher_hidden: the target's final hidden states `[m, k, d]` at the position before each label.
        head: hidden states -> logits, the same (frozen) head for both.
        labels: int64 `[m, k]`, the teacher's argmax as an index of the draft vocabulary, or -1 where it can't be
            drafted: there is no cross-entropy then, and the teacher is renormalised over the draft vocabulary.
        weights: float32 `[m, k]`; 0 where unsupervised, and such positions cost nothing.
        acceptance_weight: weight of each block's end-to-end term; 0 leaves it out.
        with_acceptance: also return `acceptance`.
        whole_head: the head over all of the target's tokens, where `head` has the draft vocabulary alone: what the
            teacher gives to the others is never accepted.
    """
    loss, hits, acceptance = _Distillation.apply(
        hidden,
        teacher_hidden,
        head,
        labels,
        weights,
        alpha,
        divergence,
        clip,
        acceptance_weight,
        with_acceptance,
        whole_head,
    )
    return DistillationLoss(loss, hits, acceptance)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        teacher_hidden,
        head,
        labels,
        weights,
        alpha,
        divergence,
        clip,
        acceptance_weight,
        with_acceptance,
        whole_head,
    ):
        needs_grad = ctx.needs_input_grad[0]
        end_to_end = torch.is_tensor(acceptance_weight) or acceptance_weight > 0
        supervised = weights > 0
        total = torch.zeros((), device=hidden.device)
        hits = torch.zeros_like(supervised)
        acceptance = torch.ones(labels.shape, device=hidden.device) if end_to_end or with_acceptance else None
        hidden_grad = torch.zeros_like(hidden) if needs_grad else None
        elements = _CHUNK_ELEMENTS.get(hidden.device.type, _CHUNK_ELEMENTS["cuda"])
        widest = head if acceptance is None or whole_head is None else whole_head
        blocks = max(1, elements // (widest(hidden[:1, 0]).shape[-1] * hidden.shape[1]))
        for start in range(0, len(hidden), blocks):
            rows = slice(start, start + blocks)
            mask = supervised[rows]
            with torch.set_grad_enabled(needs_grad):
                student_hidden = hidden[rows][mask].detach().requires_grad_(needs_grad)
                logits = head(student_hidden)
            y = labels[rows][mask]
            hits[rows] = hits[rows].masked_scatter(mask, logits.argmax(dim=-1) == y)
            student, teacher = torch.log_softmax(logits.detach(), dim=-1, dtype=torch.float32), None
            if alpha < 1 or acceptance is not None:
                teacher_logits = head(teacher_hidden[rows][mask])
                teacher = torch.log_softmax(teacher_logits, dim=-1, dtype=torch.float32)
            grad = 0
            if acceptance is not None:
                accepting = teacher
                if whole_head is not None:
                    whole = whole_head(teacher_hidden[rows][mask]).float().logsumexp(dim=-1, keepdim=True)
                    accepting = teacher_logits.float() - whole
                a = _acceptance(student, accepting)
                acceptance[rows] = acceptance[rows].masked_scatter(mask, a)
            if end_to_end:
                miss, slope = _expected_miss(acceptance[rows], mask)
                total += acceptance_weight * miss
                grad = _acceptance_gradient(student, accepting, acceptance_weight * slope[mask])
            with torch.autocast(student.device.type, enabled=False):  # which would take dot products in half precision
                loss, token_grad = _token_loss(student, teacher, y, weights[rows][mask], alpha, divergence, clip)
            total += loss
            if needs_grad:
                token_grad += grad
                pulled = torch.autograd.grad(logits, student_hidden, token_grad.to(logits.dtype))[0]
                hidden_grad[rows] = hidden_grad[rows].masked_scatter(mask[..., None], pulled)
        ctx.save_for_backward(hidden_grad)
        ctx.mark_non_differentiable(hits)
        if acceptance is not None:
            ctx.mark_non_differentiable(acceptance)
        return total, hits, acceptance

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *unused):
        (hidden_grad,) = ctx.saved_tensors
        return (hidden_grad * grad).to(hidden_grad.dtype), *[None] * 10


def _token_loss(student, teacher, labels, weights, alpha, divergence, clip):
    """Weighted sum over tokens, and its gradient with respect to the student's logits `[m, v]`.

    Takes log probabilities `[m, v]` of student and teacher and overwrites both.
    """
    index = labels.clamp(min=0)[:, None]
    ce_weight = alpha * weights * (labels >= 0)
    loss = -(student.gather(1, index).squeeze(1) * ce_weight).sum()
    if alpha == 1:
        grad = student.exp_().mul_(ce_weight[:, None])
    else:
        kl_weight = (1 - alpha) * weights
        if divergence == "reverse_kl":  # dKL/dlogit = q (log q - log p - KL)
            ratio = torch.sub(student, teacher, out=teacher)
            q = student.exp_()
            kl = torch.linalg.vecdot(q, ratio)
            slope = kl_weight if clip is None else kl_weight * (kl <= clip)
            grad = ratio.mul_(slope[:, None]).add_((ce_weight - slope * kl)[:, None]).mul_(q)
        else:  # dKL/dlogit = q - p
            p = teacher.exp()
            kl = torch.linalg.vecdot(p, teacher.sub_(student))
            slope = kl_weight if clip is None else kl_weight * (kl <= clip)
            grad = student.exp_().mul_((slope + ce_weight)[:, None]).sub_(p.mul_(slope[:, None]))
        loss = loss + ((kl if clip is None else kl.clamp(max=clip)) * kl_weight).sum()
    return loss, grad.scatter_add_(1, index, -ce_weight[:, None])


def _acceptance(student, teacher):
    """a `[m]` = sum_v min(p, q) from log probabilities `[m, v]`."""
    return torch.minimum(student, teacher).exp_().sum(dim=-1)


def _acceptance_gradient(student, teacher, slope):
    """The gradient `[m, v]` of sum(slope * a) with respect to the student's logits."""
    q = student.exp()
    kept = q * (student < teacher)
    return kept.sub_(q.mul_(kept.sum(dim=-1, keepdim=True))).mul_(slope[:, None])


def _expected_miss(acceptance, supervised):
    """Sum over blocks of 1 - (1/g) sum_j prod_{i<=j} a_i for a `[m, k]`, and its gradient with respect to a."""
    with torch.enable_grad():
        a = acceptance.detach().requires_grad_()
        count = supervised.sum(dim=1)
        share = (a.cumprod(dim=1) * supervised).sum(dim=1) / count.clamp(min=1)
        miss = ((1 - share) * (count > 0)).sum()
    return miss.detach(), torch.autograd.grad(miss, a)[0]
