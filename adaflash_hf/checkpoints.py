"""Checkpoints of other DFlash implementations: read into an `AdaFlashDrafter`, and written for SGLang and vLLM.

Read: z-lab DFlash v1, AdaFlash (v1 plus a length head), speculators DFlash, and the in-tree assistant of transformers
5.24; this package's own layout is plain `save_pretrained`. Written: the z-lab/AdaFlash layout (`save_zlab`). Reading,
writing and reading again gives the same tensors and the same drafts.

Promise: a key or tensor that is missing, unknown, contradictory or that this drafter can't honour is refused in one
sentence that names it; nothing is guessed from the tokenizer or dropped in silence.

Limits: safetensors only. DFlash2, Domino and DSpark drafters, own embeddings or heads, and separate mask embeddings
are not supported. speculators trains its sliding layers with one lower bound per block; here, as in vLLM, each slot
has its own, so contexts longer than the window differ by up to a block at the window's far edge.
"""

import copy
import dataclasses
import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file, logging

from .errors import AdaFlashValueError


logger = logging.get_logger(__name__)

_HUB_ARGUMENTS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
_POLICY_KEYS = {"length_policy", "lookup_tokens", "length_rate", "min_candidate_length", "survival_threshold"}

# Prefixes of tensor names, theirs -> ours. All other names are the same everywhere.
_RENAMES = {
    "adaflash": {},
    "zlab": {
        "thresh_head_two_model.down.": "length_head.down.",
        "thresh_head_two_model.res.0.": "length_head.res.",
        "thresh_head_two_model.out.": "length_head.out.",
    },
    "speculators": {},
    "assistant": {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
}

# Drafters that share DFlash's tensor names but need modules that don't exist here, and keys that give them away.
_RELATIVES = {
    "DFlash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "Domino": ("domino_config", "gru_hidden_dim", "pure_draft_prefix_len"),
    "DSpark": ("dspark_config", "markov_rank"),
}

# Keys that change what a drafter computes, by the value that changes nothing (0 and 1 are False and True here).
_NEUTRAL = {
    False: "attention_sink_bias final_logit_softcapping use_prob_head use_thresh_head_subsequent",
    True: "attention_value_scale input_embedding_scale is_neox_style logit_scale output_multiplier rope_is_neox_style",
}
# What a z-lab drafter is; other values have no keys there, or engines ignore them.
_ZLAB_MEANS = {"use_qk_norm": True, "label_convention": "fill_in", "draft_vocab_size": None, "mlp_bias": False}
_ZLAB_MEANS |= {"hidden_act": "silu", "partial_rotary_factor": 1.0}

_BODY_KEYS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps max_position_embeddings attention_dropout rope_parameters layer_types"
).split()
_QWEN3_KEYS = (*_BODY_KEYS, "vocab_size", "attention_bias", "initializer_range")
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_drafter(cls, name_or_path, *args, config=None, generation_config=None, output_loading_info=False, **kwargs):
    """`AdaFlashDrafter.from_pretrained`: loads any layout of the module docstring from a folder or the Hub.

    Args:
        cls: the drafter class.
        name_or_path: folder or Hub id; `None` with `config` and `state_dict`, as in transformers.
        config: a drafter configuration to use instead of the checkpoint's.
        generation_config: length policy to use instead of the checkpoint's `generation_config.json`.
        output_loading_info: also return the dict of missing, unexpected and mismatched keys.
        kwargs: what else transformers' `from_pretrained` takes, or a configuration value to override.

    Returns:
        The drafter in evaluation mode, in the requested `dtype` or else the checkpoint's.

    Raises:
        AdaFlashValueError: for a layout that can't be read, and for keys or tensors that are missing or wrong.
        OSError: when the files can't be found or fetched.
    """
    hub = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs}
    tolerate_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
    requested = kwargs.get("dtype", kwargs.get("torch_dtype"))
    if str(requested).removeprefix("torch.") in ("float16", "half"):
        logger.warning_once("bfloat16-trained drafters can overflow in float16: use bfloat16 or float32 as `dtype`.")

    raw = {} if name_or_path is None else PreTrainedConfig.get_config_dict(name_or_path, **hub)[0]
    if not raw and config is None:
        raise AdaFlashValueError(f"{name_or_path} has no config.json: name a folder or Hub repo of a drafter.")
    foreign = bool(raw) and raw.get("model_type") != cls.config_class.model_type
    layout, values = _read_config(raw, name_or_path) if foreign else ("adaflash", raw)
    if config is None:
        # Merged before construction, which checks values.
        fields = {field.name for field in dataclasses.fields(cls.config_class)} - {"dtype"}
        overrides = {key: kwargs.pop(key) for key in list(kwargs) if key in fields}
        config = cls.config_class.from_dict(values | overrides)
    elif foreign and not isinstance(config, cls.config_class):
        raise AdaFlashValueError(f"`config` is {config!r}: pass an {cls.config_class.__name__} or leave it out.")
    source = name_or_path
    if foreign:
        config.check_complete()
        if kwargs.get("variant") or kwargs.get("use_safetensors") is False:
            raise AdaFlashValueError("`variant` and `use_safetensors=False` only work with this package's own layout.")
        kwargs = {key: value for key, value in kwargs.items() if key not in hub}
        kwargs["state_dict"] = _convert_tensors(layout, _read_tensors(name_or_path, hub), config)
        source = None

    # Mismatched shapes are collected here, not raised by transformers, so that one sentence lists all that is wrong.
    model, info = PreTrainedModel.from_pretrained.__func__(
        cls, source, *args, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
    )
    _check_keys(info, name_or_path or "`state_dict`", _RENAMES[layout], tolerate_mismatch)
    if name_or_path is not None:
        model.config.name_or_path = model.name_or_path = str(name_or_path)

    # transformers loads generation_config.json only into models that generate by themselves.
    policy = model.generation_config_class
    if generation_config is not None:
        model.generation_config = policy.from_dict(generation_config.to_dict())
    elif name_or_path is not None and (settings := _read_policy(name_or_path, hub)) is not None:
        model.generation_config = policy.from_dict(settings)
    return (model, info) if output_loading_info else model


def save_zlab(drafter, folder, include_length_head: bool = True) -> None:
    """Writes `config.json` and `model.safetensors` in the z-lab/AdaFlash layout, which SGLang and vLLM load.

    Also writes `generation_config.json`, where this package keeps the length policy and which the engines ignore.
    SGLang skips tensors that it doesn't know; leave the length head out for an engine that refuses them.

    Args:
        drafter: an `AdaFlashDrafter`.
        folder: where to write; created when missing.
        include_length_head: whether a `length` head is written too, under AdaFlash's names.

    Raises:
        AdaFlashValueError: for what the layout can't express, naming the key, before anything is written.
    """
    config = drafter.config
    head = config.length_head if include_length_head else None
    found = {"partial_rotary_factor": config.rope_parameters.get("partial_rotary_factor", 1.0), **config.to_dict()}
    for key, value in _ZLAB_MEANS.items():
        if found[key] != value:
            raise AdaFlashValueError(f"`{key}` is {found[key]!r}, unlike z-lab's {value!r}: use `save_pretrained`.")
    if head is not None and head.kind != "length":
        raise AdaFlashValueError(
            f"`kind` of `length_head` is {head.kind!r}, not 'length': pass `include_length_head=False` to "
            "leave the head out, or use `save_pretrained`."
        )

    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if head is not None or not name.startswith("length_head."):
            tensors[_their_name(name, _RENAMES["zlab"])] = tensor.detach().contiguous()

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    drafter.generation_config.save_pretrained(folder)
    _replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    text = json.dumps(_zlab_config(config, head, drafter.dtype), indent=2) + "\n"
    # Last, since a folder without a readable config.json is never mistaken for a checkpoint.
    _replace(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))


def _zlab_config(config, head, dtype: torch.dtype) -> dict:
    rope = {key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    sliding = "sliding_attention" in config.layer_types
    dflash = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if head is not None:
        dflash |= {"use_thresh_head_two_model": True, "thresh_head_direct_len": True}
        dflash["thresh_head_bottleneck_dim"] = head.bottleneck_size
    written = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config": dflash,
        **{key: getattr(config, key) for key in ("block_size", "num_target_layers", *_QWEN3_KEYS)},
        "max_window_layers": config.num_hidden_layers,
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        # Both schemas: older engines read rope_theta and rope_scaling only.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if rope["rope_type"] != "default" else None,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if not config.sliding_window_causal:
        # Never `true`: vLLM would make full-attention layers causal with it. Absent means causal in sliding layers.
        written["is_causal"] = False
    return written | {key: config.to_dict().get(key) for key in _TOKEN_KEYS}


def _read_config(raw: dict, source) -> tuple[str, dict]:
    """The layout of a foreign config.json, and the values of our configuration that it stands for."""
    inner = raw.get("dflash_config") or {}
    marks = {key: raw.get(key, inner.get(key)) for key in ("model_type", "speculators_model_type", "projector_type")}
    marks["architectures"] = raw.get("architectures") or []
    for relative, keys in _RELATIVES.items():
        found = [key for key, mark in marks.items() if relative.lower() in str(mark).lower()]
        found += [key for key in keys if raw.get(key, inner.get(key)) is not None]
        if found:
            raise AdaFlashValueError(f"{source} is a {relative} drafter (see `{found[0]}`): load a DFlash v1 one.")
    for neutral, keys in _NEUTRAL.items():
        for key in keys.split():
            if (value := raw.get(key, inner.get(key))) not in (None, neutral):
                raise AdaFlashValueError(f"`{key}` is {value!r}, which isn't supported: load a checkpoint without it.")

    if raw.get("speculators_model_type") == "dflash":
        layout, values = "speculators", _read_speculators(raw)
    elif raw.get("model_type") == "muse_glimmer_assistant":
        layout, values = "assistant", _read_assistant(raw)
    elif raw.get("speculators_model_type") is None and (inner or "DFlashDraftModel" in marks["architectures"]):
        layout, values = "zlab", _read_zlab(raw, inner)
    else:
        raise AdaFlashValueError(f"{source} has an unknown layout ({marks}): load an AdaFlash or DFlash drafter.")
    values["sliding_window"] = values["sliding_window"] if "sliding_attention" in values["layer_types"] else None
    return layout, values | {"dtype": raw.get("dtype", raw.get("torch_dtype"))}


def _read_zlab(raw: dict, inner: dict) -> dict:
    both = {key: _either(raw, inner, key) for key in ("block_size", "mask_token_id", "target_layer_ids")}
    _require(both, *both)
    values = _read_body(raw)
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


def _read_speculators(raw: dict) -> dict:
    _require(raw, "transformer_layer_config", "block_size", "mask_token_id", "aux_hidden_state_layer_ids")
    values = _read_body(raw["transformer_layer_config"])
    # These ids count the embeddings as 0, ours count the first layer's output as 0.
    layer_ids = [i - 1 for i in raw["aux_hidden_state_layer_ids"]]
    if min(layer_ids) < 0:
        raise AdaFlashValueError("`aux_hidden_state_layer_ids` contains 0, the embeddings: use layers, 1 and up.")
    if raw.get("target_hidden_size") not in (None, values["hidden_size"]):
        raise AdaFlashValueError("`target_hidden_size` differs from the drafter's: load one of the target's size.")
    vocab = raw.get("draft_vocab_size")
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return values | {
        "block_size": raw["block_size"],
        "mask_token_id": raw["mask_token_id"],
        "target_layer_ids": layer_ids,
        "label_convention": "sample_from_anchor" if raw.get("sample_from_anchor") else "fill_in",
        "sliding_window_causal": not raw.get("sliding_window_non_causal", False),
        "draft_vocab_size": None if vocab == values["vocab_size"] else vocab,
        "target_model": verifier.get("name_or_path"),
    }


def _read_assistant(raw: dict) -> dict:
    # Saved in-tree configurations spell these out; the class would fill in the ids of one particular target.
    _require(raw, "mask_token_id", "target_layer_ids")
    body = CONFIG_MAPPING["muse_glimmer_assistant"].from_dict(copy.deepcopy(raw))
    keys = (*_BODY_KEYS, "sliding_window", "block_size", "mask_token_id", "target_layer_ids")
    return {key: getattr(body, key) for key in keys} | {
        # The layout doesn't say; its targets are all of one family. Another one: `from_pretrained(..., vocab_size=)`.
        "vocab_size": raw.get("vocab_size", CONFIG_MAPPING["muse_glimmer_text"]().vocab_size),
        "sliding_window_causal": False,
    }


def _read_body(raw: dict) -> dict:
    """Values of the decoder stack, from a Qwen3 configuration whose omitted keys mean Qwen3Config's defaults."""
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
    values = {key: getattr(body, key) for key in _QWEN3_KEYS}
    if "sliding_attention" in body.layer_types and raw.get("use_sliding_window") is False:
        raise AdaFlashValueError("`use_sliding_window` is false but `layer_types` has sliding attention: fix one.")
    values["sliding_window"] = body.sliding_window or raw.get("sliding_window")
    return values | {key: raw[key] for key in _TOKEN_KEYS if raw.get(key) is not None}


def _either(raw: dict, inner: dict, key: str):
    """The value of a key that z-lab checkpoints hold at the top level or inside `dflash_config`."""
    outer, nested = raw.get(key), inner.get(key)
    if None not in (outer, nested) and outer != nested:
        raise AdaFlashValueError(f"`{key}` is {outer}, but {nested} in `dflash_config`: keep the right one.")
    return nested if outer is None else outer


def _require(values: dict, *keys: str) -> None:
    for key in keys:
        if values.get(key) in (None, []):
            raise AdaFlashValueError(f"`{key}` is missing from config.json: add the value used in training.")


def _read_tensors(name_or_path, hub: dict) -> dict[str, torch.Tensor]:
    try:
        files = [cached_file(name_or_path, "model.safetensors", **hub)]
    except OSError:
        try:
            index = cached_file(name_or_path, "model.safetensors.index.json", **hub)
        except OSError as error:
            raise AdaFlashValueError(f"{name_or_path} has no model.safetensors: save it as safetensors.") from error
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
        files = [cached_file(name_or_path, shard, **hub) for shard in sorted(set(shards))]
    tensors = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def _convert_tensors(layout: str, tensors: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    converted = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")  # some exporters save the drafter as an attribute of a wrapper
        for theirs, ours in _RENAMES[layout].items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        converted[name] = tensor
    if layout == "speculators":
        # Frozen copies of the target's embedding and of its head's rows; the target itself provides them here.
        for name in ("embed_tokens.weight", "lm_head.weight"):
            converted.pop(name, None)
        if config.draft_vocab_size is not None:
            converted["draft_token_ids"] = _draft_token_ids(converted, config)
    return converted


def _draft_token_ids(tensors: dict[str, torch.Tensor], config) -> torch.Tensor:
    """Target ids `[draft_vocab_size]` int64 from `d2t`, which holds target id minus draft id; pops `d2t` and `t2d`."""
    if "d2t" not in tensors:
        raise AdaFlashValueError("`d2t` is missing from the weights but `draft_vocab_size` is set: export again.")
    offsets, used = tensors.pop("d2t").long(), tensors.pop("t2d", None)
    ids = torch.arange(len(offsets)) + offsets
    if len(ids) != config.draft_vocab_size or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise AdaFlashValueError("`d2t` doesn't fit `draft_vocab_size` and `vocab_size`: export the drafter again.")
    if used is not None and not torch.equal(used.nonzero().flatten(), ids.unique()):
        raise AdaFlashValueError("`t2d` and `d2t` list different tokens: export the drafter again.")
    return ids


def _their_name(name: str, renames: dict[str, str]) -> str:
    for theirs, ours in renames.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _check_keys(info: dict, source, renames: dict[str, str], tolerate_mismatch: bool) -> None:
    wrong = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"]}
    if not tolerate_mismatch:
        wrong["mismatched"] = {key for key, *_ in info["mismatched_keys"]}
    parts = [f"{kind} {sorted(_their_name(key, renames) for key in keys)}" for kind, keys in wrong.items() if keys]
    if parts:
        raise AdaFlashValueError(f"{source} doesn't fit its config.json: {'; '.join(parts)}; load a complete copy.")


def _read_policy(name_or_path, hub: dict) -> dict | None:
    """The settings of generation_config.json, or `None` where there is no such file or it isn't this package's."""
    try:
        path = cached_file(name_or_path, "generation_config.json", **hub)
    except OSError:
        return None
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    return settings if _POLICY_KEYS & settings.keys() else None


def _replace(path: Path, write) -> None:
    """Lets `write` fill a temporary file, then puts it in place in one step, so that readers never see half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
