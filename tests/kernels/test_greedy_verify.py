"""Greedy verification: the Triton kernel and its twin against a loop in plain Python."""

import pytest
import torch

from adaflash_hf import AdaFlashValueError
from adaflash_hf.kernels import greedy_verify


INF = float("inf")


def offsets_of(counts, device="cpu"):
    return torch.tensor([0, *counts], device=device).cumsum(0)


def packed_counts(total):
    """Rows of 1 to 16 tokens with empty rows between, `total` tokens in all."""
    counts, length = [0], 1
    while sum(counts) < total:
        counts.append(min(length, total - sum(counts)))
        if length % 3 == 0:
            counts.append(0)
        length = length % 16 + 1
    return counts


def reference(scores, tokens, counts):
    choice, accepted, bonus, start = scores.cpu().argmax(-1).tolist(), [], [], 0
    bad = scores.cpu().isnan().any(-1).tolist()
    tokens = tokens.tolist()
    for count in counts:
        kept = 0
        while kept < count - 1 and not bad[start + kept] and choice[start + kept] == tokens[start + kept + 1]:
            kept += 1
        accepted.append(kept)
        bonus.append(-1 if count == 0 or bad[start + kept] else choice[start + kept])
        start += count
    return [accepted, bonus]


def check(both, scores, tokens, counts):
    expected = reference(scores, tokens, counts)
    for accepted, bonus in both(greedy_verify, scores, tokens, offsets_of(counts, scores.device)):
        assert [accepted.tolist(), bonus.tolist()] == expected


def drafts(scores, wrong=0.2):
    """Tokens that mostly follow the argmax."""
    tokens = scores.argmax(-1).roll(1)
    off = torch.rand(tokens.shape, device=tokens.device) < wrong
    return torch.where(off, (tokens + 1) % scores.shape[1], tokens)


@pytest.mark.parametrize(
    "total, vocab_size, dtype",
    [
        (1, 31, torch.float32),
        (1, 32003, torch.bfloat16),
        (3, 1000, torch.float16),
        (17, 31, torch.bfloat16),
        (17, 32003, torch.float32),
        (129, 1000, torch.bfloat16),
        (2, 151936, torch.bfloat16),
    ],
)
def test_equals_reference(both, device, total, vocab_size, dtype):
    # In bfloat16 many maxima are equal, so this tests ties too.
    scores = torch.randn(total, vocab_size, device=device).to(dtype)
    check(both, scores, drafts(scores), packed_counts(total))


def test_split_vocabulary_gives_the_same(monkeypatch, both, device):
    from adaflash_hf.kernels import greedy_verify_triton

    monkeypatch.setattr(greedy_verify_triton, "BLOCK_V", 64)
    monkeypatch.setattr(greedy_verify_triton, "num_splits", lambda *_: 7)
    scores = torch.randn(9, 1000, device=device).bfloat16()
    scores[4, 900] = float("nan")
    check(both, scores, drafts(scores, 0.1), [5, 0, 4])
    scores = torch.zeros(3, 449, device=device)  # the last part is empty
    check(both, scores, drafts(scores, 0), [3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_scores(both, device, dtype):
    scores = torch.full((8, 300), -INF, device=device)
    scores[0, 299] = 0.0  # all but one
    scores[1, [7, 100, 280]] = 3.0  # equal maxima
    scores[2] = 1.0  # all equal
    scores[4] = torch.randn(300)
    scores[4, 200] = INF
    scores[5] = torch.randn(300) * 1e30
    scores[6, :] = -1e38
    tokens = torch.tensor([0, 299, 7, 0, 0, 200, 5, 0], device=device)
    scores = scores.to(dtype)
    check(both, scores, tokens, [8])
    check(both, torch.zeros(2, 9000, device=device), tokens[6:] * 0, [2])  # equal maxima in several blocks of a part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_nan_is_reported_and_never_accepted(both, device, bad, dtype):
    scores = torch.randn(6, 40, device=device).to(dtype)
    tokens = scores.argmax(-1).roll(1)
    scores[bad, 11] = float("nan")
    if bad < 2:
        tokens[bad + 1] = 11  # what argmax would call the maximum
    counts = [3, 3]
    check(both, scores, tokens, counts)
    for accepted, bonus in both(greedy_verify, scores, tokens, offsets_of(counts, device)):
        assert accepted[bad // 3] == bad % 3 and bonus[bad // 3] == -1


def test_strided_rows_are_handled_and_a_strided_vocabulary_refused(both, device):
    wide = torch.randn(5, 130, device=device)
    check(both, wide[:, :97], drafts(wide[:, :97]), [5])
    check(both, wide[::2], drafts(wide[::2]), [3])
    with pytest.raises(AdaFlashValueError, match="strided.*contiguous"):
        greedy_verify(wide.t(), torch.zeros(130, dtype=torch.long, device=device), offsets_of([130], device))


def test_empty_and_wrong_shapes(both, device):
    for accepted, bonus in both(
        greedy_verify,
        torch.zeros(0, 9, device=device),
        torch.zeros(0, dtype=torch.long, device=device),
        offsets_of([0, 0], device),
    ):
        assert accepted.tolist() == [0, 0] and bonus.tolist() == [-1, -1]
    scores = torch.zeros(2, 9, device=device)
    with pytest.raises(AdaFlashValueError, match="T, V"):
        greedy_verify(scores, torch.zeros(3, dtype=torch.long, device=device), offsets_of([2], device))
    with pytest.raises(AdaFlashValueError, match="int64"):
        greedy_verify(scores, torch.zeros(2, dtype=torch.int32, device=device), offsets_of([2], device))
