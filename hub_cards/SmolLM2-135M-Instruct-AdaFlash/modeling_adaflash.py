"""The block-diffusion drafter (DFlash), as a PreTrainedModel that can carry a length head.

One forward pass fills a whole block: each layer's keys and values come from (context, block), where the context is
one projection of the tapped target layers, the same for all layers, and the block attends to itself in both
directions. Embedding and lm_head are the target's and are not stored here. The forward interface is the in-tree
DFlash drafter's of transformers 5.24, so `generate(..., assistant_model=drafter, speculation_type="dflash")` works
without this package's own loop. The Hub copies this file and what it imports relatively for `trust_remote_code`
users.
"""

import importlib
import importlib.util
import json

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import DFlashCache
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward, rotate_half

from .configuration_adaflash import AdaFlashConfig, AdaFlashGenerationConfig
from .errors import AdaFlashError
from .hub import HubModel, read_text
from .modeling_length_head import AdaptiveLengthHead


_POLICY_KEYS = AdaFlashGenerationConfig().to_dict().keys() - GenerationConfig().to_dict().keys()

# Shapes: b batch, n new context tokens, B block size (times the number of blocks in training), d hidden size,
# T tapped layers, D head size.


class AdaFlashRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return self.weight * normed.to(x.dtype)


class AdaFlashRotaryEmbedding(nn.Module):
    """cos and sin `[b, n, D * partial_rotary_factor]`, from the configuration's `rope_parameters`."""

    def __init__(self, config: AdaFlashConfig):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        init = self._default_frequencies if self.rope_type == "default" else ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = init(config)
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)
        self.original_inv_freq = nn.Buffer(inv_freq.clone(), persistent=False)

    def _apply(self, fn, *args, **kwargs):
        frequencies = self.inv_freq, self.original_inv_freq
        super()._apply(fn, *args, **kwargs)
        if not frequencies[0].is_meta and not self.inv_freq.is_meta:  # `to(dtype)` would round them
            self.inv_freq, self.original_inv_freq = (x.to(self.inv_freq.device) for x in frequencies)
        return self

    @staticmethod
    def _default_frequencies(config: AdaFlashConfig, device=None, **kwargs) -> tuple[torch.Tensor, float]:
        size = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.float, device=device) / size
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    compute_default_rope_parameters = _default_frequencies

    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        freqs = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float)
        emb = torch.cat((freqs, freqs), dim=-1)
        return (emb.cos() * self.attention_scaling).to(x.dtype), (emb.sin() * self.attention_scaling).to(x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the last positions of `cos`/`sin` `[b, n, R]` into x `[b, h, m, D]` with m <= n and R <= D."""
    cos, sin = cos[:, None, -x.shape[-2] :], sin[:, None, -x.shape[-2] :]
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([rotated * cos + rotate_half(rotated) * sin, passed], dim=-1)


class AdaFlashAttention(nn.Module):
    def __init__(self, config: AdaFlashConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        self.is_causal = is_sliding and config.sliding_window_causal

        query_size = config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = AdaFlashRMSNorm(self.head_dim, config.rms_norm_eps) if config.use_qk_norm else nn.Identity()
        self.k_norm = AdaFlashRMSNorm(self.head_dim, config.rms_norm_eps) if config.use_qk_norm else nn.Identity()

    def forward(
        self, hidden_states, context_hidden_states, position_embeddings, attention_mask=None, cache=None, **kwargs
    ):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        sources = torch.cat([context_hidden_states, hidden_states], dim=1)
        source_shape = (*sources.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(sources).view(source_shape)).transpose(1, 2)
        value = self.v_proj(sources).view(source_shape).transpose(1, 2)
        cos, sin = position_embeddings
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        ragged = kwargs.get("ragged")
        attend = (
            ragged.attention
            if ragged is not None
            else ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        )
        output, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous())


class AdaFlashMLP(nn.Module):
    def __init__(self, config: AdaFlashConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class AdaFlashLayer(GradientCheckpointingLayer):
    def __init__(self, config: AdaFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = AdaFlashAttention(config, layer_idx)
        self.mlp = AdaFlashMLP(config)
        self.input_layernorm = AdaFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AdaFlashRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, context_hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), context_hidden_states, **kwargs
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class AdaFlashDrafter(HubModel):
    """The drafter. Pass it as `assistant_model` to the target's `generate`; alone it can't generate.

    Raises:
        AdaFlashValueError: at construction, when the configuration lacks a key or holds a value that can't work.
    """

    config_class = AdaFlashConfig
    generation_config_class = AdaFlashGenerationConfig
    base_model_prefix = "drafter"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AdaFlashLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: AdaFlashConfig):
        super().__init__(config)
        config.check_complete()
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = AdaFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([AdaFlashLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = AdaFlashRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = AdaFlashRotaryEmbedding(config)
        self.length_head = AdaptiveLengthHead(config.length_head) if config.length_head is not None else None
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        self.gradient_checkpointing = False
        # Processors of draft scores, for the loop only: they change what is proposed, never what comes out.
        self.draft_processors: list = []
        self.post_init()

    @classmethod
    def can_generate(cls) -> bool:
        # So that transformers creates, loads and saves `generation_config`, where the length policy lives.
        return True

    def generate(self, *args, **kwargs):
        """A drafter has no embedding or head of its own.

        Raises:
            AdaFlashError: always, naming the target.
        """
        target = self.config.target_model or "the target that it was trained for"
        raise AdaFlashError(
            f"A drafter can't generate alone: load {target} and call "
            "`target.generate(**inputs, assistant_model=drafter)`."
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, generation_config=None, **kwargs):
        """As in transformers; reads DFlash, AdaFlash, speculators and in-tree checkpoints too (`checkpoints/`).

        Args:
            generation_config: length policy to use instead of the checkpoint's `generation_config.json`.

        Raises:
            AdaFlashValueError: for a layout that can't be read, and for missing or unexpected checkpoint keys.
        """
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if generation_config is not None:
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            model.generation_config = cls.generation_config_class.from_dict(generation_config.to_dict())
        return loaded

    @classmethod
    def load_weights(cls, name_or_path, *args, **kwargs):
        if importlib.util.find_spec("adaflash_hf") is None:  # this file was copied from the Hub
            return super().load_weights(name_or_path, *args, **kwargs)
        package = importlib.import_module("adaflash_hf")
        if not issubclass(cls, package.AdaFlashDrafter):  # a copy, which the package's loop wouldn't recognise
            cls = package.AdaFlashDrafter
            if kwargs.get("config") is not None:
                kwargs["config"] = cls.config_class.from_dict(kwargs["config"].to_dict())
        return importlib.import_module("adaflash_hf.checkpoints").load_drafter(cls, name_or_path, *args, **kwargs)

    def read_settings(self, name_or_path, hub: dict) -> None:
        super().read_settings(name_or_path, hub)
        # transformers loads generation_config.json only into models that generate by themselves.
        settings = json.loads(read_text(name_or_path, "generation_config.json", hub) or "{}")
        # Anybody else's file says how the target samples, which is no business of the drafter.
        if _POLICY_KEYS & settings.keys():
            self.generation_config = self.generation_config_class.from_dict(settings)

    def project_context(self, features: torch.Tensor) -> torch.Tensor:
        """Context `[b, n, d]` from tapped features `[b, n, T*d]`, concatenated in the order of `target_layer_ids`."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def drafted(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The slots of block hidden states `[n, B, d]`, or of a narrower block's, that predict tokens."""
        return hidden_states[:, self.config.block_size - self.config.num_drafted_tokens :]

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        cache=None,
        use_cache: bool | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Fills one block per row, or many in training.

        Args:
            noise_embeds: `[b, B, d]`, the target's embeddings of the anchor and the mask tokens.
            context_hidden_states: `[b, n, T*d]`, tapped target features of the committed tokens not yet in `cache`.
            attention_mask: 2D padding mask `[b, past + n + B]`, or a 4D mask `[b, 1, B, past + n + B]`, or a dict
                of 4D masks by layer type.
            position_ids: `[b, n + B]`, positions of the context tokens, then of the block's slots.
            cache: a `DFlashCache` (whose last B entries the caller crops), or this package's `RaggedCache`.

        Returns:
            `last_hidden_state` `[b, B, d]` after the final norm; on transformers' own DFlash route the first slot
            and as many drafted slots as the length policy wants.
        """
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
            cache.set_previous_accepted_tokens(context_hidden_states.shape[1])
        context = self.project_context(context_hidden_states)
        hidden_states = noise_embeds.to(context.dtype)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(context.shape[1] + hidden_states.shape[1], device=hidden_states.device)
            position_ids = (position_ids + past).unsqueeze(0)
        if "ragged" in kwargs:
            masks = dict.fromkeys(self.config.layer_types)
        elif isinstance(attention_mask, dict):
            masks = attention_mask
        else:
            masks = self._masks(hidden_states, attention_mask, cache, context.shape[1])

        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                context,
                position_embeddings=position_embeddings,
                attention_mask=masks[kind],
                cache=cache,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        if isinstance(cache, DFlashCache):
            hidden_states = self._shorten(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)

    def _masks(self, hidden_states, attention_mask, cache, new_context: int) -> dict:
        if cache is None:  # only to tell the mask code that the block's queries come after the context
            cache = DFlashCache(config=self.config)
            cache.set_previous_accepted_tokens(new_context)
        shared = {
            "config": self.config,
            "inputs_embeds": hidden_states,
            "attention_mask": attention_mask,
            "cache": cache,
        }
        masks = {}
        if "full_attention" in self.config.layer_types:
            masks["full_attention"] = create_bidirectional_mask(**shared)
        if "sliding_attention" in self.config.layer_types:
            causal = self.config.sliding_window_causal
            create = create_sliding_window_causal_mask if causal else create_bidirectional_sliding_window_mask
            masks["sliding_attention"] = create(**shared)
        return masks

    def _shorten(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Adapts to transformers' own DFlash route, which drops slot 0 and drafts from every later slot it gets."""
        drafted = self.drafted(hidden_states)
        policy = self.generation_config
        kept = drafted.shape[1]
        if policy.num_assistant_tokens is not None:
            kept = min(kept, policy.num_assistant_tokens)
        if self.length_head is not None and policy.length_policy != "fixed":
            lengths = self.length_head.candidate_lengths(
                hidden_states, policy.length_rate, policy.min_candidate_length, policy.survival_threshold
            )
            kept = min(kept, int(lengths.max()) - 1)
        return torch.cat([hidden_states[:, :1], drafted[:, : max(kept, 1)]], dim=1)


__all__ = ["AdaFlashDrafter"]
