"""Prompts that begin alike are read once, and nothing else changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TARGETS, make_drafter, make_target
from transformers import LlamaForCausalLM

from adaflash_hf import generate_many
from adaflash_hf.generation import decoding
from adaflash_hf.generation import prefill as prefill_module
from adaflash_hf.generation.candidate_generator import DiffusionCandidateGenerator
from adaflash_hf.generation.prefill import packed_prefill, read_once
from adaflash_hf.generation.rows import left_padded


GREEDY = {"do_sample": False, "max_new_tokens": 12}
SYSTEM = [7, 3, 9, 9, 4]
PROMPTS = [[*SYSTEM, 5, 6], [8], SYSTEM, [*SYSTEM, 5, 11, 3, 4], [2, 3], [*SYSTEM, 5, 6]]


TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def beginnings(texts) -> set[tuple[int, ...]]:
    return {tuple(text[:n]) for text in texts for n in range(1, len(text) + 1)}


@settings(deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=7), st.lists(TEXT, max_size=4))
def test_every_beginning_is_read_once(prompts, held):
    reading = read_once(prompts, [np.array(text) for text in held])
    known = beginnings(held)
    wholly_held = {tuple(prompt) for prompt in prompts if tuple(prompt) in known}
    assert sum(reading.counts) == len(beginnings(prompts) - known) + len(wholly_held)
    assert rows_of(reading, prompts, held) == [[tuple(p[: i + 1]) for i in range(len(p))] for p in prompts]


def rows_of(reading, prompts, held) -> list[list[tuple[int, ...]]]:
    """What each row holds in the end: at each place, all tokens up to it that its key was made of."""
    own = zip(prompts, reading.counts, strict=True)
    read = [tuple(prompt[: i + 1]) for prompt, n in own for i in range(len(prompt) - n, len(prompt))]
    sources, rows = reading.sources.tolist(), []
    for prompt, (row, length) in zip(prompts, reading.copies, strict=True):
        copied = [tuple(held[row][: i + 1]) for i in range(length)]
        rows.append(copied + [read[sources.pop(0)] for _ in prompt[length:]])
    assert not sources
    return rows


def test_a_long_tail_is_read_whole(monkeypatch):
    monkeypatch.setattr(prefill_module, "_LARGE_MASK", 20)
    monkeypatch.setattr(prefill_module, "_LARGEST_MASK", 20)
    reading = read_once([[1, 2, 3], [1, 2, 4], [1, *range(5, 12)]])
    assert reading.counts == [3, 1, 8] and reading.sources.tolist() == [0, 1, 2, 0, 1, 3, *range(4, 12)]


def test_a_long_tail_has_to_save_an_eighth(monkeypatch):
    monkeypatch.setattr(prefill_module, "_LARGE_MASK", 20)
    assert read_once([[1, *range(2, 12)], [1, *range(20, 30)]]).counts == [11, 11]
    assert read_once([[1, 2, *range(3, 12)], [1, 2, *range(20, 29)]]).counts == [11, 9]


@pytest.mark.parametrize("most", [6, 12, 20, 60])
def test_long_tails_beside_held_texts(most, monkeypatch):
    monkeypatch.setattr(prefill_module, "_LARGE_MASK", most)
    monkeypatch.setattr(prefill_module, "_LARGEST_MASK", most)
    prompts, held = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 9], [1, 2, 8], [1, 2, 3, 4]], [[3], [1, 2, 3, 7]]
    reading = read_once(prompts, [np.array(text) for text in held])
    assert rows_of(reading, prompts, held) == [[tuple(p[: i + 1]) for i in range(len(p))] for p in prompts]


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


def test_large_masks_are_not_kept(monkeypatch):
    from adaflash_hf.generation import attention

    target, drafter = make_target(), make_drafter()
    inputs = left_padded(PROMPTS, target.device)
    plain = target.generate(**inputs, **GREEDY)
    kept, tail_mask = [], attention.PackedBatch._tail_mask

    def watched(self, *args):
        mask = tail_mask(self, *args)
        kept.append(len(self._tails))
        return mask

    monkeypatch.setattr(attention.PackedBatch, "_tail_mask", watched)
    monkeypatch.setattr(attention, "_KEPT_MASK", 0)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, **GREEDY), plain)
    assert kept and not any(kept)


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


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", TARGETS)
def test_rows_that_enter_beside_live_ones(kind, window):
    target, drafter = make_target(kind), make_drafter()
    drafter.generation_config.context_window = window
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(14)]
    answers = generate_many(target, drafter, prompts, max_live_rows=4, eos_token_id=[3, 4], pad_token_id=0, **GREEDY)
    for prompt, answer in zip(prompts, answers, strict=True):
        plain = target.generate(torch.tensor([prompt]), eos_token_id=[3, 4], pad_token_id=0, **GREEDY)
        assert answer == plain[0, len(prompt) :].tolist()


def test_what_live_rows_begin_with_is_not_read_again(monkeypatch):
    """Fewer tokens are read, and target and drafter go on as if all had been."""
    target, drafter = make_target(), make_drafter()
    drafter.generation_config.length_policy = "fixed"
    prompts = [[*SYSTEM, 5, 6 + i, *range(i)] for i in range(12)]

    def run():
        hidden, original = [], DiffusionCandidateGenerator._block_hidden

        def record(*arguments):
            hidden.append(original(*arguments))
            return hidden[-1]

        with monkeypatch.context() as patch:
            seen = read_tokens(patch)
            patch.setattr(DiffusionCandidateGenerator, "_block_hidden", record)
            answers = generate_many(
                target, drafter, prompts, 3, progress_bar=False, eos_token_id=[3, 4, 5], pad_token_id=0, **GREEDY
            )
        return answers, sum(seen), hidden

    answers, tokens, hidden = run()
    monkeypatch.setattr(decoding, "packed_prefill", lambda *arguments: packed_prefill(*arguments[:-1]))
    plain_answers, plain_tokens, plain_hidden = run()
    assert answers == plain_answers and len({len(answer) for answer in answers}) > 2
    assert tokens <= plain_tokens - 6 * len(SYSTEM)  # two rows in three or more enter beside a live one
    torch.testing.assert_close(hidden, plain_hidden)
