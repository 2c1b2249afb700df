"""Greedy output equals plain `generate` in float32, token for token, whatever the drafter proposes."""

import threading

import pytest
import torch
from tiny import TARGETS, make_drafter, make_target, ragged_prompts
from transformers import DynamicCache, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from adaflash_hf import AdaFlashValueError, AdaptiveLengthLogitsProcessor, collect_statistics
from adaflash_hf.generation.logits_process import is_masked
from adaflash_hf.target import Target


GREEDY = {"do_sample": False, "max_new_tokens": 24}


@pytest.mark.parametrize("policy", ["fixed", "head", "budget"])
@pytest.mark.parametrize("name", TARGETS)
def test_single_rows(name, policy, oracle):
    target, drafter = make_target(name), make_drafter(head="survival")
    drafter.generation_config.length_policy = policy
    for length in (1, 3, 7, 12):
        ids, _ = ragged_prompts((length,))
        plain = target.generate(ids, **GREEDY)
        oracle(plain)
        with collect_statistics() as calls:
            ours = target.generate(ids, assistant_model=drafter, **GREEDY)
        assert torch.equal(ours, plain)
        if policy == "fixed":
            assert calls[0].mean_accepted_length > 2


@pytest.mark.parametrize("policy", ["fixed", "head", "budget"])
@pytest.mark.parametrize("name", TARGETS)
def test_ragged_batch(name, policy, oracle):
    target, drafter = make_target(name), make_drafter(head="length")
    drafter.generation_config.length_policy = policy
    ids, mask = ragged_prompts()
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    oracle(plain)
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY)
    assert torch.equal(ours, plain)
    for i in range(len(ids)):
        alone = target.generate(ids[i : i + 1, mask[i] == 1], **GREEDY)
        assert torch.equal(ours[i, mask[i].argmax() :], alone[0])


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_real_drafts(name):
    """Without the oracle: whatever this random drafter proposes."""
    target, drafter = make_target(name), make_drafter()
    ids, mask = ragged_prompts()
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("batch", [1, 4])
def test_end_token_at_every_position(batch, oracle):
    target, drafter = make_target(), make_drafter()
    ids, mask = ragged_prompts((1, 3, 7, 12)[-batch:])
    run = target.generate(ids, attention_mask=mask, **GREEDY)
    oracle(run, every=100)
    for k in range(12):
        end = int(run[0, ids.shape[1] + k])
        options = {"attention_mask": mask, "eos_token_id": end, "pad_token_id": 0, **GREEDY}
        plain = target.generate(ids, **options)
        ours = target.generate(ids, assistant_model=drafter, **options)
        assert torch.equal(ours, plain), f"end token at position {k}"


@pytest.mark.parametrize("new_tokens", [1, 2, 4, 5, 6])
def test_lengths_around_a_block(new_tokens, oracle):
    target, drafter = make_target(), make_drafter()
    ids, mask = ragged_prompts()
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new_tokens}
    plain = target.generate(ids, **options)
    oracle(target.generate(ids, attention_mask=mask, **GREEDY), every=100)
    ours = target.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(ours, plain)


def test_num_return_sequences_are_rows():
    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    options = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 8, "assistant_model": drafter}
    rows = target.generate(ids, **options)
    assert rows.shape == (8, 17)
    assert len({tuple(row.tolist()) for row in rows}) > 4


@pytest.mark.parametrize("most", [0, 1, 3])
def test_num_assistant_tokens_caps_the_block(most, oracle):
    target, drafter = make_target(), make_drafter()
    drafter.generation_config.num_assistant_tokens = most
    ids, _ = ragged_prompts((5,))
    plain = target.generate(ids, **GREEDY)
    oracle(plain, every=100)
    output = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, plain)
    assert max(output.statistics.candidate_lengths[0]) == most + 1


def test_statistics_add_up(oracle):
    target, drafter = make_target(), make_drafter()
    ids, mask = ragged_prompts()
    oracle(target.generate(ids, attention_mask=mask, **GREEDY))
    with collect_statistics() as calls:
        output = target.generate(
            ids, attention_mask=mask, assistant_model=drafter, return_dict_in_generate=True, **GREEDY
        )
        target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY)
    statistics = output.statistics
    assert len(calls) == 2 and calls[0] is statistics
    for accepted, candidates in zip(statistics.accepted_lengths, statistics.candidate_lengths, strict=True):
        assert 1 + sum(accepted) == GREEDY["max_new_tokens"]
        assert all(1 <= a <= c for a, c in zip(accepted, candidates, strict=True))
    assert statistics.draft_seconds > 0 and statistics.verify_seconds > 0


@pytest.mark.parametrize("batch", [1, 4])
def test_scores_logits_and_cache_as_plain(batch, oracle):
    target, drafter = make_target(), make_drafter()
    ids, mask = ragged_prompts((1, 3, 7, 12)[-batch:])
    options = {
        "attention_mask": mask,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.3,
        **GREEDY,
    }
    plain = target.generate(ids, **options)
    oracle(plain.sequences)
    ours = target.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(ours[name]), torch.stack(plain[name]), rtol=1e-4, atol=1e-4)
    assert ours.cache.get_seq_length() == plain.cache.get_seq_length()
    real = mask.bool()
    width = ids.shape[1]
    for ours_layer, plain_layer in zip(ours.cache.layers, plain.cache.layers, strict=True):
        torch.testing.assert_close(ours_layer.keys[:, :, width:], plain_layer.keys[:, :, width:], rtol=1e-3, atol=1e-4)
        prompt = real[:, None, :, None].expand_as(plain_layer.keys[:, :, :width])
        torch.testing.assert_close(
            ours_layer.keys[:, :, :width][prompt], plain_layer.keys[:, :, :width][prompt], rtol=1e-3, atol=1e-4
        )


def test_custom_stopping_criterion_cuts_inside_a_block(oracle):
    class StopAt(StoppingCriteria):
        def __init__(self, length):
            self.length = length

        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)

    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    oracle(target.generate(ids, **GREEDY), every=100)
    for length in range(6, 14):
        options = {"stopping_criteria": StoppingCriteriaList([StopAt(length)]), **GREEDY}
        plain = target.generate(ids, **options)
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)


def test_streamer_gets_every_token_once(oracle):
    class Collect:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    oracle(target.generate(ids, **GREEDY))
    plain, ours = Collect(), Collect()
    target.generate(ids, streamer=plain, **GREEDY)
    target.generate(ids, streamer=ours, assistant_model=drafter, **GREEDY)
    assert ours.tokens == plain.tokens and ours.ended


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 15, "eos_token_id": 5},
        {"bad_words_ids": [[7], [8, 9]]},
        {"suppress_tokens": [3, 4]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(4 + batch, 20 + batch))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors(options, oracle):
    target, drafter = make_target(), make_drafter()
    ids, mask = ragged_prompts()
    plain = target.generate(ids, attention_mask=mask, **options, **GREEDY)
    oracle(plain)
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options, **GREEDY)
    assert torch.equal(ours, plain)


def test_guidance_scale_at_batch_one(oracle):
    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    plain = target.generate(ids, guidance_scale=1.5, **GREEDY)
    oracle(plain)
    assert torch.equal(target.generate(ids, guidance_scale=1.5, assistant_model=drafter, **GREEDY), plain)


def test_label_convention_and_draft_vocabulary(oracle):
    target = make_target()
    ids, mask = ragged_prompts()
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    oracle(plain)
    for drafter in (make_drafter(label_convention="sample_from_anchor"), make_drafter(draft_vocab_size=12)):
        ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY)
        assert torch.equal(ours, plain)


def test_sliding_drafter(oracle):
    target = make_target()
    ids, mask = ragged_prompts()
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    oracle(plain)
    for causal in (True, False):
        drafter = make_drafter(sliding_window=6, sliding_window_causal=causal)
        assert torch.equal(target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY), plain)


def test_the_callers_empty_cache_is_filled(oracle):
    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    oracle(target.generate(ids, **GREEDY))
    caches = [DynamicCache(config=target.config), DynamicCache(config=target.config)]
    target.generate(ids, cache=caches[0], **GREEDY)
    target.generate(ids, cache=caches[1], assistant_model=drafter, **GREEDY)
    assert caches[1].get_seq_length() == caches[0].get_seq_length() > 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_returned_cache_serves_a_plain_second_turn(name, oracle):
    target, drafter = make_target(name), make_drafter()
    ids, _ = ragged_prompts((12,))
    oracle(target.generate(ids, **GREEDY))
    turns = []
    for assistant in ({}, {"assistant_model": drafter}):
        first = target.generate(ids, return_dict_in_generate=True, **assistant, **GREEDY)
        second = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
        turns.append(target.generate(second, cache=first.cache, **GREEDY))
    assert torch.equal(turns[0], turns[1])


def test_only_the_new_ids_and_their_positions():
    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((23,))
    answers = []
    for assistant in ({}, {"assistant_model": drafter}):
        cache = DynamicCache(config=target.config)
        target(ids[:, :20], cache=cache, use_cache=True)
        rest = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(20, 23)[None], "cache": cache}
        answers.append(target.generate(ids[:, 20:], **rest, **assistant, **GREEDY))
    assert torch.equal(*answers)


@pytest.mark.parametrize("max_length", [10**6, 10**30])
def test_no_memory_is_held_for_a_length_that_no_row_reaches(max_length):
    """A tokenizer without a limit names 10**30."""
    target, drafter = make_target(), make_drafter()
    ids, mask = ragged_prompts((5, 3))
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=400, do_sample=False)
    ends = sorted({int(row[-9]) for row in plain})
    options = {"attention_mask": mask, "max_length": max_length, "eos_token_id": ends, "do_sample": False}
    ours = target.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(ours, target.generate(ids, **options)) and ours.is_contiguous()
    assert ours.untyped_storage().nbytes() < 2**20


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_change_on_the_way_are_refused(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    target = make_target(rope_parameters=rope, max_position_embeddings=64 if kind == "longrope" else 16)
    drafter = make_drafter()
    ids, mask = ragged_prompts((5, 9))
    options = {"attention_mask": mask, "do_sample": False}
    with pytest.raises(AdaFlashValueError, match=f"'{kind}'.* passes 16 tokens"):
        target.generate(ids, assistant_model=drafter, max_new_tokens=8, **options)
    plain = target.generate(ids, max_new_tokens=7, **options)
    assert torch.equal(target.generate(ids, assistant_model=drafter, max_new_tokens=7, **options), plain)
    if kind == "longrope":  # all of it past the change
        ids, mask = ragged_prompts((20, 18))
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), target.generate(ids, **options))


def test_taps_hear_their_own_thread_only():
    target = Target(make_target(), make_drafter().config)
    with target.taps() as captured:
        thread = threading.Thread(target=lambda: target.model(torch.tensor([[3, 4]])))
        thread.start()
        thread.join()
        assert not any(captured.values())
        target.model(torch.tensor([[3, 4]]))
    assert all(len(parts) == 1 for parts in captured.values())


@pytest.mark.parametrize("limits", [[4], [5], [20], [30, 10], [10, 30]], ids=str)
def test_length_criteria_take_the_place_of_max_length(limits, oracle):
    """Inside the prompt, at its end, beyond `max_new_tokens`, and several of them."""
    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    oracle(target.generate(ids, max_new_tokens=40, do_sample=False), every=100)
    options = {"max_new_tokens": 8, "do_sample": False}
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=n) for n in limits])
    plain = target.generate(ids, stopping_criteria=criteria, **options)
    assert plain.shape[1] == max(6, min(limits))
    assert torch.equal(target.generate(ids, assistant_model=drafter, stopping_criteria=criteria, **options), plain)


def test_a_shorter_max_length_criterion(oracle):
    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    oracle(target.generate(ids, **GREEDY), every=100)
    options = {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(max_length=9)]), **GREEDY}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain) and plain.shape[1] == 9


def test_num_assistant_tokens_of_the_call():
    target, drafter = make_target(), make_drafter()
    drafter.generation_config.length_policy = "fixed"
    ids, _ = ragged_prompts((5,))
    with collect_statistics() as calls:
        target.generate(ids, assistant_model=drafter, num_assistant_tokens=2, **GREEDY)
        target.generate(ids, assistant_model=drafter, **GREEDY)
    assert max(calls[0].candidate_lengths[0]) == 3 and max(calls[1].candidate_lengths[0]) == 5


def test_blocks_wider_than_the_default_number_of_assistant_tokens():
    """`generate` fills in 20 for a call that says nothing."""
    target, drafter = make_target(), make_drafter(block_size=30)
    drafter.generation_config.length_policy = "fixed"
    ids, _ = ragged_prompts((5,))
    options = {**GREEDY, "max_new_tokens": 60}
    with collect_statistics() as calls:
        ours = target.generate(ids, assistant_model=drafter, **options)
    assert max(calls[0].candidate_lengths[0]) == 30
    assert torch.equal(ours, target.generate(ids, **options))


@pytest.mark.parametrize(
    ("of_the_drafter", "of_the_call", "message"),
    [
        (None, {"num_assistant_tokens": -1}, "`num_assistant_tokens` is -1"),
        (0, {"speculation_type": "dflash"}, "`num_assistant_tokens` 0 still drafts one"),
        (None, {"num_assistant_tokens": 2, "speculation_type": "dflash"}, "`num_assistant_tokens` 2 has no effect"),
    ],
)
def test_numbers_of_assistant_tokens_that_are_refused(of_the_drafter, of_the_call, message):
    target, drafter = make_target(), make_drafter()
    drafter.generation_config.num_assistant_tokens = of_the_drafter
    with pytest.raises(AdaFlashValueError, match=message):
        target.generate(ragged_prompts((5,))[0], assistant_model=drafter, **of_the_call, **GREEDY)


def test_a_draft_processor_shortens_drafts(monkeypatch):
    """A position left with only the mask token ends the candidate; what comes out doesn't change."""
    target, drafter = make_target(), make_drafter(draft_vocab_size=20)
    drafter.generation_config.length_policy = "fixed"
    ids, mask = ragged_prompts()
    seen = []

    def stop_at_even_lengths(input_ids, scores):
        seen.append(input_ids.shape[1])
        if input_ids.shape[1] % 2 == 0:
            scores = torch.full_like(scores, float("-inf"))
            scores[:, drafter.config.mask_token_id] = 0.0
        return scores

    drafter.draft_processors = [stop_at_even_lengths]
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    with collect_statistics() as calls:
        ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY)
    assert torch.equal(ours, plain)
    assert max(max(row) for row in calls[0].candidate_lengths) == 2 and seen
    sampled = target.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=True, max_new_tokens=8)
    assert sampled.shape == (4, 20)


def test_adaptive_length_processor_masks_past_the_length():
    drafter = make_drafter(head="survival")
    processor = AdaptiveLengthLogitsProcessor(drafter.generation_config, 4, 1, drafter.length_head)
    hidden, room = torch.randn(6, 5, 32), torch.tensor([4, 4, 4, 4, 1, 0])
    lengths = processor.choose(hidden, room, anchor_length=7)
    assert (lengths <= room).all() and len(set(lengths.tolist())) > 1
    for k in range(4):
        scores = processor(torch.zeros(6, 7 + k, dtype=torch.long), torch.randn(6, 32))
        assert torch.equal(is_masked(scores, 1), lengths <= k)
