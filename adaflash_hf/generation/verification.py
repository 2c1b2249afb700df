"""Which drafted tokens the target keeps: the PyTorch reference of both accept rules.

Tokens are packed: each row's anchor, then its drafted tokens. The target's scores at one packed token are about the
next one. `accepted` counts kept drafts; the bonus token that follows is always the target's own.

Greedy: keep while the draft is the target's argmax. Sampling (Leviathan et al., arXiv 2211.17192, algorithm 1): keep
draft x with probability min(1, p(x) / q(x)); on rejection sample from the normalised (p - q)+, else from p. The law
of the output is then p, whatever q is, so long as the number of drafts never depended on the drafts themselves.
"""

import torch


def leading(flags: torch.Tensor) -> torch.Tensor:
    """Number of leading true values along the last dimension."""
    return flags.long().cumprod(dim=-1).sum(dim=-1)


def row_starts(counts: torch.Tensor) -> torch.Tensor:
    """Packed index of each row's first token, from the rows' token counts `[rows]`."""
    return counts.cumsum(0) - counts


def _draft_grid(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed index of the token before each draft, `[rows, widest]`, and which of them exist."""
    widest = max(int(counts.max()) - 1, 0)
    steps = torch.arange(widest, device=counts.device)
    exists = steps < (counts - 1)[:, None]
    index = row_starts(counts)[:, None] + steps
    return torch.where(exists, index, 0), exists


def greedy_verify(scores: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor):
    """Keeps drafts while they are the argmax.

    Args:
        scores: `[T, V]`, the target's processed scores at the packed tokens.
        tokens: int64 `[T]`, the packed tokens: anchor and drafts of each row.
        counts: int64 `[rows]`, tokens per row, at least 1.

    Returns:
        `accepted` int64 `[rows]` and `bonus` int64 `[rows]`.
    """
    choice = scores.argmax(dim=-1)
    index, exists = _draft_grid(counts)
    following = tokens[(index + 1).clamp(max=len(tokens) - 1)]
    accepted = leading((choice[index] == following) & exists)
    return accepted, choice[row_starts(counts) + accepted]


def residual_distribution(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Normalised positive part of p - q `[..., V]`; p itself where they are equal to rounding."""
    residual = (p - q).clamp(min=0)
    total = residual.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, residual / total.clamp(min=torch.finfo(p.dtype).tiny), p)


def sample_verify(scores: torch.Tensor, draft_probabilities: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor):
    """Rejection sampling against the distribution that the drafts came from.

    Args:
        scores: `[T, V]`, the target's processed scores at the packed tokens.
        draft_probabilities: float32 `[D, V]`, q of each draft, rows packed in the same order.
        tokens, counts: as in `greedy_verify`; D = T - rows.

    Returns:
        `accepted` int64 `[rows]` and `bonus` int64 `[rows]`, using torch's default generator.
    """
    p = scores.softmax(dim=-1, dtype=torch.float32)
    starts = row_starts(counts)
    accepted = torch.zeros_like(counts)
    final = p[starts + counts - 1]
    if len(draft_probabilities):
        index, exists = _draft_grid(counts)
        # Drafts are packed without the anchors, so a row's drafts start one place earlier for each row before it.
        draft_index = index - torch.arange(len(counts), device=counts.device)[:, None]
        draft_index = torch.where(exists, draft_index, 0)
        following = tokens[(index + 1).clamp(max=len(tokens) - 1)]
        p_draft = p[index, following]
        q_draft = draft_probabilities[draft_index, following]
        keep = torch.rand_like(p_draft) * q_draft < p_draft
        accepted = leading(keep & exists)
        rejected = accepted < counts - 1
        if rejected.any():
            rows = rejected.nonzero().squeeze(-1)
            at = starts[rows] + accepted[rows]
            final = final.clone()
            final[rows] = residual_distribution(p[at], draft_probabilities[at - rows])
    return accepted, torch.multinomial(final, 1).squeeze(-1)
