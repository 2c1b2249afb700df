"""Rejection sampling: the Triton kernel and its twin choose the same tokens, and these have the target's law."""

import contextlib

import pytest
import torch
from scipy.stats import chi2

from adaflash_hf import AdaFlashValueError
from adaflash_hf.kernels import draft_columns_of, noise, sample_verify, use_backend


INF = float("inf")
SEED = 3_141_592_653_589_793_238


def offsets_of(counts, device="cpu"):
    return torch.tensor([0, *counts], device=device).cumsum(0)


def case(counts, vocab_size, kind, device, dtype=torch.float32, close=1.0):
    """Scores `[T, V]`, tokens `[T]`, offsets and draft arguments; drafts are drawn from scores near the target's."""
    total = sum(counts)
    scores = torch.randn(total, vocab_size, device=device).to(dtype) * 2
    is_draft = torch.ones(total + 1, dtype=torch.bool, device=device)
    is_draft[offsets_of(counts, device)] = False
    before, is_draft = scores[is_draft[1:]], is_draft[:-1]
    draft = (before.float() + close * torch.randn(before.shape, device=device)).to(dtype)
    arguments = {"temperature": 0.7, "draft_temperature": 1.3}
    columns = torch.arange(vocab_size, device=device)
    if kind == "subset":
        columns = torch.randperm(vocab_size, device=device)[: vocab_size * 2 // 3]
        draft = draft[:, columns].contiguous()
        arguments["draft_columns"] = draft_columns_of(columns, vocab_size)
    tokens = torch.zeros(total, dtype=torch.long, device=device)
    if len(draft):
        tokens[is_draft] = columns[torch.multinomial((draft.float() / 1.3).softmax(-1), 1)[:, 0]]
    if kind != "one-hot":
        arguments["draft_scores"] = draft
    return (scores, tokens, offsets_of(counts, device), SEED), arguments


@pytest.mark.parametrize("kind", ["scores", "one-hot", "subset"])
@pytest.mark.parametrize(
    "counts, vocab_size, dtype",
    [
        ((1,), 31, torch.float32),
        ((3,), 1000, torch.bfloat16),
        ((2, 0, 1, 14), 31, torch.float16),
        ((16, 1, 0, 5), 1000, torch.float32),
    ],
)
def test_equals_twin(both, device, counts, vocab_size, dtype, kind):
    arguments, options = case(list(counts), vocab_size, kind, device, dtype)
    expected, ours = both(sample_verify, *arguments, **options)
    for a, b in zip(expected, ours, strict=True):
        assert torch.equal(a, b)
    assert ((ours[1] < 0) == (torch.tensor(counts, device=device) == 0)).all()


@pytest.mark.parametrize("counts, vocab_size", [((17,) * 7 + (10,), 500), ((3,), 32003), ((2,), 151936)])
def test_equals_twin_at_size(both, device, counts, vocab_size):
    # Drafts from nearly the target's own distribution, so that long prefixes are accepted.
    arguments, options = case(list(counts), vocab_size, "scores", device, torch.bfloat16, close=0.1)
    expected, ours = both(sample_verify, *arguments, **{**options, "draft_temperature": 0.7})
    for a, b in zip(expected, ours, strict=True):
        assert torch.equal(a, b)


def test_split_vocabulary_gives_the_same(monkeypatch, device, both):
    from adaflash_hf.kernels import sample_verify_triton

    monkeypatch.setattr(sample_verify_triton, "BLOCK_V", 64)
    monkeypatch.setattr(sample_verify_triton, "BLOCK_RACE", 32)
    monkeypatch.setattr(sample_verify_triton, "num_splits", lambda *_: 5)
    arguments, options = case([4, 3], 1003, "subset", device)
    expected, ours = both(sample_verify, *arguments, **options)
    assert torch.equal(expected[0], ours[0]) and torch.equal(expected[1], ours[1])


def test_extreme_scores(both, device):
    """One possible token, a token the target excludes, a huge temperature, and rows without a distribution."""
    scores = torch.zeros(10, 60, device=device)
    scores[0] = -INF
    scores[0, 59] = 2.0  # only 59, which is drafted: kept whatever the noise is
    scores[1, 7] = -INF  # 7 is drafted: rejected, and never the bonus
    scores[3] = -INF
    scores[3, 5] = -100.0  # 3 is drafted, only 5 possible
    scores[5], scores[7, 0], scores[9] = float("nan"), INF, -INF
    tokens = torch.tensor([0, 59, 7, 0, 3, 0, 1, 0, 1, 0], device=device)
    offsets = offsets_of([3, 2, 2, 2, 1], device)
    for draft_scores in (None, torch.zeros(5, 60, device=device)):
        for accepted, bonus in both(sample_verify, scores, tokens, offsets, SEED, draft_scores=draft_scores):
            assert accepted.tolist() == [1, 0, 0, 0, 0]
            assert bonus[0] not in (7, -1) and bonus.tolist()[1:] == [5, -1, -1, -1]
    results = both(sample_verify, torch.randn(3, 60, device=device), tokens[:3], offsets[:2], SEED, 1e30)
    assert torch.equal(torch.stack(results[0]), torch.stack(results[1])) and results[0][1] >= 0


def test_draft_outside_its_vocabulary_and_equal_distributions(both, device):
    """q(x) = 0 keeps x wherever the target allows it; p = q keeps everything."""
    scores = torch.randn(5, 40, device=device)
    tokens = torch.tensor([0, 3, 9, 12, 30], device=device)
    columns = torch.full((40,), -1, dtype=torch.int32, device=device)
    columns[20] = 0
    options = {"draft_scores": torch.zeros(4, 1, device=device), "draft_columns": columns}
    for accepted, bonus in both(sample_verify, scores, tokens, offsets_of([5], device), SEED, **options):
        assert accepted.tolist() == [4] and bonus >= 0
    for accepted, _ in both(sample_verify, scores, tokens, offsets_of([5], device), SEED, draft_scores=scores[:4]):
        assert accepted.tolist() == [4]


@pytest.mark.parametrize("race", [True, False], ids=["race", "inversion"])
def test_law_of_the_output(device, race):
    """Chi-square of first and second tokens against the target; by race, twin and kernel on the same rows."""
    vocab_size, rows = 7, 15_000
    p, q = torch.randn(3, vocab_size) * 1.5, torch.randn(2, vocab_size) * 1.5
    columns = torch.tensor([4, 0, 2, 6])
    for kind in ("scores", "one-hot", "subset"):
        draft = q[:, : len(columns)] if kind == "subset" else q
        drafted = torch.multinomial((draft / 1.2).softmax(-1), rows, replacement=True)
        drafted = columns[drafted] if kind == "subset" else drafted
        tokens = torch.cat([torch.zeros(1, rows, dtype=torch.long), drafted]).t().flatten()
        options = {"temperature": 0.8, "draft_temperature": 1.2}
        if kind != "one-hot":
            options["draft_scores"] = draft.repeat(rows, 1)
        if kind == "subset":
            options["draft_columns"] = draft_columns_of(columns, vocab_size)
        with use_backend("torch") if race else contextlib.nullcontext():
            accepted, bonus = sample_verify(p.repeat(rows, 1), tokens, offsets_of([3] * rows), SEED, **options)
        for position in range(3):
            reached = accepted >= position
            here = torch.where(accepted > position, drafted[min(position, 1)], bonus)[reached]
            expected = (p[position] / 0.8).softmax(-1).double() * len(here)
            counts = torch.bincount(here, minlength=vocab_size)
            assert chi2.sf(((counts - expected) ** 2 / expected).sum().item(), vocab_size - 1) > 1e-4
        if not race:
            continue
        few = 6
        options = {key: v[: 2 * few].to(device) if key == "draft_scores" else v for key, v in options.items()}
        if kind == "subset":
            options["draft_columns"] = options["draft_columns"].to(device)
        arguments = p.repeat(few, 1).to(device), tokens[: 3 * few].to(device), offsets_of([3] * few, device), SEED
        with use_backend("triton"):
            kernel = sample_verify(*arguments, **options)
        assert torch.equal(kernel[0].cpu(), accepted[:few]) and torch.equal(kernel[1].cpu(), bonus[:few])


def test_draws_by_inversion():
    """Shares pick the token whose stretch of the running sum they fall into, never one without weight."""
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]]).repeat(4, 1)
    shares = torch.tensor([2.0**-53, 0.25, 0.2500001, 1.0], dtype=torch.float64)
    assert noise.inverse_cdf(weights, shares).tolist() == [1, 1, 3, 3]
    shares = noise.draw_shares(torch.arange(100_000), SEED)
    assert 0 < shares.min() < 1e-4 and 1 - 1e-4 < shares.max() <= 1 and abs(shares.mean() - 0.5) < 0.005
    drawn = noise.draw(torch.tensor([1.0, 0.0, 3.0]).repeat(20_000, 1))
    assert not (drawn == 1).any() and abs((drawn == 2).double().mean() - 0.75) < 0.02


def test_without_a_distribution_nothing_is_drawn():
    scores = torch.tensor([[0.0, float("nan")], [float("-inf")] * 2, [0.0, 0.0]])
    _, bonus = sample_verify(scores, torch.zeros(3, dtype=torch.long), offsets_of([1, 1, 1]), SEED)
    assert bonus[:2].tolist() == [-1, -1] and bonus[2] >= 0


def test_seeds_and_rows(both, device):
    scores = torch.zeros(8, 1000, device=device)
    tokens, offsets = torch.zeros(8, dtype=torch.long, device=device), offsets_of([1] * 8, device)
    (_, first), (_, again) = both(sample_verify, scores, tokens, offsets, 5)
    assert torch.equal(first, again) and len(set(first.tolist())) > 4
    others = [sample_verify(scores, tokens, offsets, seed)[1] for seed in (6, 5 + 2**31, 5 + 2**40)]
    assert all((other != first).sum() > 4 for other in others)


def test_noise_is_philox(monkeypatch):
    """Known answers of Random123's `kat_vectors` for philox4x32, 7 and 10 rounds, counter and key 0."""
    zero = torch.zeros(1, dtype=torch.long)
    words = [int(word) for word in noise.philox(zero, zero, 0, 0)]
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    monkeypatch.setattr(noise, "ROUNDS", 10)
    words = [int(word) for word in noise.philox(zero, zero, 0, 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_noise_keeps_small_values_apart():
    """A race over a large vocabulary is decided near 0, where float32 near 1 would have no resolution."""
    words = torch.tensor([0, 1, 2, 2**25 - 1, 2**25, 2**31, 2**32 - 1])
    exact = -torch.log1p(-(words.double() + 0.5) / 2**32)
    torch.testing.assert_close(noise.exponential(words).double(), exact, rtol=1e-6, atol=0)


def test_refusals(device):
    scores, tokens = torch.zeros(2, 9, device=device), torch.zeros(2, dtype=torch.long, device=device)
    offsets = offsets_of([2], device)
    with pytest.raises(AdaFlashValueError, match="must be positive"):
        sample_verify(scores, tokens, offsets, 0, temperature=0.0)
    with pytest.raises(AdaFlashValueError, match="draft_columns"):
        sample_verify(scores, tokens, offsets, 0, draft_scores=scores[:1, :5])
    with pytest.raises(AdaFlashValueError, match="strided"):
        sample_verify(scores, tokens, offsets, 0, draft_scores=torch.zeros(9, 9, device=device).t())
