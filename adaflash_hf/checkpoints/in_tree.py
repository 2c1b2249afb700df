"""The in-tree DFlash drafter of transformers 5.24, `MuseGlimmerAssistantModel`."""

import copy

from transformers import CONFIG_MAPPING

from ..errors import AdaFlashValueError
from .qwen3 import BODY_KEYS, TOKEN_KEYS, refuse_unlike, require


PREFIXES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_TYPE = "muse_glimmer_assistant"
_MEANS = {
    "use_qk_norm": True,
    "label_convention": "fill_in",
    "draft_vocab_size": None,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}
# The layout doesn't need these; unknown keys are kept by transformers, and nothing is lost on the way back.
_EXTRA_KEYS = ("num_target_layers", "target_model")


def recognises(raw: dict) -> bool:
    return raw.get("model_type") == _TYPE


def read_config(raw: dict) -> dict:
    # Saved in-tree configurations spell these out; the class would fill in the ids of one particular target.
    require(raw, "mask_token_id", "target_layer_ids")
    body = CONFIG_MAPPING[_TYPE].from_dict(copy.deepcopy(raw))
    keys = (*BODY_KEYS, "sliding_window", "block_size", "mask_token_id", "target_layer_ids")
    return {key: getattr(body, key) for key in keys} | {
        # The layout doesn't say; its targets are all of one family. Another one: `from_pretrained(..., vocab_size=)`.
        "vocab_size": raw.get("vocab_size", CONFIG_MAPPING["muse_glimmer_text"]().vocab_size),
        # Said by no key; without sliding layers it says nothing, and is left at its default.
        "sliding_window_causal": "sliding_attention" not in body.layer_types,
        **{key: raw[key] for key in (*_EXTRA_KEYS, *TOKEN_KEYS) if raw.get(key) is not None},
    }


def write_config(drafter, head) -> dict:
    config = drafter.config
    refuse_unlike(config, "transformers", _MEANS)
    sliding = "sliding_attention" in config.layer_types
    if sliding and config.sliding_window_causal:
        raise AdaFlashValueError(
            "`sliding_window_causal` is true, and transformers' in-tree drafter attends in both directions inside "
            "the block: keep this drafter in the `adaflash` layout."
        )
    if head is not None:
        raise AdaFlashValueError(
            f"`length_head` is {head.kind!r}, and transformers' in-tree layout holds none: leave the head out "
            "(`include_length_head=False`, `--no_include_length_head`) or keep the `adaflash` layout."
        )
    keys = (*BODY_KEYS, "block_size", "mask_token_id", "target_layer_ids", "vocab_size", *_EXTRA_KEYS)
    written = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": _TYPE}
    written |= {key: getattr(config, key) for key in keys}
    written |= {key: config.to_dict().get(key) for key in TOKEN_KEYS}
    return written | ({"sliding_window": config.sliding_window} if sliding else {})
