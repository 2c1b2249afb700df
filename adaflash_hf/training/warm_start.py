"""A drafter whose layers start as copies of the target's last ones, for training on little data.

The context enters a drafter's attention without `input_layernorm`, the block with it. So each copied layer has its
`input_layernorm` folded into the query, key and value projections, which then suit both; `fc` starts as the deepest
tapped layer alone, whose normed output is close to what the copied layers read in the target.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import AdaFlashValueError
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@torch.no_grad()
def warm_start(drafter: AdaFlashDrafter, target: PreTrainedModel) -> None:
    """Fills the drafter's layers from the target's last ones, and `fc`, `hidden_norm` and `norm` to match, in place.

    Raises:
        AdaFlashValueError: when the target's layers have other modules or shapes than the drafter's.
    """
    config, parts = drafter.config, Target(target, drafter.config)
    sources = parts.layers[-config.num_hidden_layers :]
    if len(sources) < config.num_hidden_layers:
        raise AdaFlashValueError(
            f"`num_hidden_layers` is {config.num_hidden_layers} but the target has {len(sources)}: use fewer."
        )
    staged = [(layer, _folded(layer, source)) for layer, source in zip(drafter.layers, sources, strict=True)]
    for layer, state in staged:
        layer.load_state_dict(state)
    width = config.hidden_size
    deepest = max(range(len(config.target_layer_ids)), key=lambda i: config.target_layer_ids[i])
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, deepest * width : (deepest + 1) * width] = torch.eye(width)
    drafter.hidden_norm.weight.fill_(1)
    drafter.norm.weight.copy_(_scale(target.get_decoder().norm, width))


def _scale(norm: nn.Module, width: int) -> torch.Tensor:
    """The factors `[width]` that an RMS norm applies, whether it stores them as w or as w - 1."""
    weight = norm.weight
    ones = torch.ones(1, width, dtype=torch.float32, device=weight.device)
    return norm(ones.to(weight.dtype))[0].float()


def _folded(layer: nn.Module, source: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a drafter layer that does what the target's layer does to a block."""
    theirs, ours = source.state_dict(), layer.state_dict()
    spare = {name for name in theirs.keys() - ours.keys() if not (name.endswith("bias") and not theirs[name].any())}
    missing = {name for name in ours.keys() - theirs.keys() if not name.endswith("proj.bias")}
    shapes = {name for name in ours.keys() & theirs.keys() if ours[name].shape != theirs[name].shape}
    if spare or missing or shapes:
        raise AdaFlashValueError(
            f"The target's layers don't fit the drafter's ({', '.join(sorted(spare | missing | shapes))}): give the "
            "drafter the target's sizes, `use_qk_norm` and `attention_bias`, or leave `warm_start` out."
        )
    width = source.input_layernorm.weight.shape[0]
    scale = _scale(source.input_layernorm, width)
    state = {name: theirs[name].float() if name in theirs else torch.zeros_like(ours[name]) for name in ours}
    for name in _PROJECTIONS:
        state[f"self_attn.{name}.weight"] = state[f"self_attn.{name}.weight"] * scale
    state["input_layernorm.weight"] = torch.ones(width)
    state["post_attention_layernorm.weight"] = _scale(source.post_attention_layernorm, width)
    for name in ("q_norm", "k_norm"):
        if f"self_attn.{name}.weight" in state:
            norm = getattr(source.self_attn, name)
            state[f"self_attn.{name}.weight"] = _scale(norm, norm.weight.shape[0])
    return state
