"""Cards, pushing and loading against a hub on loopback, remote code without the package, `custom_generate`."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import Hub
from tiny import make_drafter, make_target
from tiny_tokenizer import save_target
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import adaflash_hf
from adaflash_hf import AdaFlashDrafter, AdaFlashValueError, AdaptiveLengthHead, collect_statistics
from adaflash_hf.cards import CardDetails


ROOT = Path(__file__).parent.parent
CARDS = ROOT / "hub_cards"
RESULTS = {
    "tau": {"chat": 1.5, "math": 2.0},
    "command": "adaflash bench --drafter x",
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "settings": "Greedy, 64 new tokens.",
}
CODE = [
    "cards.py",
    "configuration_adaflash.py",
    "errors.py",
    "hub.py",
    "modeling_adaflash.py",
    "modeling_length_head.py",
]


def run(script: str, *arguments, **environment) -> dict:
    """What a script of this folder prints after RESULT."""
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=environment.pop("cwd", ROOT),
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout[result.stdout.index("RESULT ") + 7 :])


def metadata(text: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL).group(1))


def snippets(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


# --- pushing and loading --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """The hub after `hub_client.py` ran against it, and what that found."""
    with Hub() as hub:
        folder = tmp_path_factory.mktemp("client")
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "hf_test"}
        yield hub, run("hub_client.py", folder, **environment), environment


@pytest.mark.parametrize(
    "step",
    [
        "drafter",
        "auto",
        "second",
        "first_by_revision",
        "second_card",
        "sharded",
        "main_untouched",
        "sharded_over_whole",
        "head",
        "subfolder",
        "own_subfolder",
        "converted",
    ],
)
def test_push_and_load(pushed, step):
    assert pushed[1][step] is True


def test_what_was_pushed(pushed):
    hub, found, _ = pushed
    assert hub.unknown == []
    assert found["commit"].startswith(f"{hub.url}/org/drafter/commit/")
    assert found["details"] == "A hundred words."
    assert "org/nothing" in found["missing"]
    shards = [name for name in hub.files("org/drafter", "sharded") if name.endswith(".safetensors")]
    assert len(shards) > 1 and "model.safetensors" not in hub.files("org/drafter", "sharded")
    assert "model.safetensors" not in hub.files("org/drafter")
    assert hub.files("org/drafter")["inner/model.safetensors"] == b"other"
    assert sorted(name for name in hub.files("org/drafter") if name.endswith(".py")) == CODE

    card = metadata(found["card"])
    assert card["base_model"] == "tiny/target" and card["license"] == "apache-2.0"
    assert {"adaflash", "dflash", "speculative-decoding"} <= set(card["tags"])
    assert 'AdaFlashDrafter.from_pretrained("org/drafter"' in found["card"]
    head = metadata(found["head_card"])
    assert head["base_model"] == "org/target" and "length-head" in head["tags"]
    assert 'AdaFlashDrafter.from_pretrained("org/drafter")' in found["head_card"]
    assert 'AdaptiveLengthHead.from_pretrained("org/head"' in found["head_card"]


def test_hub_cards_are_what_would_be_pushed(pushed):
    repo = "hub_cards/SmolLM2-135M-Instruct-AdaFlash"
    # `push_to_hub` sends what it can make; the card's picture goes with `hf upload` of the folder.
    kept = {path.name: path.read_bytes() for path in (ROOT / repo).iterdir() if path.suffix != ".png"}
    there = pushed[0].files(repo)
    assert kept.keys() == there.keys()
    # If the code differs: `adaflash card hub_cards/SmolLM2-135M-Instruct-AdaFlash` brings the folder up to date.
    assert [name for name in kept if kept[name] != there[name]] == []


# --- cards ----------------------------------------------------------------------------------------------------------


def test_card_metadata(tmp_path):
    drafter = make_drafter(head="survival", draft_vocab_size=16, target_model="org/target")
    drafter.card = CardDetails(
        repo_id="org/drafter",
        license="mit",
        language=["en", "ko"],
        datasets=["org/words"],
        training_data="Ten words.",
        chat_template_kwargs={"enable_thinking": False},
        results=RESULTS,
        notes="Small.",
    )
    drafter.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert metadata(text) == {
        "base_model": "org/target",
        "datasets": ["org/words"],
        "language": ["en", "ko"],
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["adaflash", "dflash", "speculative-decoding"],
        "model-index": [
            {
                "name": "drafter",
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"name": domain, "type": domain},
                        "metrics": [{"type": "accepted_length", "value": tau, "name": "accepted length (tau)"}],
                    }
                    for domain, tau in RESULTS["tau"].items()
                ],
            }
        ],
    }
    for line in (
        "| block size | 5 (anchor included; 4 drafted tokens) |",
        "| tapped target layers | 0, 2 (0-based outputs) |",
        "| mask token | id 1 |",
        "| length head | `survival` |",
        "| draft vocabulary | 16 rows of the target's head |",
        "| chat template | `enable_thinking=False` |",
        "| language | en, ko |",
        "| chat | 1.50 |",
        "| mean | 1.75 |",
        "    adaflash bench --drafter x",
        "Versions: torch 2.13.0, transformers 5.24.0.",
        "Ten words.",
        "Small.",
    ):
        assert f"\n{line}\n" in text, line
    assert AdaFlashDrafter.from_pretrained(tmp_path).card == drafter.card


def test_card_says_what_is_unknown(tmp_path):
    make_drafter(target_model=None).save_pretrained(tmp_path / "d")
    text = (tmp_path / "d" / "README.md").read_text()
    assert "base_model" not in metadata(text) and "model-index" not in metadata(text)
    assert "Not measured." in text and "Not recorded." in text and "None" not in text
    # A folder on this machine is no repo id.
    make_drafter(target_model="/data/target").save_pretrained(tmp_path / "e")
    assert "base_model" not in metadata((tmp_path / "e" / "README.md").read_text())


@pytest.mark.parametrize(
    ("results", "key"),
    [({"tau": {"a": 1.0}}, "command"), (RESULTS | {"tau": {"a": 0.5}}, "tau"), (RESULTS | {"x": 1}, "x")],
)
def test_card_refuses_incomplete_results(results, key):
    with pytest.raises(AdaFlashValueError, match=key):
        CardDetails(results=results)


def test_card_refuses_unknown_details(tmp_path):
    make_drafter().save_pretrained(tmp_path)
    (tmp_path / "card.json").write_text('{"licence": "mit"}')
    with pytest.raises(AdaFlashValueError, match="licence"):
        AdaFlashDrafter.from_pretrained(tmp_path)


def test_card_snippets_run_as_printed(tmp_path, capsys):
    save_target(tmp_path / "target", make_target())
    drafter = make_drafter(head="survival", target_model=str(tmp_path / "target"))
    drafter.card.chat_template_kwargs = {"enable_thinking": False}
    drafter.save_pretrained(tmp_path / "drafter")
    drafter.length_head.card = CardDetails(drafter=str(tmp_path / "drafter"))
    drafter.length_head.save_pretrained(tmp_path / "head")
    own, bare = snippets((tmp_path / "drafter" / "README.md").read_text())
    (head,) = snippets((tmp_path / "head" / "README.md").read_text())
    with collect_statistics() as calls:
        exec(own, {})
        assert len(calls) == 1
        exec(bare, {})
        assert len(calls) == 1  # transformers' own loop
    assert len(capsys.readouterr().out.split()) > 64
    namespace: dict = {}
    exec(head, namespace)
    assert isinstance(namespace["drafter"].length_head, AdaptiveLengthHead)


def test_example(tmp_path, monkeypatch, capsys):
    """`examples/load_from_hub.py` with folders in place of repo ids."""
    save_target(tmp_path / "target", make_target())
    drafter = make_drafter()
    drafter.card.chat_template_kwargs = {"enable_thinking": False}
    drafter.save_pretrained(tmp_path / "drafter")
    options = ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--max_new_tokens", "9"]
    monkeypatch.setattr(sys, "argv", ["load_from_hub.py", *options, "--prompt", "w1 w2"])
    runpy.run_path(str(ROOT / "examples" / "load_from_hub.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "template flags: {'enable_thinking': False}" in out and "accepted length (tau): " in out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--chat_template_kwargs", '{"thinking": true}'])
    runpy.run_path(str(ROOT / "examples" / "load_from_hub.py"), run_name="__main__")
    assert "template flags: {'thinking': True}" in capsys.readouterr().out


# --- remote code ----------------------------------------------------------------------------------------------------


def test_without_the_package(tmp_path, pushed):
    make_target().save_pretrained(tmp_path / "target")
    drafter = make_drafter(head="survival", draft_vocab_size=16)
    drafter.generation_config.survival_threshold = 0.25
    drafter.card.training_data = "A hundred words."
    drafter.save_pretrained(tmp_path / "drafter")
    drafter.length_head.save_pretrained(tmp_path / "head")
    found = run(
        "remote_code.py",
        *(tmp_path / "target", tmp_path / "drafter", tmp_path / "head"),
        *("org/drafter", "org/head"),
        cwd=tmp_path,
        **pushed[2] | {"PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")},
    )
    assert len(found) == 2
    for source in found:
        assert source.pop("drafts") > 1
        assert source == {
            "same": True,
            "tokens": 24,
            "module": "transformers_modules",
            "policy": "AdaFlashGenerationConfig",
            "threshold": 0.25,
            "head": True,
            "training_data": "A hundred words.",
            "head_alone": "AdaptiveLengthHead",
            "package": False,
        }


def test_copied_code_beside_the_package(tmp_path):
    """`trust_remote_code=True` without importing the package, where it is installed: its own class is loaded."""
    drafter = make_drafter(head="length")
    drafter.save_pretrained(tmp_path)
    copied = get_class_from_dynamic_module("modeling_adaflash.AdaFlashDrafter", str(tmp_path))
    config = get_class_from_dynamic_module("configuration_adaflash.AdaFlashConfig", str(tmp_path))
    assert not issubclass(copied, AdaFlashDrafter)
    loaded = copied.from_pretrained(tmp_path, config=config.from_pretrained(tmp_path))
    assert type(loaded) is AdaFlashDrafter and type(loaded.config) is type(drafter.config)
    assert torch.equal(loaded.length_head.down.weight, drafter.length_head.down.weight)


def test_saved_code_is_the_packages_own(tmp_path):
    make_drafter().save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.py")) == CODE
    for name in CODE:
        assert (tmp_path / name).read_bytes() == (Path(adaflash_hf.__file__).parent / name).read_bytes()
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_adaflash.AdaFlashConfig",
        "AutoModel": "modeling_adaflash.AdaFlashDrafter",
    }


# --- custom_generate ------------------------------------------------------------------------------------------------


def test_custom_generate():
    target, drafter = make_target(), make_drafter()
    prompt = torch.tensor([[5, 9, 2, 7]])
    options = {"max_new_tokens": 20, "do_sample": False}
    repo = {"custom_generate": str(CARDS / "adaflash-generate"), "trust_remote_code": True}
    plain = target.generate(prompt, **options)
    with collect_statistics() as calls:
        drafted = target.generate(prompt, **repo, assistant_model=drafter, **options)
    assert torch.equal(plain, drafted)
    assert len(calls) == 1 and sum(calls[0].accepted_lengths[0]) == 19
    output = target.generate(prompt, **repo, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert output.statistics.accepted_lengths == calls[0].accepted_lengths
    with pytest.raises(ValueError, match="AdaFlashDrafter.from_pretrained"):
        target.generate(prompt, **repo, **options)


def test_custom_generate_card():
    text = (CARDS / "adaflash-generate" / "README.md").read_text()
    assert {"custom_generate", "adaflash"} <= set(metadata(text)["tags"])
    requirement = (CARDS / "adaflash-generate" / "custom_generate" / "requirements.txt").read_text().strip()
    assert requirement == f"adaflash_hf>={adaflash_hf.__version__}"
    assert len(snippets(text)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("repo", ["SmolLM2-135M-Instruct-AdaFlash", "adaflash-generate"])
def test_hub_card_snippets(repo, monkeypatch, capsys):
    """The printed snippets, with the target taken from the wheel when the Hub can't be reached."""
    from adaflash_hf.default_target import DEFAULT_TARGET, default_target_path

    monkeypatch.chdir(ROOT)
    for snippet in snippets((CARDS / repo / "README.md").read_text()):
        assert DEFAULT_TARGET in snippet
        exec(snippet.replace(DEFAULT_TARGET, str(default_target_path("wheel"))), {})
        assert len(capsys.readouterr().out) > 40
