"""Verification by rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), temperature included.

Draft x, drawn from q, is kept with probability min(1, p(x) / q(x)); at the first rejection the row's next token is
drawn from the normalised (p - q)+, else from p after the last draft. The output's law is p, whatever q is, so long as
the number of drafts never depended on the drafts themselves. p = softmax(scores / temperature), and q likewise.

Tokens are drawn by an exponential race: the token with the largest weight / e, with independent standard exponentials
e, has the law of the normalised weights. So no sum over the residual is needed, and the Triton kernel and its twin
agree: their noise is identical, and a decision differs only where two sides are equal to float32 rounding. A CPU, for
which a random number for every token is the dearest part, draws by inverting the cumulative distribution instead.
"""

import torch

from ..errors import AdaFlashValueError
from .dispatch import is_forced, takes_triton
from .greedy_verify import check_packed, check_rows_contiguous, leading_count, no_tokens, row_of
from .noise import ACCEPT, draw_shares, inverse_cdf, philox, race_exponentials, uniform


def sample_verify(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    offsets: torch.Tensor,
    seed: int,
    temperature: float = 1.0,
    draft_scores: torch.Tensor | None = None,
    draft_temperature: float = 1.0,
    draft_columns: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps drafts by rejection sampling, and samples the token after them.

    Args:
        scores: `[T, V]`, the target's scores at the packed tokens.
        tokens: int64 `[T]`, anchor and drafts of each row.
        offsets: int64 `[rows + 1]`, as in `greedy_verify`.
        seed: 0 to 2**62 - 1; the same seed gives the same tokens. Rows have independent noise.
        temperature: of the target.
        draft_scores: `[D, W]`, the scores that each draft was drawn from, packed by row; D is the number of drafts
            (T less the rows that have tokens). `None`: the drafts were not drawn but proposed (q is one-hot), and
            x is kept with probability p(x).
        draft_temperature: temperature of the draft.
        draft_columns: int32 `[V]`, for a draft vocabulary smaller than the target's: the column of `draft_scores`
            that stands for each token, -1 for none (`draft_columns_of` makes it). `None` where W = V.

    Returns:
        `accepted` int64 `[rows]` and `bonus` int64 `[rows]`. A position whose scores or draft scores have no finite
        normaliser (NaN, +inf, or nothing but -inf) accepts nothing, and where the bonus token would come from one it
        is -1. A row without tokens has 0 and -1.

    Raises:
        AdaFlashValueError: for shapes that don't fit together, a strided vocabulary, or a temperature that isn't
            positive.
    """
    check_packed(scores, tokens, offsets)
    if min(temperature, draft_temperature) <= 0:
        raise AdaFlashValueError(
            f"Temperatures are {temperature} and {draft_temperature}: they must be positive; `greedy_verify` is for 0."
        )
    if draft_scores is not None:
        check_rows_contiguous("draft_scores", draft_scores)
        if draft_columns is None and draft_scores.shape[1] != scores.shape[1]:
            raise AdaFlashValueError(
                f"`draft_scores` has {draft_scores.shape[1]} columns and `scores` {scores.shape[1]}: pass "
                "`draft_columns`."
            )
    arguments = (scores, tokens, offsets, seed, temperature, draft_scores, draft_temperature, draft_columns)
    if takes_triton(scores):
        from .sample_verify_triton import sample_verify_triton

        return sample_verify_triton(*arguments)
    return sample_verify_torch(*arguments, race=is_forced() or scores.device.type != "cpu")


def sample_verify_torch(
    scores,
    tokens,
    offsets,
    seed,
    temperature=1.0,
    draft_scores=None,
    draft_temperature=1.0,
    draft_columns=None,
    race: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch twin of `sample_verify`. `race`: draw as the kernel does, else by inversion."""
    if not len(tokens):
        return no_tokens(offsets)
    index = torch.arange(len(tokens), device=tokens.device)
    row = row_of(index, offsets)
    step = index - offsets[row]
    has_draft = index + 1 < offsets[row + 1]
    drafts = tokens.roll(-1)
    draft_rows = packed_draft_rows(offsets)[row] + step

    # 1. Which drafts are kept: u q(x) < p(x).
    log_p = _normalisers(scores, temperature)
    p_x = (scores.gather(1, drafts[:, None])[:, 0].float() / temperature - log_p).exp()
    q_x, valid, log_q = torch.ones_like(p_x), log_p.isfinite(), None
    if draft_scores is not None:
        q_x = torch.zeros_like(p_x)
        if len(draft_scores):
            log_q = _normalisers(draft_scores, draft_temperature)
            at = torch.where(has_draft, draft_rows, 0)
            column = drafts if draft_columns is None else draft_columns[drafts].long()
            q_x = (draft_scores[at, column.clamp(min=0)].float() / draft_temperature - log_q[at]).exp()
            q_x = torch.where(column < 0, 0.0, q_x)
            valid = valid & (log_q[at].isfinite() | ~has_draft)
    u = uniform(philox(step, row, ACCEPT, seed)[0])
    accepted = leading_count(valid & (u * q_x < p_x), offsets)

    # 2. The token after them, from the residual where a draft was rejected, else from p.
    rows = torch.arange(len(offsets) - 1, device=tokens.device)
    counts = offsets.diff()
    at = (offsets[:-1] + accepted).clamp(max=len(tokens) - 1)
    p = (scores[at].float() / temperature - log_p[at, None]).exp()
    rejected = accepted < counts - 1
    residual = p
    if draft_scores is None:
        q = torch.zeros_like(p).scatter_(1, drafts[at, None], 1.0)
        residual = p - torch.where(rejected[:, None], q, 0.0)
    elif log_q is not None:
        draft_at = torch.where(rejected, draft_rows[at], 0)
        q = (draft_scores[draft_at].float() / draft_temperature - log_q[draft_at, None]).exp()
        if draft_columns is not None:
            q = torch.where(draft_columns < 0, 0.0, q[:, draft_columns.clamp(min=0).long()])
        residual = p - torch.where(rejected[:, None], q, 0.0)
    # p and q equal to rounding: a rejection that should not have been leaves p itself.
    weights = torch.where((residual > 0).any(dim=-1, keepdim=True), residual, p)
    if race:
        bonus = (weights * (1.0 / race_exponentials(rows, scores.shape[1], seed))).argmax(dim=-1)
    else:
        bonus = inverse_cdf(weights.clamp(min=0), draw_shares(rows, seed))
    return accepted, torch.where(valid[at] & (counts > 0), bonus, -1)


def _normalisers(scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 logsumexp of each row at a temperature, not finite where the row has no distribution."""
    return (scores.float() / temperature).logsumexp(dim=-1)


def packed_draft_rows(offsets: torch.Tensor) -> torch.Tensor:
    """Packed index of each row's first draft `[rows]`: drafts are packed without the rows' anchors."""
    anchors = (offsets.diff() > 0).long()
    return offsets[:-1] - (anchors.cumsum(0) - anchors)


def draft_columns_of(draft_token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 `[V]`: the draft column of every token of the target, from the token of every column int64 `[W]`."""
    columns = torch.full((vocab_size,), -1, dtype=torch.int32, device=draft_token_ids.device)
    columns[draft_token_ids] = torch.arange(len(draft_token_ids), dtype=torch.int32, device=draft_token_ids.device)
    return columns
