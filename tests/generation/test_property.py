"""Random targets, drafters, prompts and options against plain decoding.

`ADAFLASH_PROPERTY_SECONDS=600 pytest tests/generation/test_property.py --hypothesis-show-statistics` goes on for that
long, with new examples each time.
"""

import os
import time

import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from option_grid import Collects, Counts, Remembers, RowStops, difference
from tiny import TARGETS, VOCAB, make_drafter, make_target, ragged_prompts
from transformers import LogitsProcessorList, StoppingCriteriaList

from adaflash_hf import collect_statistics


SECONDS = float(os.environ.get("ADAFLASH_PROPERTY_SECONDS", 0))
_started = time.monotonic()
_failed: list[str] = []
_targets: dict = {}
_SIMPLE = {
    "repetition_penalty": 1.4,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [3, 4, 5],
    "bad_words_ids": [[7], [8, 9]],
    "sequence_bias": [[[6], 2.5]],
    "guidance_scale": 1.4,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "return_dict_in_generate": True,
    "prefill_chunk_size": 3,
    "cache_implementation": "static",
    "num_assistant_tokens": 2,
}


def target_of(name: str, seed: int, attention: str):
    key = name, seed, attention
    if key not in _targets:
        _targets[key] = make_target(name, seed=seed, attn_implementation=attention)
    return _targets[key]


@st.composite
def drafters(draw):
    block = draw(st.integers(2, 8))
    overrides = {
        "block_size": block,
        "seed": draw(st.integers(1, 3)),
        "head": draw(st.sampled_from([None, "length", "survival"])),
        "label_convention": draw(st.sampled_from(["fill_in", "sample_from_anchor"])),
        "draft_vocab_size": draw(st.sampled_from([None, 9])),
        "max_position_embeddings": draw(st.sampled_from([8, 256])),
    }
    if draw(st.booleans()):
        overrides |= {"sliding_window": draw(st.integers(2, 9)), "sliding_window_causal": draw(st.booleans())}
    policy = {
        "context_window": draw(st.sampled_from([None, 1, 6])),
        "length_policy": draw(st.sampled_from(["fixed", "budget", *(["head"] if overrides["head"] else [])])),
        "lookup_tokens": draw(st.sampled_from([0, 10])),
    }
    return overrides, policy


@st.composite
def options(draw):
    """Plain keyword arguments, and the kinds of objects to make for each call."""
    chosen = {key: _SIMPLE[key] for key in draw(st.sets(st.sampled_from(sorted(_SIMPLE)), max_size=3))}
    if "output_attentions" in chosen:  # refused with a static cache
        chosen.pop("cache_implementation", None)
    if chosen.keys() & {"output_scores", "output_logits", "output_hidden_states", "output_attentions"}:
        chosen["return_dict_in_generate"] = True
    chosen["max_new_tokens"] = draw(st.integers(1, 24))
    if draw(st.booleans()):
        chosen["eos_token_id"] = draw(st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=4))
        chosen["min_new_tokens"] = draw(st.integers(0, 6))
    if draw(st.booleans()):
        chosen |= {"do_sample": True, "top_k": 1, "temperature": draw(st.sampled_from([0.5, 1.0, 2.0]))}
    else:
        chosen["do_sample"] = False
    made = draw(st.sets(st.sampled_from(["memory", "counts", "stops", "streamer", "second turn"]), max_size=2))
    return chosen, made


@settings(
    max_examples=int(SECONDS * 5) or 20,
    derandomize=not SECONDS,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    name=st.sampled_from(sorted(TARGETS)),
    seed=st.integers(0, 1),
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    chosen=options(),
    drafter=drafters(),
    every=st.sampled_from([None, 2, 5, 100]),
)
def test_as_plain(name, seed, lengths, chosen, drafter, every, oracle):
    if SECONDS and not _failed and time.monotonic() - _started > SECONDS:
        event("time was up")
        return
    (arguments, made), (overrides, policy) = chosen, drafter
    target = target_of(name, seed, "eager" if "output_attentions" in arguments else "sdpa")
    ids, mask = ragged_prompts(lengths)
    drafter = make_drafter(**overrides)
    for key, value in policy.items():
        setattr(drafter.generation_config, key, value)
    if "second turn" in made:
        arguments = {key: value for key, value in arguments.items() if key != "cache_implementation"}

    def run(**assistant):
        given = {"input_ids": ids, "attention_mask": mask, **arguments}
        if "second turn" in made:
            first = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
            turn = target.generate(ids, attention_mask=mask, **first)
            given["input_ids"] = torch.cat([turn.sequences, ids[:, -1:]], dim=1)
            given["attention_mask"] = torch.cat([mask, torch.ones(len(ids), 4, dtype=torch.long)], dim=1)
            given["cache"] = turn.cache
        given["logits_processor"] = LogitsProcessorList(
            [kind() for key, kind in (("memory", Remembers), ("counts", Counts)) if key in made]
        )
        if "stops" in made:
            given["stopping_criteria"] = StoppingCriteriaList([RowStops(given["input_ids"].shape[1])])
        streamer = Collects() if "streamer" in made else None
        torch.manual_seed(0)
        return target.generate(**given, streamer=streamer, **assistant), streamer

    plain = run()
    sequences = plain[0] if torch.is_tensor(plain[0]) else plain[0].sequences
    oracle(sequences, every=every)
    with collect_statistics() as calls:
        ours = run(assistant_model=drafter)
    event("drafts accepted" if calls[0].mean_accepted_length > 1 else "no draft accepted")
    differs = difference(plain, ours)
    if differs is not None:
        _failed.append(differs)
    assert differs is None
