"""The `speculators` package's own loader reads our export and computes the same hidden states.

Its pins clash with ours (it wants transformers up to 5.19), so it lives in an environment of its own, whose Python
ADAFLASH_SPECULATORS_PYTHON names:

    python -m venv venv-speculators && venv-speculators/bin/pip install speculators
    ADAFLASH_SPECULATORS_PYTHON=venv-speculators/bin/python python -m pytest tests/test_speculators.py
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_drafter, make_target

from adaflash_hf.checkpoints import save_drafter


PYTHON = os.environ.get("ADAFLASH_SPECULATORS_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="ADAFLASH_SPECULATORS_PYTHON isn't set")
LENGTH, ANCHOR = 16, 8
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"draft_vocab_size": 12},
        {"label_convention": "sample_from_anchor"},
        # Contexts within the window: beyond it speculators has one lower bound per block, see the module.
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32, "sliding_window_causal": False},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            }
        },
    ],
)
def test_same_hidden_states(tmp_path, values):
    target = make_target("qwen3")
    target.save_pretrained(tmp_path / "target")
    drafter = make_drafter(target_model=str(tmp_path / "target"), **values)
    if drafter.config.draft_vocab_size is not None:
        drafter.draft_token_ids.copy_(torch.arange(12) * 2 + 1)
    save_drafter(drafter, tmp_path / "export", "speculators")

    features = torch.randn(LENGTH, 2 * drafter.config.hidden_size)
    ids = torch.randint(2, 32, (LENGTH,))
    save_file({"features": features, "input_ids": ids, "anchor": torch.tensor([ANCHOR])}, tmp_path / "inputs")
    result = subprocess.run(
        [
            PYTHON,
            Path(__file__).with_name("speculators_reader.py"),
            *(tmp_path / n for n in ("export", "inputs", "out")),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    theirs = load_file(tmp_path / "out")

    block = torch.full((drafter.config.block_size,), drafter.config.mask_token_id)
    block[0] = ids[ANCHOR]
    with torch.no_grad():
        ours = drafter(
            noise_embeds=target.get_input_embeddings()(block)[None],
            context_hidden_states=features[None, :ANCHOR],
            position_ids=torch.arange(ANCHOR + len(block))[None],
        ).last_hidden_state[0]
    torch.testing.assert_close(theirs["hidden"], ours, rtol=1e-5, atol=1e-5)
    for name, tensor in drafter.state_dict().items():
        if name != "draft_token_ids":
            assert torch.equal(theirs[f"model.{name}"], tensor), name
    rows = target.get_output_embeddings().weight
    if drafter.config.draft_vocab_size is not None:
        rows = rows[drafter.draft_token_ids]
        assert torch.equal(theirs["model.d2t"] + torch.arange(12), drafter.draft_token_ids)
    assert torch.equal(theirs["model.lm_head.weight"], rows)
