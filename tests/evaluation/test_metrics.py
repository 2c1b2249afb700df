"""The metrics on cases that can be worked out by hand."""

import pytest

from adaflash_hf.evaluation.metrics import AcceptedLength, Losslessness, VerifiedTokenEfficiency


def test_accepted_length():
    result = AcceptedLength().compute(accepted_lengths=[[1, 3], [2, 2, 2], [6]])
    assert result["accepted_length"] == pytest.approx(16 / 6) and result["steps"] == 6
    assert 2 <= result["low"] < 16 / 6 < result["high"] <= 6


def test_accepted_length_without_steps():
    assert AcceptedLength().compute(accepted_lengths=[[], []])["accepted_length"] == 0


def test_interval_of_equal_sequences_is_a_point():
    result = AcceptedLength().compute(accepted_lengths=[[1, 3]] * 5)
    assert result["low"] == result["high"] == 2


def test_efficiency():
    result = VerifiedTokenEfficiency().compute(accepted_lengths=[[1, 2], [1]], candidate_lengths=[[4, 2], [1]])
    assert result == {"efficiency": 4 / 7, "verified": 7, "committed": 4}


def test_losslessness():
    result = Losslessness().compute(
        predictions=[[1, 2, 3], [1, 2], [4, 5, 6]], references=[[1, 2, 3], [1, 2, 3], [4, 9, 6]]
    )
    assert result == {"identical": pytest.approx(1 / 3), "parted_at": [2, 1]}
