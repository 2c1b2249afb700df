import pytest
from tiny import make_target, ragged_prompts

from adaflash_hf.evaluation.parity import parting


def test_parting():
    target = make_target()
    prompt, _ = ragged_prompts((4,))
    row = target.generate(prompt, do_sample=False, max_new_tokens=8)[0]
    assert parting(target, row, row.clone(), 4) is None
    other = row.clone()
    other[9] = (other[9] + 1) % 32
    found = parting(target, row, other, 4)
    assert found.position == 5 and found.gap > 0 and not found.is_rounding
    with pytest.raises(ValueError, match="stop condition"):
        parting(target, row, row[:-1], 4)
