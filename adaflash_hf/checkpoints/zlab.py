"""z-lab's DFlash v1 layout, and AdaFlash's, which is the same with a length head. SGLang and vLLM load it.

A Qwen3 configuration with `dflash_config`; body tensors under the names used here. SGLang skips tensors that it
doesn't know; leave the length head out for an engine that refuses them.
"""

from ..errors import AdaFlashValueError
from .qwen3 import read_body, refuse_unlike, require, write_body


PREFIXES = {
    "thresh_head_two_model.down.": "length_head.down.",
    "thresh_head_two_model.res.0.": "length_head.res.",
    "thresh_head_two_model.out.": "length_head.out.",
}
# What a z-lab drafter is; other values have no keys there, or engines ignore them.
_MEANS = {
    "use_qk_norm": True,
    "label_convention": "fill_in",
    "draft_vocab_size": None,
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
}


def recognises(raw: dict) -> bool:
    architectures = raw.get("architectures") or []
    known = bool(raw.get("dflash_config")) or "DFlashDraftModel" in architectures
    return known and raw.get("speculators_model_type") is None


def read_config(raw: dict) -> dict:
    inner = raw.get("dflash_config") or {}
    both = {key: _either(raw, inner, key) for key in ("block_size", "mask_token_id", "target_layer_ids")}
    require(both, *both)
    values = read_body(raw)
    if inner.get("use_swa") and "sliding_attention" not in values["layer_types"]:
        values["layer_types"] = ["sliding_attention"] * values["num_hidden_layers"]
    values["sliding_window"] = inner.get("swa_window_size") or values["sliding_window"]
    causal = raw.get("is_causal", inner.get("causal"))
    if causal and "full_attention" in values["layer_types"]:
        raise AdaFlashValueError("`is_causal` is true but `layer_types` has full attention, never causal: fix one.")
    values |= both
    values["sliding_window_causal"] = causal is not False
    values["num_target_layers"] = _either(raw, inner, "num_target_layers")
    if inner.get("use_thresh_head_two_model"):
        if not inner.get("thresh_head_direct_len"):
            raise AdaFlashValueError("`thresh_head_direct_len` is not true: load a head that predicts a length.")
        head = {"kind": "length", "bottleneck_size": inner.get("thresh_head_bottleneck_dim", 256)}
        values["length_head"] = head | {key: values[key] for key in ("hidden_size", "block_size")}
    return values


def _either(raw: dict, inner: dict, key: str):
    """The value of a key that z-lab checkpoints hold at the top level or inside `dflash_config`."""
    outer, nested = raw.get(key), inner.get(key)
    if None not in (outer, nested) and outer != nested:
        raise AdaFlashValueError(f"`{key}` is {outer}, but {nested} in `dflash_config`: keep the right one.")
    return nested if outer is None else outer


def write_config(drafter, head) -> dict:
    config = drafter.config
    refuse_unlike(config, "z-lab", _MEANS)
    if head is not None and head.kind != "length":
        raise AdaFlashValueError(
            f"`kind` of `length_head` is {head.kind!r}, and z-lab's layout has 'length' only: leave the head out "
            "(`include_length_head=False`, `--no_include_length_head`) or keep the `adaflash` layout."
        )
    dflash = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if head is not None:
        dflash |= {"use_thresh_head_two_model": True, "thresh_head_direct_len": True}
        dflash["thresh_head_bottleneck_dim"] = head.bottleneck_size
    written = {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": dflash,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        **write_body(config),
    }
    if not config.sliding_window_causal:
        # Never `true`: vLLM would make full-attention layers causal with it. Absent means causal in sliding layers.
        written["is_causal"] = False
    return written
