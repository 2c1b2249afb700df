"""The decoder stack that z-lab's and speculators' configurations share: Qwen3's, whatever the target's family is."""

import copy

from transformers import CONFIG_MAPPING

from ..errors import AdaFlashValueError


BODY_KEYS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps max_position_embeddings attention_dropout rope_parameters layer_types"
).split()
QWEN3_KEYS = (*BODY_KEYS, "vocab_size", "attention_bias", "initializer_range")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def require(values: dict, *keys: str) -> None:
    for key in keys:
        if values.get(key) in (None, []):
            raise AdaFlashValueError(f"`{key}` is missing from config.json: add the value used in training.")


def refuse_unlike(config, layout: str, means: dict) -> None:
    """Refuses to write what a layout has no key for.

    Args:
        config: the drafter's configuration.
        layout: whose layout it is, for the message.
        means: per key, the value that every checkpoint of the layout has.
    """
    found = {"partial_rotary_factor": config.rope_parameters.get("partial_rotary_factor", 1.0), **config.to_dict()}
    for key, value in means.items():
        if found[key] != value:
            raise AdaFlashValueError(
                f"`{key}` is {found[key]!r}, and {layout}'s layout can't say so: a reader would take {value!r}; "
                "keep this drafter in the `adaflash` layout."
            )


def read_body(raw: dict) -> dict:
    """Values of the decoder stack; keys that are left out mean Qwen3Config's defaults."""
    if raw.get("model_type", "qwen3") != "qwen3":
        raise AdaFlashValueError(f"`model_type` of the layers is {raw['model_type']}: load a drafter of qwen3 layers.")
    raw = copy.deepcopy(raw)
    flat = {key: raw.pop(key, None) for key in ("rope_theta", "partial_rotary_factor")}
    rope: dict = {}
    for part in (raw.pop("rope_parameters", None) or {}, raw.pop("rope_scaling", None) or {}, flat):
        for key, value in part.items():
            key = "rope_type" if key == "type" else key
            if isinstance(value, dict):
                raise AdaFlashValueError(f"`rope_parameters` differ by layer type ({key}): give all layers the same.")
            if value is not None and rope.setdefault(key, value) != value:
                raise AdaFlashValueError(f"`{key}` (RoPE) is both {rope[key]} and {value}: keep the right one.")
    body = CONFIG_MAPPING["qwen3"].from_dict(raw | ({"rope_parameters": rope} if rope else {}))
    values = {key: getattr(body, key) for key in QWEN3_KEYS}
    if "sliding_attention" in body.layer_types and raw.get("use_sliding_window") is False:
        raise AdaFlashValueError("`use_sliding_window` is false but `layer_types` has sliding attention: fix one.")
    values["sliding_window"] = body.sliding_window or raw.get("sliding_window")
    return values | {key: raw[key] for key in TOKEN_KEYS if raw.get(key) is not None}


def write_body(config) -> dict:
    """The stack's configuration as Qwen3 has it, with both RoPE schemas: older engines read the flat keys only."""
    rope = {key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    sliding = "sliding_attention" in config.layer_types
    return {
        "model_type": "qwen3",
        **{key: getattr(config, key) for key in QWEN3_KEYS},
        "max_window_layers": config.num_hidden_layers,
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if rope["rope_type"] != "default" else None,
        "tie_word_embeddings": False,
        **{key: config.to_dict().get(key) for key in TOKEN_KEYS},
    }
