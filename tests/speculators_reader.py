"""Run by `test_speculators.py` with the Python of an environment that has the `speculators` package: its own loader
reads an export, and its own modules fill one block.

    python speculators_reader.py EXPORT INPUTS OUTPUT

INPUTS (safetensors): `features` `[n, T*d]`, `input_ids` `[n]`, `anchor` `[1]`. Written to OUTPUT: `hidden` `[B, d]` of
the block at the anchor, and the parameters that were loaded, by name.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig


export, inputs, output = sys.argv[1:]
config = SpeculatorModelConfig.from_pretrained(export)
config.transformer_layer_config._attn_implementation = "eager"  # the default needs a compiler
model = SpeculatorModel.from_pretrained(export, config=config, dtype=torch.float32).eval()
given = load_file(inputs)
length = given["input_ids"].shape[0]
loss_mask = torch.zeros(1, length)
loss_mask[0, given["anchor"]] = 1  # the only place where an anchor can be
with torch.no_grad():
    hidden, *_ = model._backbone_forward(
        hidden_states=given["features"][None],
        input_ids=given["input_ids"][None],
        loss_mask=loss_mask,
        verifier_last_hidden_states=torch.zeros(1, length, config.transformer_layer_config.hidden_size),
        document_ids=torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
    )
tensors = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
save_file(tensors | {"hidden": hidden[0].contiguous()}, output)
