"""The DFlash layout of vLLM's `speculators`: the Qwen3 stack in a nested configuration, layer ids one higher.

A drafter with a vocabulary of its own carries the target's head rows and two maps, `d2t` (target id minus draft id)
and `t2d` (which target ids occur); embedding and whole heads come from the target that the configuration names.

Limits: speculators trains its sliding layers with one lower bound per block; here, as in vLLM, each slot has its own,
so contexts longer than the window differ by up to a block at the window's far edge. The layout holds no length head.
"""

import torch

from ..errors import AdaFlashValueError
from .qwen3 import read_body, refuse_unlike, require, write_body


PREFIXES: dict[str, str] = {}
VERSION = "0.9.0"
_MEANS = {"use_qk_norm": True, "mlp_bias": False, "partial_rotary_factor": 1.0}


def recognises(raw: dict) -> bool:
    return raw.get("speculators_model_type") == "dflash"


def read_config(raw: dict) -> dict:
    require(raw, "transformer_layer_config", "block_size", "mask_token_id", "aux_hidden_state_layer_ids")
    values = read_body(raw["transformer_layer_config"])
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
        "num_target_layers": raw.get("num_target_layers"),
        "label_convention": "sample_from_anchor" if raw.get("sample_from_anchor") else "fill_in",
        "sliding_window_causal": not raw.get("sliding_window_non_causal", False),
        "draft_vocab_size": None if vocab == values["vocab_size"] else vocab,
        "target_model": verifier.get("name_or_path"),
    }


def read_tensors(tensors: dict[str, torch.Tensor], config) -> dict[str, torch.Tensor]:
    """Drops the frozen copies of the target's embedding and head rows, which the target itself provides here."""
    tensors = {
        name: tensor for name, tensor in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")
    }
    if config.draft_vocab_size is not None:
        tensors["draft_token_ids"] = _draft_token_ids(tensors, config)
    return tensors


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


def write_config(drafter, head) -> dict:
    config = drafter.config
    refuse_unlike(config, "speculators", _MEANS)
    if head is not None:
        raise AdaFlashValueError(
            f"`length_head` is {head.kind!r}, and speculators' layout holds none: leave the head out "
            "(`include_length_head=False`, `--no_include_length_head`) or keep the `adaflash` layout."
        )
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_drafted_tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not config.sliding_window_causal,
        "sample_from_anchor": config.label_convention == "sample_from_anchor",
        "tie_word_embeddings": False,
        "transformer_layer_config": write_body(config),
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target_model, "architectures": []},
        },
    }


def write_tensors(tensors: dict[str, torch.Tensor], config, head_rows) -> dict[str, torch.Tensor]:
    """Adds the vocabulary maps and head rows of a drafter with its own vocabulary.

    Args:
        tensors: ours, by name.
        config: the drafter's configuration.
        head_rows: function from token ids `[n]` to the rows `[n, d]` of the target's head.
    """
    if config.draft_vocab_size is None:
        return tensors
    ids = tensors.pop("draft_token_ids")
    if not bool((ids.diff() > 0).all()):
        raise AdaFlashValueError("`draft_token_ids` isn't ascending, as speculators needs it: sort the ids.")
    used = torch.zeros(config.vocab_size, dtype=torch.bool)
    used[ids] = True
    return tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": used, "lm_head.weight": head_rows(ids)}
