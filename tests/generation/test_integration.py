"""The hook: which private parts of transformers it relies on, what it leaves alone, and what it refuses."""

import inspect
import threading

import pytest
import torch
from tiny import make_drafter, make_target, ragged_prompts
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DFlashCache
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from adaflash_hf import AdaFlashError, AdaFlashValueError, DiffusionCandidateGenerator
from adaflash_hf.generation import integration
from adaflash_hf.target import Target


GREEDY = {"do_sample": False, "max_new_tokens": 16}


def test_private_names_of_transformers():
    decode = GenerationMixin._assisted_decoding.adaflash_original
    assert list(inspect.signature(decode).parameters)[:5] == [
        "self",
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
    ]
    validate = GenerationMixin._validate_generation_mode.adaflash_original
    assert list(inspect.signature(validate).parameters) == [
        "self",
        "generation_mode",
        "generation_config",
        "generation_mode_kwargs",
    ]
    assert GenerationConfig._get_default_generation_params()["num_assistant_tokens"] == 20
    for name in ("_is_stateful", "_supports_attention_backend"):
        assert hasattr(PreTrainedModel, name)
    assert hasattr(GenerationMixin, "_optimize_model_for_decode")
    assert list(inspect.signature(GenerationMixin._prefill).parameters)[:4] == [
        "self",
        "input_ids",
        "generation_config",
        "model_kwargs",
    ]
    assert "_mask_length" in inspect.getsource(GenerationMixin.generate)
    assert "pixel_values" in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
    assert "_is_user_defined" in inspect.getsource(GenerationMixin)
    assert "_attn_implementation" in dir(LlamaConfig())
    assert hasattr(DFlashCache, "set_previous_accepted_tokens")
    source = inspect.getsource(GenerationMixin.generate)
    assert "_pad_token_tensor" in source and "GENERATION_MODES_MAPPING" in source


def test_installing_twice_changes_nothing():
    before = GenerationMixin._assisted_decoding
    integration.install()
    assert GenerationMixin._assisted_decoding is before


def test_other_assistants_go_to_transformers():
    target, assistant = make_target(), make_target(seed=3, num_hidden_layers=2)
    ids, _ = ragged_prompts((5,))
    assert torch.equal(target.generate(ids, assistant_model=assistant, **GREEDY), target.generate(ids, **GREEDY))


@pytest.mark.parametrize("head", [None, "length", "survival"])
@pytest.mark.parametrize("convention", ["fill_in", "sample_from_anchor"])
def test_transformers_own_loop(head, convention):
    """`speculation_type="dflash"` goes through transformers, adaptive length included."""
    target, drafter = make_target(), make_drafter(head=head, label_convention=convention)
    ids, _ = ragged_prompts((7,))
    plain = target.generate(ids, **GREEDY)
    assert torch.equal(target.generate(ids, assistant_model=drafter, speculation_type="dflash", **GREEDY), plain)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"sliding_window": 6}, {"sliding_window": 6, "sliding_window_causal": False}, {"sliding_window": 3}],
    ids=str,
)
def test_transformers_own_loop_drafts_what_ours_drafts(overrides, monkeypatch):
    """Both routes put the same candidates up for verification, so features, positions and masks agree."""
    seen = {"ours": [], "bare": []}
    target, drafter = make_target(), make_drafter(**overrides)
    drafter.generation_config.length_policy = "fixed"
    ids, _ = ragged_prompts((7,))
    forward, route = type(drafter).forward, "bare"

    def record(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        seen[route].append(output.last_hidden_state.clone())
        return output

    monkeypatch.setattr(type(drafter), "forward", record)
    target.generate(ids, assistant_model=drafter, speculation_type="dflash", **GREEDY)
    route = "ours"
    target.generate(ids, assistant_model=drafter, **GREEDY)
    # transformers' loop drafts with what room is left, ours skips the last useless block
    assert len(seen["ours"]) >= len(seen["bare"]) - 1 > 3
    for ours, bare in zip(seen["ours"], seen["bare"], strict=False):
        torch.testing.assert_close(ours, bare, rtol=1e-4, atol=1e-4)


def test_candidate_generator_contract(monkeypatch):
    """Driven by transformers' own assisted loop as an ordinary CandidateGenerator."""
    target, drafter = make_target(), make_drafter(head="survival")
    assert issubclass(DiffusionCandidateGenerator, CandidateGenerator)
    generator = DiffusionCandidateGenerator(drafter, Target(target, drafter.config))
    monkeypatch.setattr(type(target), "_get_candidate_generator", lambda self, **kwargs: generator)
    ids, _ = ragged_prompts((7,))
    plain = target.generate(ids, **GREEDY)
    ours = target.generate(ids, assistant_model=drafter, speculation_type="dflash", **GREEDY)
    assert torch.equal(ours, plain)


def test_attention_is_restored_after_an_error(monkeypatch):
    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    before = target.config._attn_implementation

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(target.model.layers[1].mlp), "forward", fail)
    with pytest.raises(KeyboardInterrupt):
        target.generate(ids, assistant_model=drafter, **GREEDY)
    monkeypatch.undo()
    assert target.config._attn_implementation == before
    assert not any(layer._forward_hooks for layer in target.model.layers)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **GREEDY), target.generate(ids, **GREEDY))


def test_no_state_between_calls_or_threads():
    target, drafter = make_target(), make_drafter(head="survival")
    prompts = [ragged_prompts((length,), seed=length)[0] for length in (12, 3, 7, 1)]
    plain = [target.generate(ids, **GREEDY) for ids in prompts]
    results: dict[int, torch.Tensor] = {}

    def work(i):
        results[i] = target.generate(prompts[i], assistant_model=drafter, **GREEDY)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, expected in enumerate(plain):
        assert torch.equal(results[i], expected)


REFUSED = {
    "num_beams": {"num_beams": 2},
    "use_cache": {"use_cache": False},
    "speculation_type": {"speculation_type": "eagle"},
    "cache_implementation": {"cache_implementation": "quantized"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "attention_mask": {"attention_mask": torch.zeros(1, 5, dtype=torch.long)},
    "cache": {"cache": EncoderDecoderCache(DynamicCache(), DynamicCache())},
}


@pytest.mark.parametrize("key", REFUSED)
def test_options_refused_before_any_work(key, monkeypatch):
    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    monkeypatch.setattr(type(drafter), "forward", lambda *args, **kwargs: pytest.fail("work was done"))
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: pytest.fail("work was done"))
    monkeypatch.setattr(type(target), "_supports_logits_to_keep", lambda self: True)
    with pytest.raises(AdaFlashValueError, match=f"`{key}"):
        target.generate(ids, assistant_model=drafter, **{**GREEDY, **REFUSED[key]})


def test_caches_and_masks_that_cannot_be_right_are_refused():
    target, drafter = make_target("mistral"), make_drafter()
    ids, _ = ragged_prompts((12,))
    options = {"assistant_model": drafter, **GREEDY}
    with pytest.raises(AdaFlashValueError, match="`attention_mask` has holes"):
        target.generate(ids, attention_mask=torch.tensor([[1] * 10 + [0, 1]]), **options)
    for kept, message in ((20, "`cache` holds 27 tokens, `input_ids` 20"), (27, "covers the whole prompt")):
        used = target.generate(ids, return_dict_in_generate=True, **GREEDY)
        with pytest.raises(AdaFlashValueError, match=message):
            target.generate(used.sequences[:, :kept], cache=used.cache, **options)


def test_drafter_alone_names_the_target():
    with pytest.raises(AdaFlashError, match="tiny/target"):
        make_drafter().generate(torch.tensor([[2]]))


@pytest.mark.parametrize(
    "key, overrides",
    [
        ("hidden_size", {"hidden_size": 64}),
        ("vocab_size", {"vocab_size": 64}),
        ("num_target_layers", {"num_target_layers": 6}),
        ("target_layer_ids", {"num_target_layers": None, "target_layer_ids": [0, 4]}),
    ],
)
def test_a_drafter_for_another_target_is_refused(key, overrides):
    target, drafter = make_target(), make_drafter(**overrides)
    with pytest.raises(AdaFlashValueError, match=f"`{key}`"):
        target.generate(torch.tensor([[2, 3]]), assistant_model=drafter, **GREEDY)


def test_policy_settings_are_checked():
    target, drafter = make_target(), make_drafter()
    for key, value in (
        ("length_policy", "head"),
        ("length_policy", "x"),
        ("length_rate", 0),
        ("survival_threshold", 2),
    ):
        drafter = make_drafter()
        setattr(drafter.generation_config, key, value)
        with pytest.raises(AdaFlashValueError, match=f"`{key}`"):
            target.generate(torch.tensor([[2, 3]]), assistant_model=drafter, **GREEDY)


def test_recurrent_target_is_refused():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
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
    target = Qwen3NextForCausalLM(config).eval()
    with pytest.raises(AdaFlashValueError, match="can't be rolled back"):
        target.generate(torch.tensor([[2, 3]]), assistant_model=make_drafter(), **GREEDY)


def test_bigger_target_vocabulary_mask_id():
    target = LlamaForCausalLM(make_target().config)
    drafter = make_drafter()
    drafter.config.mask_token_id = 40
    with pytest.raises(AdaFlashValueError, match="`mask_token_id`"):
        target.generate(torch.tensor([[2, 3]]), assistant_model=drafter, **GREEDY)
