"""Models: configuration errors, saving and loading, the head alone, the forward interface."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from tiny import make_drafter
from transformers import AutoConfig, AutoModel

from adaflash_hf import (
    AdaFlashConfig,
    AdaFlashDrafter,
    AdaFlashGenerationConfig,
    AdaFlashValueError,
    AdaptiveLengthConfig,
    AdaptiveLengthHead,
)


GOOD = {"vocab_size": 32, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "mask_token_id": 1,
        "target_layer_ids": [0, 2], "num_target_layers": 4, "block_size": 5}  # fmt: skip


@pytest.mark.parametrize("head", [None, "length", "survival"])
def test_round_trip_with_head_and_policy(tmp_path, head):
    drafter = make_drafter(head=head, draft_vocab_size=12)
    drafter.draft_token_ids.copy_(torch.arange(12) * 2)
    drafter.generation_config.length_rate = 1.3
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is AdaFlashDrafter and type(loaded.config) is AdaFlashConfig
    for key in (*GOOD, "draft_vocab_size", "layer_types", "rope_parameters", "label_convention", "target_model"):
        assert getattr(loaded.config, key) == getattr(drafter.config, key)
    assert (loaded.length_head and loaded.length_head.config.kind) == head
    for key, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    assert type(loaded.generation_config) is AdaFlashGenerationConfig
    assert loaded.generation_config.length_rate == 1.3 and loaded.generation_config.num_assistant_tokens == 3


@pytest.mark.parametrize("kind", ["length", "survival"])
def test_head_alone(tmp_path, kind):
    drafter = make_drafter(head=kind)
    drafter.length_head.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is AdaptiveLengthConfig
    alone = AutoModel.from_pretrained(tmp_path)
    assert type(alone) is AdaptiveLengthHead
    hidden = torch.randn(3, 5, 32)
    torch.testing.assert_close(alone(hidden), drafter.length_head(hidden))
    assert alone(hidden).shape == ((3,) if kind == "length" else (3, 4))


def test_length_rule_of_adaflash():
    head = make_drafter(head="length").length_head
    hidden = torch.randn(200, 5, 32)
    share = head(hidden).sigmoid()
    for rate, minimum in ((1.0, 1), (1.3, 2)):
        expected = [min(max(round(y * 5 * rate), minimum), 5) for y in share.tolist()]
        assert head.candidate_lengths(hidden, rate=rate, minimum=minimum).tolist() == expected
    assert len(set(expected)) > 2


def test_survival_rule():
    head = make_drafter(head="survival").length_head
    hidden = torch.randn(50, 5, 32)
    survival = head(hidden).sigmoid().cumprod(1)
    lengths = head.candidate_lengths(hidden, threshold=0.3)
    for row, length in zip(survival.tolist(), lengths.tolist(), strict=True):
        assert length - 1 == sum(x >= 0.3 for x in row)
    assert head.candidate_lengths(hidden, threshold=0.0).tolist() == [5] * 50
    assert min(head.candidate_lengths(hidden, minimum=3, threshold=1.0).tolist()) == 3


@pytest.mark.parametrize(
    "key, value",
    [
        ("block_size", 1),
        ("mask_token_id", 32),
        ("mask_token_id", -1),
        ("target_layer_ids", [0, 4]),
        ("label_convention", "other"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "full_attention", "linear_attention"]),
        ("draft_vocab_size", 40),
        ("length_head", {"kind": "length", "hidden_size": 16, "block_size": 5}),
        ("length_head", {"kind": "other", "hidden_size": 32, "block_size": 5}),
    ],
)
def test_values_that_cannot_work(key, value):
    with pytest.raises(AdaFlashValueError, match=f"`{key}`|`kind`"):
        AdaFlashConfig(**{**GOOD, key: value})


def test_sliding_layers_need_a_window():
    with pytest.raises(AdaFlashValueError, match="`sliding_window`"):
        AdaFlashConfig(**GOOD, layer_types=["sliding_attention"] * 3)


def test_types_are_checked():
    with pytest.raises(StrictDataclassFieldValidationError, match="block_size"):
        AdaFlashConfig(**{**GOOD, "block_size": "x"})


@pytest.mark.parametrize("key", ["vocab_size", "mask_token_id", "target_layer_ids"])
def test_missing_values_are_named(key):
    with pytest.raises(AdaFlashValueError, match=f"`{key}`"):
        AdaFlashDrafter(AdaFlashConfig(**{k: v for k, v in GOOD.items() if k != key}))


def test_forward_shapes_and_context_cache():
    """A context given in two parts through the cache equals one given whole; partial RoPE is one rule in both."""
    from transformers.cache_utils import DFlashCache

    for overrides in (
        {},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ):
        drafter = make_drafter(**overrides)
        noise, context = torch.randn(1, 5, 32), torch.randn(1, 9, 64)
        with torch.no_grad():
            whole = drafter(noise_embeds=noise, context_hidden_states=context).last_hidden_state
            assert whole.shape == (1, 5, 32)
            cache = DFlashCache(config=drafter.config)
            cache.activate_past_recording()
            cache.set_previous_accepted_tokens(6)
            drafter(noise_embeds=noise, context_hidden_states=context[:, :6], cache=cache)
            cache.crop(-5)
            cache.set_previous_accepted_tokens(3)
            parts = drafter(noise_embeds=noise, context_hidden_states=context[:, 6:], cache=cache).last_hidden_state
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_sliding_masks_without_a_cache(causal):
    """The block comes after the context also where no cache says so."""
    drafter = make_drafter(sliding_window=4, sliding_window_causal=causal)
    noise, context = torch.randn(1, 5, 32), torch.randn(1, 12, 64)
    with torch.no_grad():
        plain = drafter(noise_embeds=noise, context_hidden_states=context).last_hidden_state
        cached = drafter(noise_embeds=noise, context_hidden_states=context, use_cache=True).last_hidden_state
        changed = context.clone()
        changed[:, :6] += 1.0
        far = drafter(noise_embeds=noise, context_hidden_states=changed).last_hidden_state
    torch.testing.assert_close(cached, plain)
    torch.testing.assert_close(far[:, 2:], plain[:, 2:])


def test_gradient_checkpointing_changes_no_gradient():
    drafter = make_drafter().train()
    noise, context = torch.randn(2, 5, 32), torch.randn(2, 9, 64)

    def gradients():
        drafter.zero_grad()
        drafter(noise_embeds=noise, context_hidden_states=context).last_hidden_state.square().sum().backward()
        return [p.grad.clone() for p in drafter.parameters()]

    before = gradients()
    drafter.activation_checkpointing_enable()
    for ours, theirs in zip(gradients(), before, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_position_frequencies_stay_in_float32():
    drafter = make_drafter()
    before = drafter.rotary_emb.inv_freq.clone()
    rotary = drafter.to(torch.bfloat16).rotary_emb
    assert drafter.fc.weight.dtype == torch.bfloat16
    assert torch.equal(rotary.inv_freq, before) and torch.equal(rotary.original_inv_freq, before)
