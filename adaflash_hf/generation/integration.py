"""The one place that touches transformers' private parts. `tests/generation/test_integration.py` pins each of them.

`install()` wraps two methods of `GenerationMixin`: `_validate_generation_mode`, called before any work, refuses what
can't be done with a drafter; `_assisted_decoding` runs this package's loop. Both pass everything that isn't an
AdaFlash drafter, and transformers' own DFlash route (`speculation_type="dflash"`), to the original untouched.
"""

import contextlib
import functools
import threading
import weakref

import torch
from transformers import AttentionInterface, DynamicCache, GenerationConfig, GenerationMixin, StaticCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from ..errors import AdaFlashValueError
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .attention import ragged_attention
from .logits_process import AdaptiveLengthLogitsProcessor
from .queue import queue_waits
from .stopping import longest


ATTENTION_NAME = "adaflash_ragged"
_CACHEABLE_LAYERS = {"full_attention", "sliding_attention"}
_locks: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def install() -> None:
    """Hooks `generate`. Calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, ragged_attention)
    if hasattr(GenerationMixin._assisted_decoding, "adaflash_original"):
        return
    validate, decode = GenerationMixin._validate_generation_mode, GenerationMixin._assisted_decoding

    @functools.wraps(validate)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = generation_mode_kwargs.get("assistant_model")
        if not isinstance(drafter, AdaFlashDrafter):
            return validate(self, generation_mode, generation_config, generation_mode_kwargs)
        check_request(self, drafter, generation_mode, generation_config, generation_mode_kwargs)
        if generation_config.speculation_type == "dflash":
            return validate(self, generation_mode, generation_config, generation_mode_kwargs)

    @functools.wraps(decode)
    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        drafter = kwargs.get("assistant_model")
        if not isinstance(drafter, AdaFlashDrafter) or generation_config.speculation_type == "dflash":
            return decode(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        return _decode(self, drafter, input_ids, logits_processor, stopping_criteria, generation_config, kwargs)

    _assisted_decoding.adaflash_original = decode
    _validate_generation_mode.adaflash_original = validate
    GenerationMixin._assisted_decoding = _assisted_decoding
    GenerationMixin._validate_generation_mode = _validate_generation_mode


def check_request(model, drafter: AdaFlashDrafter, mode, config, mode_kwargs: dict) -> None:
    """Refuses, before any work, what can't be done with this target, drafter and options.

    Raises:
        AdaFlashValueError: naming the option or key, and the remedy.
    """

    def refuse(reason: str, remedy: str):
        raise AdaFlashValueError(f"{reason}: {remedy}.")

    name, text_config = type(model).__name__, model.config.get_text_config(decoder=True)
    if (config.num_beams or 1) > 1:
        refuse(f"`num_beams` {config.num_beams} can't be combined with a drafter", "set it to 1 or drop the drafter")
    if mode != GenerationMode.ASSISTED_GENERATION:
        refuse(f"The options ask for {mode.value}, which takes no drafter", "drop them or drop the drafter")
    if config.speculation_type not in (None, "dflash"):
        refuse(
            f"`speculation_type` is {config.speculation_type!r}", "leave it out, or use 'dflash' for the in-tree loop"
        )
    if config.use_cache is False:
        refuse("`use_cache=False` leaves nothing to verify a draft against", "drop it or drop the drafter")
    if model.config.is_encoder_decoder:
        refuse(f"{name} is an encoder-decoder", "use a decoder-only target")
    unknown = set(getattr(text_config, "layer_types", None) or ()) - _CACHEABLE_LAYERS
    if model._is_stateful or unknown:
        kinds = f" (layers of type {', '.join(sorted(unknown))})" if unknown else ""
        refuse(
            f"The cache of {name}{kinds} can't be rolled back after a rejected draft", "generate without the drafter"
        )
    if not model._supports_attention_backend:
        refuse(f"{name} doesn't use transformers' attention interface", "generate without the drafter")
    if "prepare_inputs_for_generation" in vars(model):
        refuse(f"{name} is wrapped by a PEFT method that learns a prompt", "use an adapter in the layers, like LoRA")
    if config.cache_implementation not in (None, "dynamic", "static", "offloaded"):
        refuse(
            f"`cache_implementation={config.cache_implementation!r}` rounds the keys that drafts are verified against",
            "leave it out or drop the drafter",
        )
    exclusive = ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_ensemble_weight", "use_mtp")
    for key in exclusive:
        if getattr(config, key, None) not in (None, False):
            refuse(f"`{key}` and an AdaFlash drafter exclude each other", "pass one of the two")
    if mode_kwargs.get("assistant_tokenizer") is not None:
        refuse(
            "`assistant_tokenizer` has no use with an AdaFlash drafter, which shares the target's ids", "leave it out"
        )
    if mode_kwargs.get("synced_gpus"):
        refuse("`synced_gpus` can't be used with a drafter", "gather the parameters before generating")
    most = drafted_tokens_of(config)
    if most is not None and most < 0:
        refuse(f"`num_assistant_tokens` is {most}", "use 0 or more")
    if config.speculation_type == "dflash":
        policy = drafter.generation_config
        if policy.context_window is not None:
            refuse("`context_window` has no effect in transformers' own loop", "leave out `speculation_type`")
        if policy.num_assistant_tokens == 0:
            refuse("`num_assistant_tokens` 0 still drafts one in transformers' own loop", "drop the drafter")
        if most is not None:
            refuse(
                f"`num_assistant_tokens` {most} has no effect in transformers' own loop",
                "set it in the drafter's `generation_config`, or leave out `speculation_type`",
            )
    if queue_waits() and config.speculation_type is not None:
        refuse("`speculation_type` can't be used with a queue of prompts", "set it to None or call `generate`")
    if queue_waits() and (config.num_return_sequences or 1) > 1:
        refuse("`num_return_sequences` can't be used with a queue of prompts", "set it to 1 or call `generate`")
    Target(model, drafter.config)
    drafter.generation_config.validate()
    AdaptiveLengthLogitsProcessor(drafter.generation_config, 1, 0, drafter.length_head)


def drafted_tokens_of(config) -> int | None:
    """The call's own `num_assistant_tokens`. `generate` fills in a default, made for other drafters, which can't be
    told from the same number given; it counts as none."""
    default = GenerationConfig._get_default_generation_params()["num_assistant_tokens"]
    return None if config.num_assistant_tokens == default else config.num_assistant_tokens


# What only the pass over the prompt needs: images and the like. Anything else would have to reach verification too.
_PROMPT_INPUTS = {
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "token_type_ids",
    "mm_token_type_ids",
}
# Arguments of `generate` and of its loops that mean nothing here, or that the loop reads from the configuration.
_HANDLED = {
    "assistant_model",
    "assistant_tokenizer",
    "inputs_tensor",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "synced_gpus",
    "tokenizer",
    "use_cache",
}


def _decode(model, drafter, input_ids, logits_processor, stopping_criteria, generation_config, kwargs):
    """Checks the prepared model arguments and runs the loop."""
    from .decoding import assisted_decoding

    cache, streamer, attention_mask = (kwargs.pop(key, None) for key in ("cache", "streamer", "attention_mask"))
    position_ids = kwargs.pop("position_ids", None)
    given = {key: x for key, x in kwargs.items() if key not in _HANDLED and x is not None and x is not False}
    if "inputs_embeds" in given:
        raise AdaFlashValueError("`inputs_embeds` can't be used with a drafter, which needs ids: pass `input_ids`.")
    text_config = model.config.get_text_config(decoder=True)
    for key in sorted(given):
        if key not in _PROMPT_INPUTS or text_config is model.config:
            raise AdaFlashValueError(f"`{key}` can't be passed to the target with a drafter: drop it or the drafter.")
    if type(cache) not in (DynamicCache, StaticCache):
        raise AdaFlashValueError(f"`cache` is a {type(cache).__name__}: pass a DynamicCache, or none.")
    if generation_config.output_attentions and type(cache) is StaticCache:
        raise AdaFlashValueError(
            "`output_attentions` over a static cache has a column for every reserved slot, which packed verification "
            "doesn't look at: use a dynamic cache."
        )
    mask = _visible(input_ids, attention_mask, generation_config)
    _fit_cache(cache, input_ids, mask)
    if not bool(mask.any(dim=1).all()):
        raise AdaFlashValueError("`attention_mask` hides a whole row: every prompt needs at least one token.")
    _check_rope(text_config, mask, longest(stopping_criteria, input_ids.shape[1]) - input_ids.shape[1])
    in_order = bool((mask.long().diff(dim=1) >= 0).all())
    if not in_order and getattr(text_config, "sliding_window", None) is not None:
        raise AdaFlashValueError(
            "`attention_mask` has holes or right padding, which sliding windows would count: pad prompts on the left."
        )
    plain_positions = position_ids is None or (
        position_ids.shape == mask.shape and torch.equal(position_ids * mask, (mask.long().cumsum(dim=1) - 1) * mask)
    )
    from_nothing = int(cache.get_seq_length()) == 0 and not given and in_order and plain_positions
    own = generation_config.output_hidden_states or generation_config.output_attentions
    prefill_kwargs = None
    if not from_nothing or own or generation_config.prefill_chunk_size is not None:
        if cache.offloading and not torch.accelerator.is_available():
            raise AdaFlashValueError("An offloaded `cache` needs an accelerator to be offloaded from: leave it out.")
        prefill_kwargs = {
            **given,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cache": cache,
            "use_cache": True,
            "logits_to_keep": 1,
            "output_hidden_states": generation_config.output_hidden_states,
            "output_attentions": generation_config.output_attentions,
        }
    return assisted_decoding(
        model,
        drafter,
        input_ids,
        LogitsProcessorList(logits_processor),
        stopping_criteria,
        generation_config,
        mask,
        cache,
        drafted_tokens_of(generation_config),
        prefill_kwargs=prefill_kwargs,
        streamer=streamer,
    )


def _visible(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, config) -> torch.Tensor:
    """Bool `[b, past + L]`: the columns of the cache and of the ids that may be looked at."""
    if attention_mask is not None:
        return attention_mask.bool()
    # `generate` drops a mask of ones, and leaves its length behind for caches that hold what the ids don't.
    return input_ids.new_ones(len(input_ids), getattr(config, "_mask_length", input_ids.shape[1])).bool()


def _check_rope(text_config, mask: torch.Tensor, new_tokens: int) -> None:
    """Refuses rows that outgrow the length at which the frequencies of all positions change: plain `generate` then
    reads them anew (LongRoPE) or changes them with each token (dynamic NTK), and either by the longest row.

    Raises:
        AdaFlashValueError: naming the length.
    """
    given = getattr(text_config, "rope_parameters", None) or {}
    for rope in [given] if "rope_type" in given else given.values():
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind not in ("longrope", "dynamic"):
            continue
        named = rope.get("original_max_position_embeddings")
        limit = named or getattr(text_config, "original_max_position_embeddings", text_config.max_position_embeddings)
        shortest, longest_row = int(mask.sum(dim=1).min()), int(mask.sum(dim=1).max()) + new_tokens
        if longest_row > limit and not (kind == "longrope" and shortest > limit):
            raise AdaFlashValueError(
                f"`rope_parameters` of type {kind!r} change all positions once a row passes {limit} tokens, which "
                "drafts can't follow: keep prompt and new tokens within that, or generate without the drafter."
            )


def _fit_cache(cache, input_ids: torch.Tensor, mask: torch.Tensor) -> None:
    """Checks a reused cache. Where it covers the whole prompt, its last token is read once more.

    Raises:
        AdaFlashValueError: when cache, ids and mask don't belong together, or the last token can't be taken back.
    """
    held, width = int(cache.get_seq_length()), input_ids.shape[1]
    if mask.shape[1] == held + width:
        return
    if mask.shape[1] != width or held > width:
        raise AdaFlashValueError(
            f"`cache` holds {held} tokens, `input_ids` {width} and `attention_mask` {mask.shape[1]}: pass all ids, or "
            "the new ones with a mask over all."
        )
    if held == width:
        if any(layer.is_sliding and held >= layer.get_max_length() for layer in cache.layers):
            raise AdaFlashValueError(
                "`cache` covers the whole prompt and its sliding windows can't take the last token back: pass the "
                "next turn's ids too, or no cache."
            )
        cache.crop(-1)


def plain_prefill(model, input_ids: torch.Tensor, generation_config, model_kwargs: dict):
    """transformers' own reading of the prompt. Its output; the cache in `model_kwargs` is filled."""
    with _target_lock(model):
        return model._prefill(input_ids, generation_config, dict(model_kwargs))


def attention_implementation(model) -> str:
    """The attention that the target's configuration names, whatever another thread's packed pass has put there."""
    with _target_lock(model):
        return model.get_decoder().config._attn_implementation


def _target_lock(model) -> threading.Lock:
    with _locks_guard:
        return _locks.setdefault(model, threading.Lock())


@contextlib.contextmanager
def packed_attention(model, decoding: bool = True):
    """While open, the target's attention runs on packed tokens, and, once decoding, its experts as in plain decoding.
    One thread at a time per target; restored whatever happens."""
    config = model.get_decoder().config
    with _target_lock(model), model._optimize_model_for_decode() if decoding else contextlib.nullcontext():
        previous = config._attn_implementation
        config._attn_implementation = ATTENTION_NAME
        try:
            yield
        finally:
            config._attn_implementation = previous
