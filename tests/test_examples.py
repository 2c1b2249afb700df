"""The example scripts run as a user would run them, in a small size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adaflash_hf import AdaFlashDrafter


EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
def test_quickstart():
    out = run("quickstart.py", "--max_new_tokens", "8", "--repeats", "1", "--dtype", "float32")
    assert "Same output as plain generate: 3 of 3." in out and "| mean |" in out


@pytest.mark.slow
def test_batch_generate():
    out = run("batch_generate.py", "--prompts_per_domain", "1", "--max_new_tokens", "8")
    assert out.count("committed per step") == 3 and "mean tau" in out


@pytest.mark.slow
def test_train_drafter_and_resume(tmp_path):
    arguments = [
        *("--output_dir", str(tmp_path), "--prompts_per_domain", "2", "--max_new_tokens", "12"),
        *("--per_device_train_batch_size", "2", "--anchors_per_sequence", "4", "--num_layers", "1"),
        *("--draft_vocab_size", "64", "--save_steps", "2", "--report_to", "none", "--use_cpu"),
        *("--disable_tqdm", "true", "--max_steps"),
    ]
    run("train_drafter.py", *arguments, "2")
    shards = {path: path.stat().st_mtime for path in (tmp_path / "features").iterdir()}
    run("train_drafter.py", *arguments, "4")
    assert (tmp_path / "checkpoint-4").is_dir()
    assert shards == {path: path.stat().st_mtime for path in (tmp_path / "features").iterdir()}
    drafter = AdaFlashDrafter.from_pretrained(tmp_path / "drafter")
    assert drafter.config.num_hidden_layers == 1 and drafter.length_head.config.kind == "survival"


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_help(script):
    assert "usage" in run(script, "--help")
