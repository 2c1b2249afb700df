"""Which layout a checkpoint has, and why some are refused."""

from ..errors import AdaFlashValueError
from . import in_tree, speculators, zlab


# Own first. Each foreign module has `recognises`, `read_config`, `write_config` and `PREFIXES` (theirs -> ours).
FOREIGN = {"zlab": zlab, "speculators": speculators, "transformers": in_tree}
LAYOUTS = ("adaflash", *FOREIGN)

# Drafters that share DFlash's tensor names but need modules that don't exist here, and keys that give them away.
_RELATIVES = {
    "DFlash2": (
        ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
        "grouped convolutions around each sub-layer and a candidate selector",
    ),
    "Domino": (("domino_config", "gru_hidden_dim", "pure_draft_prefix_len"), "a GRU head over the drafted tokens"),
    "DSpark": (("dspark_config", "markov_rank"), "a Markov head over the drafted tokens and a confidence head"),
}

# Keys that change what a drafter computes, by the value that changes nothing (0 and 1 are False and True here).
_NEUTRAL = {
    False: "attention_sink_bias final_logit_softcapping use_prob_head use_thresh_head_subsequent",
    True: "attention_value_scale input_embedding_scale is_neox_style logit_scale output_multiplier rope_is_neox_style",
}


def read_config(raw: dict, source) -> tuple[str, dict]:
    """The layout of a foreign config.json, and the values of our configuration that it stands for.

    Raises:
        AdaFlashValueError: for a layout, a relative of DFlash or a key that isn't supported.
    """
    inner = raw.get("dflash_config") or {}
    marks = {key: raw.get(key, inner.get(key)) for key in ("model_type", "speculators_model_type", "projector_type")}
    marks["architectures"] = raw.get("architectures") or []
    for relative, (keys, needs) in _RELATIVES.items():
        found = [key for key, mark in marks.items() if relative.lower() in str(mark).lower()]
        found += [key for key in keys if raw.get(key, inner.get(key)) is not None]
        if found:
            raise AdaFlashValueError(
                f"{source} is a {relative} drafter (see `{found[0]}`), which needs {needs}: load a DFlash v1 drafter, "
                "or serve this one with SGLang or vLLM."
            )
    for neutral, keys in _NEUTRAL.items():
        for key in keys.split():
            if (value := raw.get(key, inner.get(key))) not in (None, neutral):
                raise AdaFlashValueError(f"`{key}` is {value!r}, which isn't supported: load a checkpoint without it.")
    for name, layout in FOREIGN.items():
        if layout.recognises(raw):
            values = layout.read_config(raw)
            if "sliding_attention" not in values["layer_types"]:
                values["sliding_window"] = None
            return name, values | {"dtype": raw.get("dtype", raw.get("torch_dtype"))}
    raise AdaFlashValueError(f"{source} has an unknown layout ({marks}): load an AdaFlash or DFlash drafter.")


def their_name(name: str, prefixes: dict[str, str]) -> str:
    for theirs, ours in prefixes.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def our_name(name: str, prefixes: dict[str, str]) -> str:
    name = name.removeprefix("model.")  # some exporters save the drafter as an attribute of a wrapper
    for theirs, ours in prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name
