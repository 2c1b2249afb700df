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
from transformers import AttentionInterface, DynamicCache, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList

from ..errors import AdaFlashValueError
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .attention import ragged_attention
from .logits_process import AdaptiveLengthLogitsProcessor


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
    if config.output_attentions or config.output_hidden_states:
        key = "output_attentions" if config.output_attentions else "output_hidden_states"
        refuse(f"`{key}` is not collected with a drafter", "drop the option or drop the drafter")
    if config.cache_implementation not in (None, "dynamic"):
        refuse(f"`cache_implementation={config.cache_implementation!r}` can't be used with a drafter", "leave it out")
    if config.prefill_chunk_size is not None:
        refuse("`prefill_chunk_size` has no effect with a drafter, which reads the prompt in one pass", "leave it out")
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
    Target(model, drafter.config)
    drafter.generation_config.validate()
    AdaptiveLengthLogitsProcessor(drafter.generation_config, 1, 0, drafter.length_head)


def _decode(model, drafter, input_ids, logits_processor, stopping_criteria, generation_config, kwargs):
    """Checks the prepared model arguments and runs the loop."""
    from .decoding import assisted_decoding

    cache, streamer, attention_mask = (kwargs.pop(key, None) for key in ("cache", "streamer", "attention_mask"))
    position_ids = kwargs.pop("position_ids", None)
    handled = ("assistant_model", "inputs_tensor", "assistant_tokenizer", "tokenizer", "synced_gpus", "use_cache")
    for key in (*handled, "logits_to_keep"):
        kwargs.pop(key, None)
    if kwargs.get("inputs_embeds") is not None:
        raise AdaFlashValueError("`inputs_embeds` can't be used with a drafter, which needs ids: pass `input_ids`.")
    given = sorted(key for key, value in kwargs.items() if value is not None and value is not False)
    if given:
        raise AdaFlashValueError(f"`{given[0]}` can't be passed to the target with a drafter: drop it or the drafter.")
    if type(cache) is not DynamicCache:
        raise AdaFlashValueError(f"`cache` is a {type(cache).__name__}: pass a DynamicCache, or none.")
    if cache.get_seq_length() > 0:
        raise AdaFlashValueError(
            "`cache` already holds tokens, whose features the drafter can't see: pass the whole prompt and no cache."
        )
    if streamer is not None and len(input_ids) > 1:
        raise AdaFlashValueError("`streamer` needs a single sequence with a drafter: stream one prompt at a time.")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
    if not bool((mask.diff(dim=1) >= 0).all()):
        raise AdaFlashValueError("`attention_mask` has holes or right padding: pad prompts on the left.")
    if not bool(mask.any(dim=1).all()):
        raise AdaFlashValueError("`attention_mask` hides a whole row: every prompt needs at least one token.")
    if position_ids is not None and not torch.equal(position_ids * mask, (mask.cumsum(dim=1) - 1) * mask):
        raise AdaFlashValueError("`position_ids` other than 0, 1, 2, ... don't go with a drafter: leave them out.")
    return assisted_decoding(
        model,
        drafter,
        input_ids,
        LogitsProcessorList(logits_processor),
        stopping_criteria,
        generation_config,
        attention_mask=attention_mask,
        streamer=streamer,
        cache=cache,
        cache_is_callers=getattr(cache, "_is_user_defined", False),
    )


@contextlib.contextmanager
def packed_attention(model, decoding: bool = True):
    """While open, the target's attention runs on packed tokens, and, once decoding, its experts as in plain decoding.
    One thread at a time per target; restored whatever happens."""
    with _locks_guard:
        lock = _locks.setdefault(model, threading.Lock())
    config = model.get_decoder().config
    with lock, model._optimize_model_for_decode() if decoding else contextlib.nullcontext():
        previous = config._attn_implementation
        config._attn_implementation = ATTENTION_NAME
        try:
            yield
        finally:
            config._attn_implementation = previous
