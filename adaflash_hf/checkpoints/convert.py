"""Writing a drafter in another layout, and converting a checkpoint from one to another."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import cached_file

from ..cards import DETAILS_FILE
from ..errors import AdaFlashValueError
from ..hub import replace_file, replace_text
from . import speculators
from .layouts import FOREIGN, LAYOUTS, their_name


_HEAD_NAMES = ("lm_head.weight", "model.embed_tokens.weight")  # the second where the target ties them


def save_drafter(drafter, folder, layout: str, include_length_head: bool = True, target=None) -> None:
    """Writes a drafter as another implementation reads it.

    A foreign folder gets `config.json` and `model.safetensors`, and beside them `generation_config.json` and
    `card.json`, where this package keeps the length policy and the card's details; engines ignore both.

    Args:
        drafter: an `AdaFlashDrafter`.
        folder: where to write; created when missing.
        layout: one of `LAYOUTS`.
        include_length_head: whether a length head is written too; only `adaflash` and `zlab` have a place for one.
        target: folder or Hub id of the target, for the `speculators` layout of a drafter with `draft_vocab_size`,
            which carries rows of the target's head; the configuration's `target_model` where it is `None`.

    Raises:
        AdaFlashValueError: for what the layout can't express, naming the key, before anything is written.
    """
    if layout not in LAYOUTS:
        raise AdaFlashValueError(f"The layout {layout!r} is unknown: use one of {', '.join(LAYOUTS)}.")
    folder = Path(folder)
    if layout == "adaflash":
        if not include_length_head:
            raise AdaFlashValueError("`include_length_head=False` is for other layouts: `adaflash` holds any head.")
        drafter.save_pretrained(folder)
        return

    config = drafter.config
    head = config.length_head if include_length_head else None
    written = FOREIGN[layout].write_config(drafter, head)
    written["dtype"] = str(drafter.dtype).removeprefix("torch.")
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        if head is not None or not name.startswith("length_head."):
            tensors[their_name(name, FOREIGN[layout].PREFIXES)] = tensor.detach().cpu().contiguous()
    if layout == "speculators":
        target = target or config.target_model
        tensors = speculators.write_tensors(tensors, config, lambda ids: _head_rows(target, ids).to(drafter.dtype))

    folder.mkdir(parents=True, exist_ok=True)
    drafter.generation_config.save_pretrained(folder)
    replace_text(folder / DETAILS_FILE, drafter.card.to_json())
    replace_file(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    # Last, since a folder without a readable config.json is never mistaken for a checkpoint.
    replace_text(folder / "config.json", json.dumps(written, indent=2) + "\n")


def convert(source, folder, layout: str, include_length_head: bool = True, target=None, **kwargs) -> None:
    """Reads a drafter in any layout and writes it in `layout`. Tensors keep their values, in the dtype
    that the source's `config.json` names (`dtype` overrides it).

    Args:
        source: folder or Hub id.
        folder, layout, include_length_head, target: as in `save_drafter`.
        kwargs: for `AdaFlashDrafter.from_pretrained`, such as `revision`, `subfolder` and `target_model`.

    Raises:
        AdaFlashValueError: for what can't be read or written, before anything is written.
    """
    from ..modeling_adaflash import AdaFlashDrafter

    if Path(folder).exists() and any(Path(folder).iterdir()):
        raise AdaFlashValueError(f"{folder} isn't empty, and files of two layouts must not mix: name a new folder.")
    drafter = AdaFlashDrafter.from_pretrained(source, **kwargs)
    save_drafter(drafter, folder, layout, include_length_head, target)


def _head_rows(target, ids: torch.Tensor) -> torch.Tensor:
    """Rows `[n, d]` of a target's head, read from its safetensors without loading the model."""
    if target is None:
        raise AdaFlashValueError(
            "`draft_vocab_size` is set, and speculators' layout then carries rows of the target's head: pass `target`."
        )
    try:
        index = json.loads(Path(cached_file(target, "model.safetensors.index.json")).read_text(encoding="utf-8"))
        files = index["weight_map"]
    except OSError:
        whole = cached_file(target, "model.safetensors")
        with safe_open(whole, "pt") as tensors:
            files = dict.fromkeys(tensors.keys(), "model.safetensors")
    name = next((name for name in _HEAD_NAMES if name in files), None)
    if name is None:
        raise AdaFlashValueError(f"`target` {target} has none of {_HEAD_NAMES}: pass the unquantised target.")
    with safe_open(cached_file(target, files[name]), "pt") as tensors:
        return tensors.get_tensor(name)[ids].contiguous()
