"""Distillation losses per drafted position, in float32 over the vocabulary.

With student p_S and teacher p_T over the (draft) vocabulary and y the teacher's argmax:

    loss_k = alpha * CE(y, p_S) + (1 - alpha) * D,   D = KL(p_S || p_T) (reverse, AdaFlash) or KL(p_T || p_S)

Each divergence is clipped per token first and averaged with the position weights after, so that the clip does not
depend on how many tokens a batch holds.
"""

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


DIVERGENCES = ("reverse_kl", "forward_kl")
_CHUNK_ELEMENTS = 2**26


def position_weights(num_drafted_tokens: int, gamma: float) -> torch.Tensor:
    """exp(-(k - 1) / gamma) for drafted positions k = 1, 2, ... (DFlash; gamma 7 for blocks of 16, 4 for 8)."""
    return torch.exp(-torch.arange(num_drafted_tokens) / gamma)


def token_losses(student_logits, teacher_logits, labels, alpha: float, divergence: str, clip: float | None):
    """Loss per token `[m]` from logits `[m, v]`; `labels` `[m]` is -1 where the argmax can't be drafted.

    Such tokens, outside a draft vocabulary, have no cross-entropy term, and their teacher is renormalised over the
    draft vocabulary.
    """
    student = F.log_softmax(student_logits.float(), dim=-1)
    loss = alpha * F.nll_loss(student, labels, ignore_index=-1, reduction="none") if alpha > 0 else 0.0
    if alpha < 1:
        teacher = F.log_softmax(teacher_logits.float(), dim=-1)
        first, second = (student, teacher) if divergence == "reverse_kl" else (teacher, student)
        kl = (first.exp() * (first - second)).sum(dim=-1)
        if clip is not None:
            kl = kl.clamp(max=clip)
        loss = loss + (1 - alpha) * kl
    return loss


def distillation_loss(hidden, teacher_hidden, head, labels, weights, *, alpha, divergence="reverse_kl", clip=None):
    """Weighted sum of `token_losses` over rows, with logits made chunk by chunk so that memory stays flat.

    Args:
        hidden: student hidden states `[m, d]`.
        teacher_hidden: the target's final hidden states `[m, d]` at the position before each label.
        head: hidden states -> logits, the same (frozen) head for both.
        labels: int64 `[m]`, the teacher's argmax as an index of the draft vocabulary, or -1.
        weights: float32 `[m]`.

    Returns:
        The scalar sum of weights times losses, and bool `[m]`, whether the student's argmax is the label.
    """

    def piece(hidden, teacher_hidden, labels, weights):
        student_logits = head(hidden)
        with torch.no_grad():
            teacher_logits = head(teacher_hidden) if alpha < 1 else None
            hit = student_logits.argmax(dim=-1) == labels
        losses = token_losses(student_logits, teacher_logits, labels, alpha, divergence, clip)
        return (losses * weights).sum(), hit

    with torch.no_grad():
        vocabulary = head(hidden[:1].detach()).shape[-1]
    rows = max(1, _CHUNK_ELEMENTS // vocabulary)
    if len(hidden) <= rows:
        return piece(hidden, teacher_hidden, labels, weights)
    total, hits = 0.0, []
    for part in zip(*(x.split(rows) for x in (hidden, teacher_hidden, labels, weights)), strict=True):
        loss, hit = checkpoint(piece, *part, use_reentrant=False)
        total = total + loss
        hits.append(hit)
    return total, torch.cat(hits)
