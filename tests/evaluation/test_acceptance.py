"""Arithmetic on known steps, and real generation."""

import pytest
import torch
from tiny import make_drafter, make_target

from adaflash_hf import AdaFlashValueError
from adaflash_hf.evaluation.acceptance import AcceptanceReport, DomainAcceptance, measure_acceptance


def test_tau_shares_and_interval_of_known_steps():
    found = DomainAcceptance([[1, 3, 2], [4, 1], []], [[4, 4, 4], [4, 2], []])
    assert found.tau() == pytest.approx(11 / 5)
    assert found.verified() == pytest.approx(18 / 5)
    # The last step of each row is left out: committed 1, 3 and 4 of up to 4.
    assert found.shares() == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    low, high = found.interval()
    assert 2.0 <= low <= found.tau() <= high <= 2.5
    assert DomainAcceptance([[]], [[]]).interval() == (0.0, 0.0)


def test_the_interval_covers_the_truth_19_times_of_20():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(100):
        rows = torch.randint(1, 6, (30, 20), generator=generator).tolist()
        low, high = DomainAcceptance(rows, rows).interval(resamples=400, seed=seed)
        covered += low <= 3 <= high
    assert 88 <= covered <= 100


def test_shorter_candidates_count_only_where_they_reach():
    found = DomainAcceptance([[1, 2, 1]], [[1, 2, 3]])
    assert found.shares() == [1.0]


def test_measured_by_generating_and_joined():
    target, drafter = make_target(), make_drafter(head="survival")
    prompts = {"chat": [[3, 4, 5], [6, 7]], "code": [[8, 9]] * 3}
    before = torch.random.get_rng_state()
    whole = measure_acceptance(target, drafter, prompts, max_new_tokens=12, batch_size=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    for domain, found in whole.domains.items():
        assert [sum(row) for row in found.accepted_lengths] == [11] * len(prompts[domain])
    halves = [
        measure_acceptance(target, drafter, {name: rows[i::2] for name, rows in prompts.items()}, max_new_tokens=12)
        for i in range(2)
    ]
    joined = AcceptanceReport.joined(halves)
    assert joined.metrics() == whole.metrics() and joined.spread() == whole.spread()
    assert whole.table().count("\n") == 4
    sampled = [measure_acceptance(target, drafter, prompts, 12, True, 1.5, seed=s).metrics() for s in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert sampled[0]["eval_tau_chat"] > 1 and sampled[0]["eval_tau"] > 1
    with pytest.raises(AdaFlashValueError, match="`chat`"):
        measure_acceptance(target, drafter, {"chat": [[]]})
