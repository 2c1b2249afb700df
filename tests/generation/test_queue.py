"""A queue of prompts with few live rows: every answer equals its own run."""

import pytest
import torch
from tiny import VOCAB, make_drafter, make_target
from transformers import GenerationConfig

from adaflash_hf import AdaFlashValueError, generate_many


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("policy", ["budget", "fixed"])
def test_every_answer_equals_its_own_run(policy):
    target, drafter = make_target(), make_drafter(head="survival")
    drafter.generation_config.length_policy = policy
    prompts = random_prompts(40)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [3, 4]}
    finished = []
    answers = generate_many(
        target, drafter, prompts, 5, lambda index, tokens: finished.append((index, tokens)), False, **options
    )
    assert sorted(finished) == sorted(enumerate(answers))
    # Short answers overtake long ones.
    assert [index for index, _ in finished] != list(range(40))
    for prompt, answer in zip(prompts, answers, strict=True):
        plain = target.generate(torch.tensor([prompt]), pad_token_id=0, **options)[0, len(prompt) :].tolist()
        assert answer == plain


def test_runs_are_not_sought_in_padding():
    """Padding is token 0, which may be a word."""
    target, drafter = make_target(), make_drafter()
    prompts = [[0], [0, 0], [5, 0], [7, 8, 9, 10, 11, 0]] + random_prompts(8)
    for options in ({"no_repeat_ngram_size": 2}, {"sequence_bias": [[[0, 0, 5], 50.0], [[0, 5, 9], 50.0]]}):
        options |= {"max_new_tokens": 12, "do_sample": False}
        answers = generate_many(target, drafter, prompts, 4, progress_bar=False, **options)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt])
            plain = target.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=2, **options)
            assert answer == plain[0, len(prompt) :].tolist()


def test_only_so_many_rows_are_live(monkeypatch):
    from adaflash_hf.generation import decoding

    target, drafter = make_target(), make_drafter()
    sizes, original = [], decoding.packed_pass

    def record(target, tokens, packed, cache, **settings):
        sizes.append((packed.num_rows, cache.keys[0].shape[0]))
        return original(target, tokens, packed, cache, **settings)

    monkeypatch.setattr(decoding, "packed_pass", record)
    generate_many(target, drafter, random_prompts(20), 3, progress_bar=False, max_new_tokens=9, do_sample=False)
    assert max(rows for rows, _ in sizes) == 3 and max(kept for _, kept in sizes) == 3


def test_nested_calls_are_ordinary():
    """`on_finish` may call `generate` with a drafter; that call is no part of the queue."""
    target, drafter = make_target(), make_drafter()
    inner = []

    def ask(index, tokens):
        batch = torch.tensor([tokens, tokens])
        mask = torch.ones_like(batch)
        inner.append(
            target.generate(batch, attention_mask=mask, assistant_model=drafter, max_new_tokens=4, do_sample=False)
        )

    generate_many(target, drafter, random_prompts(3), 1, ask, False, max_new_tokens=5, do_sample=False)
    assert [x.shape for x in inner] == [(2, 9)] * 3


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"max_live_rows": 0}, "max_live_rows"),
        ({"prompts": [[1], []]}, "Prompt 1"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"generation_config": GenerationConfig(num_return_sequences=2, do_sample=True)}, "num_return_sequences"),
        ({"speculation_type": "dflash"}, "speculation_type"),
        ({"generation_config": GenerationConfig(speculation_type="dflash")}, "speculation_type"),
        ({"drafter": make_target()}, "drafter"),
        ({"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids)).bool()]}, "stopping criteria"),
    ],
)
def test_refusals(arguments, key):
    settings = {"prompts": [[1, 2]], "progress_bar": False, "max_new_tokens": 3, **arguments}
    with pytest.raises(AdaFlashValueError, match=key):
        generate_many(make_target(), **{"drafter": make_drafter(), **settings})


def test_no_prompts():
    assert generate_many(make_target(), make_drafter(), []) == []
