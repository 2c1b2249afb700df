"""Public reports about assisted and speculative decoding (`cases.md` of the project), one test per case, by number.

Not here, with the reason:

* 4, 104, 106: reports about the speed or quality of one large model; what can be checked is in 1, 72 and 102.
* 21 repeats 20, 45 repeats 44.
* 51: needs two GPUs; the same code path is run here with parts of the target moved by `device_map` (`test_case_52`).
* 84: cuDNN's attention, GPU only.
* 89: FSDP2 over two ranks belongs to the training tests.
* 92, 94: the saved layout is a contract of `tests/test_checkpoints.py` (`test_own_layout_round_trip`,
  `test_save_zlab_layout`); 96: cards are written by the Hub code, tested there.
* 91: template flags are arguments of the example scripts, and their effect needs a trained drafter.
* 100: recurrent targets are refused (`test_case_100`), not rolled back.
* L8: remote code of others.
"""

import copy
import threading

import pytest
import torch
from tiny import VOCAB, make_drafter, make_llava, make_qwen2_vl, make_target, make_tokenizer, ragged_prompts
from torch import nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
    TextIteratorStreamer,
)

from adaflash_hf import AdaFlashConfig, AdaFlashDrafter, AdaFlashError, AdaFlashValueError, collect_statistics
from adaflash_hf.evaluation.parity import parting
from adaflash_hf.generation.candidate_generator import DiffusionCandidateGenerator


GREEDY = {"do_sample": False, "max_new_tokens": 16}
# peft reads a property that transformers has renamed
PEFT_WARNS = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
SLIDING = [{}, {"sliding_window": 4}, {"sliding_window": 4, "sliding_window_causal": False}]
PROMPT = torch.tensor([[5, 9, 14, 3, 22]])


def same(target, drafter, ids=PROMPT, **options):
    """Asserts that drafting changes nothing; returns the output."""
    plain = target.generate(ids, **{**GREEDY, **options})
    ours = target.generate(ids, assistant_model=drafter, **{**GREEDY, **options})
    assert torch.equal(ours, plain)
    return ours


def test_case_1_prompt_of_one_token(oracle):
    target = make_target()
    for token in (10, 3):
        ids = torch.tensor([[token]])
        oracle(target.generate(ids, **GREEDY))
        same(target, make_drafter(), ids)


def test_case_3_rounding_is_told_from_a_wrong_token():
    target, drafter = make_target("qwen2_moe").bfloat16(), make_drafter().bfloat16()
    ids, mask = ragged_prompts()
    options = {"attention_mask": mask, **GREEDY}
    plain, ours = target.generate(ids, **options), target.generate(ids, assistant_model=drafter, **options)
    width = ids.shape[1]
    for row, start in enumerate(mask.argmax(dim=1).tolist()):
        difference = parting(target, plain[row, start:], ours[row, start:], width - start)
        assert difference is None or difference.is_rounding
    wrong = plain[-1].clone()
    logits = target(plain[-1:, : width + 2]).logits[0, -1]
    wrong[width + 2] = int(logits.argmin())
    assert not parting(target, plain[-1], wrong, width).is_rounding


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_case_6_sliding_target_across_its_window(name, oracle):
    target, (ids, _) = make_target(name), ragged_prompts((7,))
    plain = target.generate(ids, do_sample=False, max_new_tokens=40)
    oracle(plain)
    same(target, make_drafter(), ids, max_new_tokens=40)


def test_case_8_and_10_special_and_end_tokens_inside_a_block(oracle):
    target, drafter = make_target(), make_drafter()
    free = target.generate(PROMPT, **GREEDY)
    oracle(free, every=100)
    new = free[0, PROMPT.shape[1] :].tolist()
    for end in dict.fromkeys(new):
        out = same(target, drafter, eos_token_id=end, pad_token_id=0)
        assert out[0, PROMPT.shape[1] :].tolist() == new[: new.index(end) + 1]
    # a special token that is no end token ends nothing
    same(target, drafter, eos_token_id=next(t for t in range(VOCAB) if t not in new))


def test_case_12_stop_strings_inside_a_block(oracle):
    target, tokenizer = make_target(), make_tokenizer()
    free = target.generate(PROMPT, **GREEDY)
    oracle(free, every=100)
    for k in range(1, 8):
        token = int(free[0, PROMPT.shape[1] + k])
        out = same(target, make_drafter(), stop_strings=[tokenizer.decode([token])], tokenizer=tokenizer)
        assert out[0, -1] == token


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_case_14_and_16_fewer_tokens_than_a_block(new_tokens, oracle):
    target, drafter = make_target(), make_drafter()
    oracle(target.generate(PROMPT, **GREEDY), every=100)
    sampled = target.generate(PROMPT, do_sample=True, max_new_tokens=new_tokens, assistant_model=drafter)
    assert sampled.shape[1] == PROMPT.shape[1] + new_tokens
    out = same(target, drafter, max_length=PROMPT.shape[1] + new_tokens, max_new_tokens=None)
    assert out.shape[1] == PROMPT.shape[1] + new_tokens


def test_case_17_min_new_tokens_counts_tokens(oracle):
    target = make_target()
    free = target.generate(PROMPT, **GREEDY)
    oracle(free, every=100)
    end = int(free[0, PROMPT.shape[1] + 4])
    out = same(target, make_drafter(), min_new_tokens=15, eos_token_id=end)
    assert out.shape[1] >= PROMPT.shape[1] + 15


SMALL = {"vocab_size": 8, "initializer_range": 0.15}


def second_tokens(target, drafter, count: int = 4000, **options) -> torch.Tensor:
    """Share of each second token among sampled continuations."""
    settings = {"do_sample": True, "max_new_tokens": 4, "num_return_sequences": count, "assistant_model": drafter}
    out = target.generate(torch.tensor([[2, 1, 3]]), **settings, **options)
    return torch.bincount(out[:, 4], minlength=target.config.vocab_size) / count


@pytest.mark.parametrize("options", [{"top_k": 5, "top_p": 0.9, "temperature": 0.7}, {"temperature": 1.0, "top_k": 0}])
def test_case_18_and_20_sampled_marginals(options):
    target, drafter = make_target(**SMALL), make_drafter(**SMALL)
    plain = second_tokens(target, None, **options)
    ours = second_tokens(target, drafter, **options)
    assert (plain - ours).abs().max() < 4.5 * (2 * 0.25 / 4000) ** 0.5
    assert plain.max() < 0.95


def test_case_23_and_25_seeds_and_rows():
    target, drafter = make_target(), make_drafter()

    def run(seed, **options):
        torch.manual_seed(seed)
        return target.generate(PROMPT, assistant_model=drafter, max_new_tokens=12, **options)

    assert torch.equal(run(0, do_sample=False), run(1, do_sample=False))
    sampled = [run(seed, do_sample=True, num_return_sequences=6) for seed in (0, 0, 1)]
    assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])
    assert len({tuple(row.tolist()) for row in sampled[0]}) == 6


def test_case_26_temperature_reaches_the_verifier():
    target, drafter = make_target(**SMALL), make_drafter(**SMALL)
    hot, cold = (second_tokens(target, drafter, temperature=t, top_k=0) for t in (3.0, 0.1))
    assert hot.max() < cold.max() - 0.2


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.15},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[7], [8, 9]]},
        {"suppress_tokens": [3, 4]},
        {"sequence_bias": [[[5], 3.0]]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_case_27_and_30_penalties(options, oracle):
    target, ids = make_target(), torch.tensor([[4, 7, 4, 7, 4, 7]])
    plain = target.generate(ids, **options, **GREEDY)
    oracle(plain)
    same(target, make_drafter(), ids, **options)


class Grammar(LogitsProcessor):
    """An automaton that walks along the tokens it is shown and raises on one that it had forbidden."""

    def __init__(self):
        self.state = self.length = 0

    def __call__(self, input_ids, scores):
        if self.length:
            assert input_ids.shape[1] == self.length + 1, "a token was shown twice or left out"
            assert int(input_ids[0, -1]) % 3 == self.state, "a forbidden token was committed"
            self.state = (self.state + 1) % 3
        self.length = input_ids.shape[1]
        allowed = torch.arange(scores.shape[1]) % 3 == self.state
        return scores.masked_fill(~allowed, float("-inf"))


def test_case_29_31_and_33_automaton(oracle):
    target, drafter = make_target(), make_drafter()
    plain = target.generate(PROMPT, logits_processor=LogitsProcessorList([Grammar()]), **GREEDY)
    for every in (3, 100):
        oracle(plain, every=every)
        automaton = Grammar()
        ours = target.generate(
            PROMPT, assistant_model=drafter, logits_processor=LogitsProcessorList([automaton]), **GREEDY
        )
        assert torch.equal(ours, plain)
        assert automaton.length == ours.shape[1] - 1
    guided = target.generate(PROMPT, guidance_scale=1.5, **GREEDY)
    oracle(guided)
    same(target, drafter, guidance_scale=1.5)


def turns(target, whole: bool, drafter):
    """Two turns on one cache, then a plain third one; the sequences of the last two."""
    options = {**GREEDY, **({} if drafter is None else {"assistant_model": drafter})}
    first = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), return_dict_in_generate=True, **options)
    ids = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
    held = first.cache.get_seq_length()
    given = {"input_ids": ids if whole else ids[:, held:], "attention_mask": torch.ones_like(ids)}
    second = target.generate(**given, cache=first.cache, return_dict_in_generate=True, **options)
    text = second.sequences if whole else torch.cat([ids[:, :held], second.sequences], dim=1)
    third = torch.cat([text, torch.tensor([[4]])], dim=1)
    third = target.generate(third, attention_mask=torch.ones_like(third), cache=second.cache, **GREEDY)
    return text, third, second.cache.get_seq_length()


@pytest.mark.parametrize("whole", [True, False], ids=["all ids", "new ids"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_case_34_and_39_and_L1_a_cache_over_three_turns(name, whole, oracle):
    target = make_target(name)
    text, third, held = turns(target, whole, None)
    prompt = text[:, :-16]
    without = target.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
    assert torch.equal(without, text), "plain decoding is the reference"
    ours = turns(target, whole, make_drafter())
    assert torch.equal(ours[0], text) and torch.equal(ours[1], third) and ours[2] == held
    oracle(text, every=4)
    ours = turns(target, whole, make_drafter())
    assert torch.equal(ours[0], text) and torch.equal(ours[1], third) and ours[2] == held


def test_case_34_only_new_tokens_are_read(monkeypatch):
    target, read = make_target(), []
    first = target.generate(PROMPT, return_dict_in_generate=True, **GREEDY)
    ids = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
    forward = type(target.model.layers[0]).forward

    def count(self, hidden_states, *args, **kwargs):
        read.append(hidden_states.shape[1])
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(target.model.layers[0]), "forward", count)
    mask = torch.ones_like(ids)
    target.generate(ids, attention_mask=mask, cache=first.cache, assistant_model=make_drafter(), **GREEDY)
    assert read[0] == 4, "three new tokens, and the last of the first turn, which was never read"


def test_case_35_and_75_nothing_survives_a_call():
    target, drafter = make_target(), make_drafter(head="survival")
    before = copy.deepcopy(drafter.generation_config.to_dict())
    long, short = ragged_prompts((20,))[0], ragged_prompts((3,))[0]
    with collect_statistics() as calls:
        target.generate(short, assistant_model=drafter, **GREEDY)
        target.generate(long, assistant_model=drafter, num_assistant_tokens=1, **GREEDY)
        target.generate(short, assistant_model=drafter, **GREEDY)
    assert calls[0].candidate_lengths == calls[2].candidate_lengths
    assert calls[0].accepted_lengths == calls[2].accepted_lengths
    assert drafter.generation_config.to_dict() == before
    assert not any(layer._forward_hooks for layer in target.model.layers)


def test_case_37_threads_share_a_drafter_and_targets_too():
    targets = [make_target(seed=0), make_target("qwen3", seed=5)]
    drafter, results = make_drafter(), {}
    prompts = [ragged_prompts((length,), seed=length)[0] for length in (12, 3, 7, 1)]
    plain = [targets[i % 2].generate(ids, **GREEDY) for i, ids in enumerate(prompts)]

    def work(i):
        results[i] = targets[i % 2].generate(prompts[i], assistant_model=drafter, **GREEDY)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[i], plain[i]) for i in range(4))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_case_42_static_cache_with_sliding_layers(name, oracle):
    target = make_target(name)
    plain = target.generate(PROMPT, cache_implementation="static", return_dict_in_generate=True, **GREEDY)
    oracle(plain.sequences)
    ours = target.generate(
        PROMPT, cache_implementation="static", assistant_model=make_drafter(), return_dict_in_generate=True, **GREEDY
    )
    assert torch.equal(ours.sequences, plain.sequences) and type(ours.cache) is StaticCache
    for a, b in zip(ours.cache.layers, plain.cache.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-3, atol=1e-4)


def test_case_43_no_cache_is_refused():
    with pytest.raises(AdaFlashValueError, match="`use_cache=False`"):
        make_target().generate(PROMPT, use_cache=False, assistant_model=make_drafter(), **GREEDY)


def test_case_44_and_48_rows_of_a_padded_batch(oracle):
    target, drafter = make_target(), make_drafter()
    ids, mask = ragged_prompts((3, 7, 12))
    oracle(target.generate(ids, attention_mask=mask, **GREEDY))
    ours = target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY)
    for row, start in enumerate(mask.argmax(dim=1).tolist()):
        alone = target.generate(ids[row : row + 1, start:], **GREEDY)
        assert torch.equal(ours[row : row + 1, start:], alone)
    padded, padded_mask = ids[:1, 6:], mask[:1, 6:]
    assert padded_mask.tolist() == [[0, 0, 0, 1, 1, 1]]
    oracle(target.generate(padded, attention_mask=padded_mask, **GREEDY))
    same(target, drafter, padded, attention_mask=padded_mask)


IMAGE = torch.tensor([[5, 31, 31, 31, 31, 6, 7], [0, 0, 31, 31, 31, 31, 9]])


def test_case_49_and_99_images(oracle):
    """The image reaches the prompt pass, in a padded batch too, and taps are found on the language model."""
    target, pixels = make_llava(), torch.randn(2, 3, 8, 8)
    given = {"attention_mask": (IMAGE != 0).long(), **GREEDY}
    plain = target.generate(input_ids=IMAGE, pixel_values=pixels, **given)
    assert not torch.equal(plain, target.generate(input_ids=IMAGE, pixel_values=-2 * pixels, **given))
    oracle(plain)
    ours = target.generate(input_ids=IMAGE, pixel_values=pixels, assistant_model=make_drafter(), **given)
    assert torch.equal(ours, plain)
    oracle(target.generate(PROMPT, **GREEDY))
    same(target, make_drafter())


def test_case_52_parts_of_the_target_elsewhere(oracle):
    """Targets that accelerate dispatched: split over devices, and with weights brought in layer by layer."""
    from accelerate import cpu_offload, dispatch_model

    drafter = make_drafter()
    plain = make_target().generate(PROMPT, min_new_tokens=3, **GREEDY)
    oracle(plain)
    names = [
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(4)),
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    split = dispatch_model(make_target(), dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True)
    offloaded = cpu_offload(make_target(), execution_device=torch.device("cpu"))
    assert "forward" in vars(split.model.layers[1]) and next(offloaded.parameters()).device.type == "meta"
    for target in (split, offloaded):
        assert torch.equal(target.generate(PROMPT, assistant_model=drafter, min_new_tokens=3, **GREEDY), plain)


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafter_dtype", [torch.float32, torch.bfloat16])
def test_case_53_dtypes_of_drafter_and_target(target_dtype, drafter_dtype, oracle):
    """Any mix runs, and drafts don't turn into NaN; the drafter moves between dtypes between calls."""
    target, drafter = make_target().to(target_dtype), make_drafter().to(drafter_dtype)
    plain = target.generate(PROMPT, **GREEDY)
    oracle(plain)
    ours = target.generate(PROMPT, assistant_model=drafter, **GREEDY)
    difference = parting(target, plain[0], ours[0], PROMPT.shape[1])
    assert difference is None or (difference.is_rounding and target_dtype == torch.bfloat16)
    drafter.to(torch.float64)
    again = target.generate(PROMPT, assistant_model=drafter, **GREEDY)
    difference = parting(target, plain[0], again[0], PROMPT.shape[1])
    assert difference is None or (difference.is_rounding and target_dtype == torch.bfloat16)


class Int8Linear(nn.Module):
    """Weight-only int8, as torchao's: `weight` is nothing that can be multiplied with."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = nn.Buffer(linear.weight.abs().amax(dim=1, keepdim=True) / 127)
        self.weight = nn.Buffer((linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def test_case_55_quantised_target_and_head(oracle):
    target = make_target()
    for parent in list(target.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child.requires_grad_(False)))
    assert target.lm_head.weight.dtype == torch.int8
    oracle(target.generate(PROMPT, **GREEDY))
    for drafter in (make_drafter(), make_drafter(draft_vocab_size=12)):
        same(target, drafter)


def test_case_55_a_head_whose_weight_is_a_method():
    """Activations are quantised with one scale per pass here, so only the first token is sure to be equal."""
    target = torch.ao.quantization.quantize_dynamic(make_target(), {nn.Linear}, dtype=torch.qint8)
    assert not isinstance(target.lm_head.weight, torch.Tensor)
    plain = target.generate(PROMPT, **GREEDY)
    for drafter in (make_drafter(), make_drafter(draft_vocab_size=12)):
        ours = target.generate(PROMPT, assistant_model=drafter, **GREEDY)
        assert ours.shape == plain.shape and torch.equal(ours[:, :6], plain[:, :6])


def test_case_56_quantised_drafter():
    target = make_target()
    drafter = torch.ao.quantization.quantize_dynamic(make_drafter(), {nn.Linear}, dtype=torch.qint8)
    drafter.fc = make_drafter().fc
    same(target, drafter)


def test_case_58_reduced_head_is_the_drafters_own(oracle):
    target, drafter = make_target(), make_drafter(draft_vocab_size=8)
    drafter.draft_token_ids = torch.tensor([3, 5, 8, 11, 17, 21, 25, 30])
    seen = []
    pick = DiffusionCandidateGenerator._pick

    def record(self, logits):
        tokens = pick(self, logits)
        seen.extend(tokens.tolist())
        return tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiffusionCandidateGenerator, "_pick", record)
        same(target, drafter)
    assert seen and set(seen) <= set(drafter.draft_token_ids.tolist())


@PEFT_WARNS
def test_case_60_and_61_adapters(oracle):
    """LoRA in the layers and the head, adapters changed and switched off between calls."""
    from peft import LoraConfig, get_peft_model

    target, drafter = make_target(), make_drafter()
    base = target.generate(PROMPT, **GREEDY)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    model = get_peft_model(target, config, adapter_name="one").eval()
    model.add_adapter("two", config)
    outputs = {}
    for name in ("one", "two", "one"):
        model.set_adapter(name)
        plain = model.generate(input_ids=PROMPT, **GREEDY)
        oracle(plain)
        assert torch.equal(model.generate(input_ids=PROMPT, assistant_model=drafter, **GREEDY), plain)
        outputs.setdefault(name, plain)
        assert torch.equal(outputs[name], plain)
    with model.disable_adapter():
        oracle(base)
        assert torch.equal(model.generate(input_ids=PROMPT, assistant_model=drafter, **GREEDY), base)
    assert not torch.equal(outputs["one"], outputs["two"]) and not torch.equal(outputs["one"], base)


@PEFT_WARNS
def test_case_61_a_learnt_prompt_is_refused():
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(make_target(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with pytest.raises(AdaFlashValueError, match="learns a prompt"):
        model.generate(input_ids=PROMPT, assistant_model=make_drafter(), **GREEDY)


DRAFTER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mask_token_id": 1,
    "target_layer_ids": [0, 2],
}


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_case_62_65_and_68_keys_without_a_guess(key):
    with pytest.raises(AdaFlashValueError, match=f"`{key}`"):
        AdaFlashDrafter(AdaFlashConfig(**{k: v for k, v in DRAFTER.items() if k != key}))


def test_case_64_mask_token_at_the_edge_of_the_embedding(oracle):
    with pytest.raises(AdaFlashValueError, match="`mask_token_id`"):
        AdaFlashConfig(**{**DRAFTER, "mask_token_id": VOCAB})
    # rows of a padded vocabulary are fine
    target = make_target(vocab_size=40)
    drafter = make_drafter(vocab_size=40, mask_token_id=39)
    oracle(target.generate(PROMPT, **GREEDY))
    same(target, drafter)


def test_case_67_ids_matter_and_metadata_does_not(oracle):
    target, drafter = make_target(), make_drafter(target_model="another/name")
    drafter.config.pad_token_id, drafter.config.bos_token_id = 7, 9
    oracle(target.generate(PROMPT, **GREEDY))
    same(target, drafter)


def test_case_69_conflicting_block_sizes():
    with pytest.raises(AdaFlashValueError, match="block size"):
        AdaFlashConfig(**DRAFTER, length_head={"kind": "length", "hidden_size": 32, "block_size": 5}, block_size=8)


def test_case_71_dispatch_by_class():
    class Special(AdaFlashDrafter):
        pass

    target = make_target()
    drafter = Special(make_drafter().config).eval()
    with collect_statistics() as calls:
        same(target, drafter)
    assert len(calls) == 1
    with pytest.raises(AdaFlashValueError, match="`speculation_type`"):
        target.generate(PROMPT, assistant_model=drafter, speculation_type="other", **GREEDY)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4}, {"output_hidden_states": True}], ids=str)
def test_case_72_every_way_to_read_the_prompt_gives_the_same_features(options, monkeypatch):
    seen = []
    observe = DiffusionCandidateGenerator.observe

    def record(self, features, rows, positions):
        seen.append((features.clone(), rows.clone(), positions.clone()))
        observe(self, features, rows, positions)

    monkeypatch.setattr(DiffusionCandidateGenerator, "observe", record)
    target, (ids, mask) = make_target(), ragged_prompts((3, 11))
    target.generate(ids, attention_mask=mask, assistant_model=make_drafter(), **options, **GREEDY)
    features, rows, positions = seen[0]
    assert positions.tolist() == [0, 1, 2, *range(11)] and rows.tolist() == [0] * 3 + [1] * 11
    for row in range(2):
        hidden = target(ids[row : row + 1, mask[row] == 1], output_hidden_states=True).hidden_states
        truth = torch.cat([hidden[1], hidden[3]], dim=-1)[0]
        torch.testing.assert_close(features[rows == row], truth, rtol=1e-3, atol=1e-4)


def test_case_72_a_reused_cache_gives_features_of_the_new_tokens(monkeypatch):
    """The prefix has none, so the drafter's context starts behind it, at position 0 of its own."""
    seen = []
    observe = DiffusionCandidateGenerator.observe

    def record(self, features, rows, positions):
        seen.append((features.clone(), positions.clone()))
        observe(self, features, rows, positions)

    target = make_target()
    first = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), return_dict_in_generate=True, **GREEDY)
    ids = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
    hidden = target(ids, output_hidden_states=True).hidden_states
    monkeypatch.setattr(DiffusionCandidateGenerator, "observe", record)
    given = {"attention_mask": torch.ones_like(ids), "cache": first.cache}
    target.generate(ids, assistant_model=make_drafter(), **given, **GREEDY)
    assert seen[0][1].tolist() == [0, 1, 2, 3] and int(seen[1][1][0]) == 4
    truth = torch.cat([hidden[1], hidden[3]], dim=-1)[0, -4:]
    torch.testing.assert_close(seen[0][0], truth, rtol=1e-3, atol=1e-4)


def test_case_73_a_drafter_alone_names_its_target():
    with pytest.raises(AdaFlashError, match="tiny/target"):
        make_drafter().generate(PROMPT)


def test_case_76_partial_rotary(oracle):
    """One rule in training and decoding is `test_forward_shapes_and_context_cache`; here, on both sides at once."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    target = make_target("glm")
    assert target.model.rotary_emb.inv_freq.shape[0] * 2 < target.config.head_dim
    oracle(target.generate(PROMPT, **GREEDY))
    same(target, make_drafter(rope_parameters=rope))


def test_case_78_prompt_beyond_the_drafters_positions(oracle):
    target, drafter = make_target(), make_drafter(max_position_embeddings=16)
    ids, _ = ragged_prompts((60,))
    oracle(target.generate(ids, **GREEDY))
    same(target, drafter, ids)


@pytest.mark.parametrize("overrides", SLIDING, ids=str)
def test_case_79_and_81_a_bounded_window_bounds_the_memory(overrides, monkeypatch, oracle):
    target, drafter = make_target(), make_drafter(**overrides)
    drafter.generation_config.context_window = 8
    caches, block = [], DiffusionCandidateGenerator._block_hidden

    def record(self, *args):
        hidden = block(self, *args)
        caches.append((self._cache.keys[0].shape[2], sum(len(part[0]) for part in self._pending)))
        return hidden

    monkeypatch.setattr(DiffusionCandidateGenerator, "_block_hidden", record)
    ids, mask = ragged_prompts((3, 40, 100))
    oracle(target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=40))
    same(target, drafter, ids, attention_mask=mask, max_new_tokens=40)
    assert max(slots for slots, _ in caches) <= 64, "as many slots as the smallest cache has"


@pytest.mark.parametrize("overrides", SLIDING, ids=str)
def test_case_79_a_window_drafts_as_if_the_rest_were_not_there(overrides):
    """Hidden states of a block equal those of a drafter that was only ever given the last positions."""
    from adaflash_hf.target import Target

    target, drafter = make_target(), make_drafter(**overrides)
    features, anchor = torch.randn(30, 64), torch.tensor([4])

    def hidden(window, start):
        drafter.generation_config.context_window = window
        generator = DiffusionCandidateGenerator(drafter, Target(target, drafter.config))
        for first, last in ((0, 21), (21, 24), (24, 25), (25, 30)):
            positions = torch.arange(max(first, start), max(last, start)) - start
            generator.observe(features[max(first, start) : max(last, start)], torch.zeros_like(positions), positions)
            if last > start:
                with torch.no_grad():
                    made = generator._block_hidden(anchor, torch.tensor([last - start]), [0])
        return made

    torch.testing.assert_close(hidden(7, 0), hidden(None, 23), rtol=1e-4, atol=1e-4)
    # a window of the drafter's own that is narrower hides the difference
    assert not torch.allclose(hidden(7, 0), hidden(None, 0), atol=1e-3) or overrides


def test_case_79_rows_of_unlike_length_share_a_ring():
    """The block of a row that hasn't filled its window equals that of the row alone."""
    from adaflash_hf.target import Target

    target, drafter = make_target(), make_drafter()
    drafter.generation_config.context_window = 7
    features = torch.randn(33, 64)

    def hidden(*lengths):
        generator = DiffusionCandidateGenerator(drafter, Target(target, drafter.config))
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])
        taken = torch.cat([features[:n] if n > 5 else features[30 : 30 + n] for n in lengths])
        generator.observe(taken, rows, positions)
        with torch.no_grad():
            return generator._block_hidden(
                torch.full((len(lengths),), 4), torch.tensor(lengths), list(range(len(lengths)))
            )

    both = hidden(20, 3)
    torch.testing.assert_close(both[:1], hidden(20), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both[1:], hidden(3), rtol=1e-4, atol=1e-4)


def test_case_82_fully_masked_rows_stay_finite():
    """Rows of unlike length, eager and sdpa."""
    results = []
    for implementation in ("eager", "sdpa"):
        drafter = make_drafter(attn_implementation=implementation)
        mask = torch.ones(2, 32 + 5, dtype=torch.long)
        mask[0, :24] = 0
        torch.manual_seed(0)
        noise, context = torch.randn(2, 5, 32), torch.randn(2, 32, 64)
        hidden = drafter(noise_embeds=noise, context_hidden_states=context, attention_mask=mask).last_hidden_state
        hidden.square().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in drafter.parameters() if p.grad is not None)
        results.append(hidden.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_case_85_training_masks_are_those_of_decoding():
    """The whole of it: `test_an_overfitted_drafter_accepts_nearly_everything`. Here: a block sees itself both ways."""
    drafter = make_drafter()
    noise, context = torch.randn(1, 5, 32), torch.randn(1, 6, 64)
    with torch.no_grad():
        before = drafter(noise_embeds=noise, context_hidden_states=context).last_hidden_state
        noise[:, -1] += 1.0
        after = drafter(noise_embeds=noise, context_hidden_states=context).last_hidden_state
    assert (before - after)[:, 0].abs().max() > 1e-4


def test_case_88_checkpointing_changes_no_gradient():
    drafter = make_drafter().train()
    noise, context = torch.randn(1, 5, 32), torch.randn(1, 6, 64)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            drafter.activation_checkpointing_enable()
        drafter.zero_grad()
        drafter(noise_embeds=noise, context_hidden_states=context).last_hidden_state.square().sum().backward()
        gradients.append([p.grad.clone() for p in drafter.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_case_97_three_position_axes(oracle):
    target = make_qwen2_vl()
    ids = torch.tensor([[5, 29, 31, 31, 31, 31, 28, 6, 7], [0, 0, 29, 31, 31, 31, 31, 28, 9]])
    given = {
        "attention_mask": (ids != 0).long(),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == 31).long(),
        **GREEDY,
    }
    pixels = torch.randn(32, 96)
    plain = target.generate(input_ids=ids, pixel_values=pixels, **given)
    assert not torch.equal(plain, target.generate(input_ids=ids, pixel_values=-2 * pixels, **given))
    oracle(plain)
    ours = target.generate(input_ids=ids, pixel_values=pixels, assistant_model=make_drafter(), **given)
    assert torch.equal(ours, plain)
    oracle(target.generate(PROMPT, **GREEDY))
    same(target, make_drafter())


def test_case_100_recurrent_targets_are_refused():
    config = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(AdaFlashValueError, match="can't be rolled back"):
        Qwen3NextForCausalLM(config).generate(PROMPT, assistant_model=make_drafter(), **GREEDY)


class Bytes:
    """A tokenizer of bytes, for text whose characters take several tokens."""

    def decode(self, ids, **kwargs):
        return bytes(int(i) for i in torch.as_tensor(ids).flatten()).decode("utf-8", errors="replace")


def test_case_102_characters_of_several_tokens(oracle):
    target = make_target(vocab_size=256)
    text = "안녕 😀 세계"
    truth = torch.tensor([list(b"hi") + list(text.encode())])
    force = ForceText(truth[0])
    options = {
        "do_sample": False,
        "max_new_tokens": truth.shape[1] - 2,
        "logits_processor": LogitsProcessorList([force]),
    }
    oracle(truth, every=5)
    streamer = TextIteratorStreamer(Bytes(), skip_prompt=True, timeout=60)
    drafter = make_drafter(vocab_size=256)
    work = threading.Thread(
        target=lambda: target.generate(truth[:, :2], assistant_model=drafter, streamer=streamer, **options)
    )
    work.start()
    pieces = list(streamer)
    work.join()
    assert "".join(pieces) == text and len(pieces) > 3 and "\ufffd" not in "".join(pieces)


class ForceText(LogitsProcessor):
    def __init__(self, tokens: torch.Tensor):
        self.tokens = tokens

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.tokens[input_ids.shape[1]]] = 0.0
        return forced


def test_case_L2_a_callable_gets_no_assistant():
    """`custom_generate` with a callable never sees `assistant_model`; the hook leaves such calls alone."""
    seen = {}

    def own(model, input_ids, **kwargs):
        seen.update(kwargs)
        return input_ids

    out = make_target().generate(PROMPT, custom_generate=own, assistant_model=make_drafter(), **GREEDY)
    assert torch.equal(out, PROMPT) and "assistant_model" not in seen


@pytest.mark.parametrize(
    "key, overrides",
    [
        ("hidden_size", {"hidden_size": 64}),
        ("target_layer_ids", {"target_layer_ids": [0, 4], "num_target_layers": None}),
    ],
)
def test_case_L5_misfits_are_refused_before_any_work(key, overrides, monkeypatch):
    target = make_target()
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("work was done"))
    monkeypatch.setattr(type(target), "_supports_logits_to_keep", lambda self: True)
    with pytest.raises(AdaFlashValueError, match=f"`{key}`"):
        target.generate(PROMPT, assistant_model=make_drafter(**overrides), **GREEDY)


def test_case_L7_the_returned_cache_records_nothing(oracle):
    target, options = make_target("mistral"), {"return_dict_in_generate": True, "do_sample": False}
    oracle(target.generate(PROMPT, **GREEDY))
    out = target.generate(PROMPT, assistant_model=make_drafter(), max_new_tokens=16, **options)
    given = {"attention_mask": torch.ones_like(out.sequences), "max_new_tokens": 30, **options}
    again = target.generate(out.sequences, cache=out.cache, **given)
    for layer in again.cache.layers:
        assert not layer.record_past and layer.keys.shape[2] <= target.config.sliding_window - 1
    assert torch.equal(again.sequences, target.generate(out.sequences, **given).sequences)


def test_tied_and_untied_heads(oracle):
    for tied in (True, False):
        target = make_target("qwen3", tie_word_embeddings=tied)
        assert (target.lm_head.weight is target.model.embed_tokens.weight) == tied
        oracle(target.generate(PROMPT, **GREEDY))
        same(target, make_drafter())
