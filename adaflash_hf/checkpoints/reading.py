"""`AdaFlashDrafter.from_pretrained`: any layout, from a folder or the Hub, single file or shards."""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file, logging

from ..errors import AdaFlashValueError
from ..hub import HUB_ARGUMENTS
from . import speculators
from .layouts import FOREIGN, our_name, read_config, their_name


logger = logging.get_logger(__name__)


def load_drafter(cls, name_or_path, *args, config=None, output_loading_info=False, **kwargs):
    """Loads the weights of a drafter in any layout of the package.

    Args:
        cls: the drafter class.
        name_or_path: folder or Hub id; `None` with `config` and `state_dict`, as in transformers.
        config: a drafter configuration to use instead of the checkpoint's.
        output_loading_info: also return the dict of missing, unexpected and mismatched keys.
        kwargs: what else transformers' `from_pretrained` takes (`revision`, `subfolder`, `dtype`, ...), or a
            configuration value to override.

    Returns:
        The drafter in evaluation mode, in the requested `dtype` or else the checkpoint's.

    Raises:
        AdaFlashValueError: for a layout that can't be read, and for keys or tensors that are missing or wrong.
        OSError: when the files can't be found or fetched.
    """
    hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
    tolerate_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
    requested = kwargs.get("dtype", kwargs.get("torch_dtype"))
    if str(requested).removeprefix("torch.") in ("float16", "half"):
        logger.warning_once("bfloat16-trained drafters can overflow in float16: use bfloat16 or float32 as `dtype`.")

    if str(name_or_path).startswith(("/", ".", "~")) and not Path(name_or_path).is_dir():
        raise AdaFlashValueError(f"{name_or_path} is no folder: check the path.")
    raw = {} if name_or_path is None else PreTrainedConfig.get_config_dict(name_or_path, **hub)[0]
    if not raw and config is None:
        raise AdaFlashValueError(f"{name_or_path} has no config.json: name a folder or Hub repo of a drafter.")
    foreign = bool(raw) and raw.get("model_type") != cls.config_class.model_type
    layout, values = read_config(raw, name_or_path) if foreign else ("adaflash", raw)
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
    _check_keys(info, name_or_path or "`state_dict`", FOREIGN[layout].PREFIXES if foreign else {}, tolerate_mismatch)
    if name_or_path is not None:
        model.config.name_or_path = model.name_or_path = str(name_or_path)
    return (model, info) if output_loading_info else model


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
    renamed = {our_name(name, FOREIGN[layout].PREFIXES): tensor for name, tensor in tensors.items()}
    return speculators.read_tensors(renamed, config) if layout == "speculators" else renamed


def _check_keys(info: dict, source, prefixes: dict[str, str], tolerate_mismatch: bool) -> None:
    wrong = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"]}
    if not tolerate_mismatch:
        wrong["mismatched"] = {key for key, *_ in info["mismatched_keys"]}
    parts = [f"{kind} {sorted(their_name(key, prefixes) for key in keys)}" for kind, keys in wrong.items() if keys]
    if parts:
        raise AdaFlashValueError(f"{source} doesn't fit its config.json: {'; '.join(parts)}; load a complete copy.")
