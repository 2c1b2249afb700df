"""Length scheduling: against the best of all possible lengths, and the Triton kernel against its twin."""

import itertools

import pytest
import torch

from adaflash_hf import AdaFlashValueError
from adaflash_hf.kernels import survival_lengths


def curves(rows, positions, device):
    return torch.rand(rows, positions, device=device).pow(0.5).cumprod(1)


def rate(survival, costs, lengths):
    taken = sum(survival[row, : int(length)].double().sum() for row, length in enumerate(lengths))
    return float((len(survival) + taken) / costs[len(survival) + int(sum(lengths))].double())


COSTS = {
    "flat then linear": lambda t: 20.0 + (t - 8).clamp(min=0),
    "linear": lambda t: 1.0 * t,
    "constant": lambda t: torch.full_like(t, 3.0),
    "steps": lambda t: 10.0 + (t / 4).ceil() * 4,
}


@pytest.mark.parametrize("cost", COSTS)
def test_no_other_lengths_are_faster(both, device, cost):
    survival = curves(3, 4, device)
    costs = COSTS[cost](torch.arange(16.0, device=device))
    costs[0] = float("nan")
    best = max(rate(survival, costs, lengths) for lengths in itertools.product(range(5), repeat=3))
    expected, ours = both(survival_lengths, survival, costs)
    assert torch.equal(expected, ours)
    assert rate(survival, costs, ours) == pytest.approx(best, rel=1e-12)
    if cost == "linear":  # a sure token costs what it brings, so verifying anything else would only lose
        assert ours.tolist() == [0, 0, 0]
    if cost == "constant":
        assert ours.tolist() == [4, 4, 4]


@pytest.mark.parametrize("rows, positions", [(1, 1), (1, 15), (5, 7), (20, 15)])
def test_equals_twin(both, device, rows, positions):
    survival = curves(rows, positions, device)
    costs = COSTS["steps"](torch.arange(rows * (positions + 1) + 1.0, device=device))
    room = torch.randint(0, positions + 1, (rows,), device=device)
    expected, ours = both(survival_lengths, survival, costs, room)
    assert torch.equal(expected, ours) and (ours <= room).all()


def test_ties_limits_and_bad_numbers(both, device):
    one = torch.ones(3, 2, device=device)
    flat = torch.full((20,), 2.0, device=device)
    for result in both(survival_lengths, one * 0.5, torch.tensor([9.0, 9, 9, 1, 1, 9, 9, 9, 9, 9], device=device)):
        assert result.tolist() == [1, 0, 0]  # equal survival: the shallow position of the lowest row
    for result in both(survival_lengths, one, flat[:6]):  # no more than 5 tokens are in the table
        assert result.tolist() == [1, 1, 0]
    survival = torch.tensor([[float("nan"), 0.9], [-0.0, 0.0], [0.9, 0.8]], device=device)
    for result in both(survival_lengths, survival, flat / torch.arange(1, 21, device=device)):
        assert result.tolist()[1:] == [2, 2]
    for result in both(survival_lengths, one[:, :0], flat):
        assert result.tolist() == [0, 0, 0]
    with pytest.raises(AdaFlashValueError, match="reaches at least"):
        survival_lengths(one, flat[:3])


def test_many_positions_go_to_the_twin(both, device):
    survival = curves(300, 15, device)
    expected, ours = both(survival_lengths, survival, 100.0 + torch.arange(5000.0, device=device))
    assert torch.equal(expected, ours) and ours.sum() > 0
