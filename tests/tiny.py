"""Tiny random targets and drafters, built from configs. Weights are large, so that greedy runs don't settle into one
token, and vocabularies small, so that a random drafter is accepted now and then."""

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from adaflash_hf import AdaFlashConfig, AdaFlashDrafter


VOCAB = 32
_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SLIDING = ["sliding_attention", "full_attention"] * 2
TARGETS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 9}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 9, "layer_types": _SLIDING}),
    "glm": (GlmForCausalLM, GlmConfig, {"partial_rotary_factor": 0.5}),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": _SLIDING,
        },
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def make_target(name: str = "llama", seed: int = 0, **overrides):
    model_class, config_class, extra = TARGETS[name]
    settings = {**_SHARED, **extra, **overrides}
    if config_class in (Qwen2Config, Qwen2MoeConfig):
        settings.pop("head_dim")
    torch.manual_seed(seed)
    return model_class(config_class(**settings)).eval()


def make_drafter(seed: int = 1, head: str | None = None, **overrides) -> AdaFlashDrafter:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "block_size": 5,
        "mask_token_id": 1,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
        "target_model": "tiny/target",
        **overrides,
    }
    if head is not None:
        settings["length_head"] = {
            "kind": head,
            "hidden_size": settings["hidden_size"],
            "block_size": settings["block_size"],
            "bottleneck_size": 16,
            "initializer_range": 1.0,
        }
    torch.manual_seed(seed)
    return AdaFlashDrafter(AdaFlashConfig(**settings)).eval()


def ragged_prompts(lengths=(1, 3, 7, 12), seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded `input_ids` and `attention_mask`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, length in enumerate(lengths):
        ids[i, width - length :] = torch.randint(2, VOCAB, (length,), generator=generator)
        mask[i, width - length :] = 1
    return ids, mask


def make_tokenizer():
    """One letter or digit per token."""
    letters = "abcdefghijklmnopqrstuvwxyz012345"
    model = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    model.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="a")


def make_llava(seed: int = 0):
    """A target with a vision tower; its image token is `VOCAB - 1`, four of them per image `[3, 8, 8]`."""
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    torch.manual_seed(seed)
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**_SHARED),
        image_token_id=VOCAB - 1,
        vision_feature_layer=-1,
        pad_token_id=0,
    )
    return LlavaForConditionalGeneration(config).eval()


def make_qwen2_vl(seed: int = 0):
    """A target with three position axes; image token `VOCAB - 1`, between 29 and 28."""
    text = {key: value for key, value in _SHARED.items() if key != "head_dim"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    torch.manual_seed(seed)
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
        vision_start_token_id=29,
        vision_end_token_id=28,
    )
    return Qwen2VLForConditionalGeneration(config).eval()
