"""The example scripts run as a user would run them, in a small size."""

import contextlib
import dataclasses
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml

from adaflash_hf import AdaFlashDrafter
from adaflash_hf.training.arguments import AdaFlashTrainingArguments


EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str) -> str:
    """What a script prints. It runs in this process, which has imported torch already."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [str(EXAMPLES / script), *arguments])
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as end:
            assert not end.code
    return out.getvalue()


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
        *("--output_dir", str(tmp_path), "--prompts_per_domain", "2", "--rollout_max_new_tokens", "12"),
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


@pytest.mark.slow
def test_train_on_policy_and_resume(tmp_path):
    drafter = str(EXAMPLES.parent / "hub_cards" / "SmolLM2-135M-Instruct-AdaFlash")
    arguments = [
        *("--output_dir", str(tmp_path), "--drafter", drafter, "--prompts_per_domain", "2", "--use_cpu"),
        *("--rollout_batch_size", "2", "--rollout_max_new_tokens", "12", "--per_device_train_batch_size", "1"),
        *("--steps_per_version", "2", "--anchors_per_sequence", "4", "--save_steps", "2", "--eval_every", "2"),
        *("--eval_prompts_per_domain", "1", "--eval_tokens", "8", "--report_to", "none"),
        *("--disable_tqdm", "true", "--max_steps"),
    ]
    run("train_on_policy.py", *arguments, "2")
    out = run("train_on_policy.py", *arguments, "4")
    assert "| chat | 1 |" in out and (tmp_path / "checkpoint-4").is_dir()
    assert (tmp_path / "exchange" / "current").read_text() == "2"
    assert AdaFlashDrafter.from_pretrained(tmp_path / "drafter").dtype == torch.bfloat16


@pytest.mark.slow
def test_train_length_head(tmp_path):
    out = run(
        *("train_length_head.py", "--output_dir", str(tmp_path), "--new_head", "--length_head", "length"),
        *("--prompts_per_domain", "2", "--rollout_max_new_tokens", "24", "--max_steps", "2", "--use_cpu"),
        *("--report_to", "none", "--disable_tqdm", "true", "--eval_prompts_per_domain", "1"),
        *("--eval_tokens", "8"),
    )
    assert "before calibration" in out and "length_policy head" in out
    assert (tmp_path / "reliability.png").exists()
    assert AdaFlashDrafter.from_pretrained(tmp_path / "drafter").length_head.config.kind == "length"


@pytest.mark.slow
def test_evaluate_drafter():
    out = run("evaluate_drafter.py", "--prompts_per_domain", "1", "--max_new_tokens", "8", "--temperature", "1")
    assert "| math | 1 |" in out and "spread between domains" in out


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_help(script):
    assert "usage" in run(script, "--help")


@pytest.mark.parametrize("recipe", sorted((EXAMPLES / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_hold_known_arguments(recipe, monkeypatch):
    """Every key is an option of the script that the recipe names; a GPU or the Hub is not needed to tell."""
    script = re.search(r"examples/(train_\w+)\.py", recipe.read_text()).group(1)
    spec = importlib.util.spec_from_file_location(script, EXAMPLES / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen = {}

    def keep(*types, **defaults):
        seen["types"] = types
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "parse_arguments", keep)
    with pytest.raises(KeyboardInterrupt):
        module.main()
    values = yaml.safe_load(recipe.read_text())
    left = dict(values)
    for kind in seen["types"]:
        mine = {field.name: left.pop(field.name) for field in dataclasses.fields(kind) if field.name in left}
        if kind is AdaFlashTrainingArguments:
            mine |= {"bf16": False, "use_cpu": True, "report_to": "none"}
        assert kind(**mine)
    assert left == {}
