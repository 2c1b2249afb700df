"""Prompts that begin alike are read once, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TARGETS, make_drafter, make_target
from transformers import LlamaForCausalLM

from adaflash_hf import generate_many
from adaflash_hf.generation import prefill as prefill_module
from adaflash_hf.generation.prefill import read_once
from adaflash_hf.generation.rows import left_padded


GREEDY = {"do_sample": False, "max_new_tokens": 12}
SYSTEM = [7, 3, 9, 9, 4]
PROMPTS = [[*SYSTEM, 5, 6], [8], SYSTEM, [*SYSTEM, 5, 11, 3, 4], [2, 3], [*SYSTEM, 5, 6]]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=7))
def test_every_beginning_is_read_once(prompts):
    counts, sources = read_once(prompts)
    beginnings = {tuple(prompt[:n]) for prompt in prompts for n in range(1, len(prompt) + 1)}
    assert sum(counts) == len(beginnings)
    own = zip(prompts, counts, strict=True)
    read = [tuple(prompt[: i + 1]) for prompt, n in own for i in range(len(prompt) - n, len(prompt))]
    wanted = [tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))]
    assert [read[i] for i in sources.tolist()] == wanted


def test_a_long_tail_is_read_whole(monkeypatch):
    monkeypatch.setattr(prefill_module, "_MASK_ELEMENTS", 20)
    counts, sources = read_once([[1, 2, 3], [1, 2, 4], [1, *range(5, 12)]])
    assert counts == [3, 1, 8] and sources.tolist() == [0, 1, 2, 0, 1, 3, *range(4, 12)]


def read_tokens(monkeypatch) -> list[int]:
    """Fills with the number of tokens of each pass of a target."""
    seen, forward = [], LlamaForCausalLM.forward

    def counting(self, input_ids=None, **kwargs):
        seen.append(input_ids.numel())
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counting)
    return seen


@pytest.mark.parametrize("kind", TARGETS)
def test_shared_beginnings_change_nothing(kind, oracle):
    target, drafter = make_target(kind), make_drafter()
    inputs = left_padded(PROMPTS, target.device)
    plain = target.generate(**inputs, **GREEDY)
    oracle(plain, every=3)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, **GREEDY), plain)


def test_what_is_read(monkeypatch):
    target, drafter = make_target(), make_drafter()
    inputs = left_padded(PROMPTS, target.device)
    seen = read_tokens(monkeypatch)
    target.generate(**inputs, assistant_model=drafter, **GREEDY)
    assert seen[0] == len({tuple(prompt[:n]) for prompt in PROMPTS for n in range(1, len(prompt) + 1)})


def test_several_sequences_read_their_prompt_once(monkeypatch):
    target, drafter = make_target(), make_drafter()
    inputs = left_padded(PROMPTS[:2], target.device)
    seen = read_tokens(monkeypatch)
    options = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 5}
    torch.manual_seed(0)
    sequences = target.generate(**inputs, assistant_model=drafter, **options)
    assert seen[0] == len(PROMPTS[0]) + len(PROMPTS[1]) and len(sequences) == 10
    assert len({tuple(row) for row in sequences.tolist()}) > 4


def test_rows_that_enter_beside_live_ones():
    target, drafter = make_target(), make_drafter()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(14)]
    answers = generate_many(target, drafter, prompts, max_live_rows=4, **GREEDY)
    for prompt, answer in zip(prompts, answers, strict=True):
        plain = target.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :]
        assert answer == plain.tolist()
