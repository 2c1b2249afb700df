"""The `adaflash` command."""

import json
import shutil
import subprocess
import sys
import tomllib
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_drafter, make_target
from tiny_tokenizer import make_tokenizer, save_target

from adaflash_hf import AdaFlashDrafter, cli
from adaflash_hf.checkpoints import save_drafter
from adaflash_hf.cli import generate as chat
from adaflash_hf.cli.arguments import expand_config
from adaflash_hf.training.data import FeatureShards


ROOT = Path(__file__).parent.parent
OWN = ["train", "prompts", "rollout", "bench", "convert", "card", "generate"]


def test_overview(capsys):
    assert cli.main(["--help"]) == 0 and cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)
    assert max(map(len, out.splitlines())) < 120


def test_commands_are_imported_when_called():
    code = (
        "import sys; from adaflash_hf import cli; "
        "print([m for m, _ in cli.COMMANDS.values() if m in sys.modules]); print(sorted(cli.COMMANDS))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["[]", "['bench', 'card', 'convert', 'generate', 'prompts', 'rollout', 'train']"]
    assert cli.COMMANDS["bench"][0] == "adaflash_hf.evaluation.benchmark"


@pytest.mark.parametrize("command", OWN)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert f"usage: adaflash {command}" in out
    assert f"  adaflash {command} " in out or f"| adaflash {command} " in out  # an example
    assert "--config FILE.yaml" in out


def test_unknown_command(capsys):
    assert cli.main(["chat"]) == 2
    assert "use one of train, prompts, rollout, bench, convert, card, generate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["convert", "./missing", "new", "--to", "zlab"], "./missing is no folder"),
        (["convert", "{d}", "{d}/new", "--to", "zlab", "--form", "x"], "Unknown options ['--form', 'x']"),
        (["card", "missing"], "missing has no config.json"),
        (["card", "{d}", "--results", "missing.json"], "`results` names a file"),
        (["card", "{d}", "--chat_template_kwargs", "x"], "`chat_template_kwargs` isn't JSON"),
        (["convert", "{d}", "{d}", "--to", "zlab"], "isn't empty"),
        (["convert", "{d}", "{d}/new", "--to", "zlab"], "length_head"),
        (["convert", "--config", "missing.yaml"], "missing.yaml can't be read"),
        (["convert", "--config"], "--config FILE.yaml"),
        (["generate", "--drafter", "{d}", "--dtype", "int8"], "`dtype` is 'int8'"),
        (["generate", "--drafter", "missing", "--chat_template_kwargs", "[1]"], "`chat_template_kwargs` is [1]"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, argv, message):
    make_drafter(head="survival").save_pretrained(tmp_path / "d")
    capsys.readouterr()
    assert cli.main([argument.format(d=tmp_path / "d") for argument in argv]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"adaflash {argv[0]}: ") and message in error


# --- YAML -----------------------------------------------------------------------------------------------------------


def test_config_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("max_steps: 3\nlr: 1.0e-3\nlanguage: [en, ko]\nflags: {a: 1}\nplain: true\nnothing:\n")
    assert expand_config(["src", "--config", str(file), "--max_steps", "5"]) == [
        *("src", "--max_steps=3", "--lr=0.001", "--language", "en", "ko"),
        *('--flags={"a": 1}', "--plain=True", "--max_steps", "5"),
    ]
    file.write_text("- a\n")
    with pytest.raises(ValueError, match="isn't a mapping"):
        expand_config(["--config", str(file)])


def test_config_file_with_a_wrong_key(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text("to: zlab\nrevison: main\n")
    assert cli.main(["convert", "a", "b", "--config", str(file)]) == 1
    assert "revison" in capsys.readouterr().err


# --- convert and card -----------------------------------------------------------------------------------------------


def test_convert(tmp_path):
    drafter = make_drafter(head="length")
    drafter.save_pretrained(tmp_path / "a")
    (tmp_path / "c.yaml").write_text("to: speculators\ninclude_length_head: false\n")
    places = str(tmp_path / "a"), str(tmp_path / "b")
    assert cli.main(["convert", *places, "--config", str(tmp_path / "c.yaml")]) == 0
    assert json.loads((tmp_path / "b" / "config.json").read_text())["speculators_model_type"] == "dflash"
    # The command line wins over the file.
    places = str(tmp_path / "a"), str(tmp_path / "c")
    argv = ["convert", *places, "--config", str(tmp_path / "c.yaml"), "--to", "zlab", "--include_length_head", "true"]
    assert cli.main(argv) == 0
    loaded = AdaFlashDrafter.from_pretrained(tmp_path / "c")
    assert torch.equal(loaded.length_head.down.weight, drafter.length_head.down.weight)


def test_card(tmp_path):
    folder = tmp_path / "d"
    make_drafter(target_model="org/target").save_pretrained(folder)
    weights = (folder / "model.safetensors").read_bytes()
    results = {"tau": {"chat": 1.25}, "command": "c", "versions": {"torch": "2"}, "settings": "Greedy."}
    (tmp_path / "results.json").write_text(json.dumps(results))
    (tmp_path / "training.md").write_text("Ten\nwords.\n")
    argv = ["--results", str(tmp_path / "results.json"), "--training_data", f"@{tmp_path / 'training.md'}"]
    assert cli.main(["card", str(folder), *argv, "--language", "en", "ko", "--repo_id", "org/d"]) == 0
    text = (folder / "README.md").read_text()
    assert "| chat | 1.25 |" in text and "Ten\nwords." in text and 'from_pretrained("org/d"' in text
    # A second call keeps what it isn't told, and renders the same from the same.
    assert cli.main(["card", str(folder), "--license", "mit"]) == 0
    again = (folder / "README.md").read_text()
    assert again.replace("license: mit\n", "") == text and "license: mit" in again
    assert (folder / "model.safetensors").read_bytes() == weights


def test_card_from_a_benchmark(tmp_path, capsys):
    make_drafter().save_pretrained(tmp_path / "d")
    record = {"method": "budget", "temperature": 0.0, "domain": "chat", "concurrency": 8, "tau": 1.236}
    others = [{"concurrency": 1, "tau": 9.0}, {"method": "plain", "tau": 9.0}, {"temperature": 1.0, "tau": 9.0}]
    measured = {
        "records": [record, record | {"domain": "math", "tau": 2.0}, *(record | other for other in others)],
        "environment": {
            "command": "adaflash bench --drafter d",
            "torch": "2.13.0",
            "transformers": "5.24.0",
            "dtype": "torch.float32",
            "device": "a CPU",
            "arguments": {"max_new_tokens": 48},
        },
    }
    (tmp_path / "results.json").write_text(json.dumps(measured))
    argv = ["card", str(tmp_path / "d"), "--results", str(tmp_path / "results.json")]
    assert cli.main(argv) == 0
    text = (tmp_path / "d" / "README.md").read_text()
    for part in ("| chat | 1.24 |", "| math | 2.00 |", "    adaflash bench --drafter d\n", "float32 on a CPU, 48 new"):
        assert part in text
    assert "batch of 8" in text and "9.00" not in text
    assert cli.main([*argv, "--method", "head"]) == 1
    assert "no greedy records" in capsys.readouterr().err


def test_card_of_another_layout(tmp_path, capsys):
    save_drafter(make_drafter(), tmp_path, "zlab")
    assert cli.main(["card", str(tmp_path)]) == 1
    assert "adaflash convert" in capsys.readouterr().err


def test_installed_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"adaflash": "adaflash_hf.cli:main"}


# --- generate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path):
    save_target(tmp_path / "target", make_target())
    make_drafter(target_model=str(tmp_path / "target")).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_generate_from_piped_messages(models, monkeypatch, capsys):
    argv = ["generate", "--drafter", str(models), "--max_new_tokens", "12", "--system", "w1 w2"]
    answers = []
    for extra in ([], ["--plain"]):
        monkeypatch.setattr(sys, "stdin", StringIO("w3 w4\nw5\n\nw6\n"))
        capsys.readouterr()
        assert cli.main([*argv, *extra]) == 0
        out = capsys.readouterr().out
        assert "> " not in out and "\033" not in out
        figures = [line for line in out.splitlines() if line.startswith("[")]
        assert len(figures) == 2  # an empty line ends it
        assert all(line.startswith("[12 tokens, ") and "tokens/s, accepted length " in line for line in figures)
        if extra:
            assert all(line.endswith("accepted length 1.00]") for line in figures)
        answers.append([line for line in out.splitlines() if not line.startswith("[")])
    assert answers[0] == answers[1] and len(answers[0]) == 2


def test_template_flags_are_those_of_the_card(models, tmp_path, monkeypatch, capsys):
    """The tiny template says `thinking` where the flag is set."""
    given = []
    answer = chat.answer
    monkeypatch.setattr(chat, "answer", lambda *args: given.append(args[4]) or answer(*args))
    for flags in (None, {"thinking": True}):
        drafter = AdaFlashDrafter.from_pretrained(models)
        drafter.card.chat_template_kwargs = flags
        drafter.save_pretrained(models)
        for options in ([], ["--chat_template_kwargs", "{}"], ["--plain"]):
            monkeypatch.setattr(sys, "stdin", StringIO("w3\n"))
            assert cli.main(["generate", "--drafter", str(models), "--max_new_tokens", "2", *options]) == 0
    assert given == [{}, {}, {}, {"thinking": True}, {}, {"thinking": True}]


def test_generate_samples(models, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", StringIO("w3\n"))
    assert cli.main(["generate", "--drafter", str(models), "--max_new_tokens", "5", "--temperature", "0.7"]) == 0
    assert "[5 tokens" in capsys.readouterr().out


def test_live_figures_on_a_terminal(monkeypatch):
    class Terminal(StringIO):
        def isatty(self):
            return True

    target, tokenizer = make_target(), make_tokenizer()
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    streamer = chat.LiveStreamer(tokenizer, target)
    output = target.generate(
        torch.tensor([[5, 6, 7]]), assistant_model=make_drafter(), streamer=streamer, max_new_tokens=8, do_sample=False
    )
    written = terminal.getvalue()
    assert written.count("tokens/s, accepted length") >= 4
    # Without what is put below and taken away again, the text alone is left.
    text = "".join(part.split("\0338")[-1] for part in written.replace("\033D\033M", "").split("\0337"))
    assert text.replace("\033[J", "").strip() == tokenizer.decode(output[0, 3:], skip_special_tokens=True)
    assert streamer.tokens == 8 and streamer.passes <= 8
    assert not target.get_decoder()._forward_hooks


def test_generate_needs_a_target(tmp_path, capsys):
    make_drafter(target_model=None).save_pretrained(tmp_path)
    assert cli.main(["generate", "--drafter", str(tmp_path)]) == 1
    assert "pass `--target`" in capsys.readouterr().err


# --- train ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A settings file of a tiny run in `out`, to be changed by options."""
    from adaflash_hf.training import setup

    save_target(tmp_path / "target", make_target())
    monkeypatch.setattr(setup, "training_prompts", lambda domain, count: ["w1 w2", "w3 w4 w5", "w6"][:count])
    (tmp_path / "c.yaml").write_text(
        f"target: {tmp_path / 'target'}\noutput_dir: {tmp_path / 'out'}\nprompts_per_domain: 2\n"
        "rollout_max_new_tokens: 8\nnum_taps: 1\nnum_layers: 1\nmask_token_id: 1\ndraft_vocab_size: 16\n"
        "max_steps: 2\nblock_size: 4\n"
        "anchors_per_sequence: 4\nper_device_train_batch_size: 2\nuse_cpu: true\nbottleneck_size: 8\n"
    )
    return ["train", "--config", str(tmp_path / "c.yaml"), "--disable_tqdm", "true"]


def test_train(tmp_path, training):
    assert cli.main(training) == 0
    drafter = AdaFlashDrafter.from_pretrained(tmp_path / "out" / "drafter")
    assert drafter.config.target_layer_ids == [2] and drafter.length_head.config.kind == "survival"
    assert (tmp_path / "out" / "drafter" / "README.md").is_file()
    weights = load_file(tmp_path / "out" / "drafter" / "model.safetensors")
    assert weights["draft_token_ids"].shape == (16,)
    assert cli.main(training) == 0  # repeated: nothing more is learned
    again = load_file(tmp_path / "out" / "drafter" / "model.safetensors")
    assert again.keys() == weights.keys() and torch.equal(again["fc.weight"], weights["fc.weight"])
    # Killed before its first checkpoint, a run begins as it began, though the features are there already.
    for path in (tmp_path / "out").glob("checkpoint-*"):
        shutil.rmtree(path)
    assert cli.main(training) == 0
    again = load_file(tmp_path / "out" / "drafter" / "model.safetensors")
    assert torch.equal(again["fc.weight"], weights["fc.weight"])


def test_training_is_recorded_in_the_card(tmp_path, training, caplog, capsys):
    assert cli.main([*training, "--chat_template_kwargs", '{"thinking": true}']) == 0
    folder = tmp_path / "out" / "drafter"
    drafter = AdaFlashDrafter.from_pretrained(folder)
    assert drafter.card.chat_template_kwargs == {"thinking": True}
    assert drafter.card.training_data.startswith("2 steps of 2 sequences, mode `offline`")
    drafter.card.results = {"tau": {"chat": 2.0}, "command": "c", "versions": {}, "settings": "s"}
    drafter.card.repo_id = "me/first"
    drafter.save_pretrained(folder)
    assert cli.main([*training, "--drafter", str(folder), "--output_dir", str(tmp_path / "on")]) == 0
    assert 'trained with `chat_template_kwargs` {"thinking": true} and goes on with {}' in caplog.text
    card = AdaFlashDrafter.from_pretrained(tmp_path / "on" / "drafter").card
    assert card.results == {} and card.repo_id is None and card.chat_template_kwargs == {}
    assert card.training_data.startswith(drafter.card.training_data + "\n\nThen: 2 steps of 2 sequences")
    # The text of another run brings its flags along.
    features = ["--features", str(tmp_path / "out" / "features"), "--output_dir", str(tmp_path / "third")]
    assert cli.main([*training, *features]) == 0
    third = AdaFlashDrafter.from_pretrained(tmp_path / "third" / "drafter")
    assert third.card.chat_template_kwargs == {"thinking": True}
    assert cli.main([*training, *features, "--chat_template_kwargs", '{"thinking": false}']) == 1
    assert 'was made with {"thinking": true}' in capsys.readouterr().err
    # On-policy, the workers' settings count, which the trainer may not have been told.
    assert cli.main([*training, "--drafter", str(folder), "--mode", "on_policy", "--output_dir", str(tmp_path / "p"),
                     "--steps_per_version", "2", "--sampled_share", "0"]) == 0  # fmt: skip
    text = AdaFlashDrafter.from_pretrained(tmp_path / "p" / "drafter").card.training_data
    assert "mode `on_policy`" in text and "(0% sampled at temperature 1" in text


def test_train_on_the_text_of_another_run(tmp_path, training, capsys):
    assert cli.main(training) == 0
    features = ["--features", str(tmp_path / "out" / "features")]
    assert cli.main([*training, *features, "--alpha", "1", "--output_dir", str(tmp_path / "second")]) == 0
    assert (tmp_path / "second" / "drafter").is_dir() and not (tmp_path / "second" / "features").exists()
    assert cli.main([*training, *features, "--mode", "on_policy"]) == 1
    assert "`features`" in capsys.readouterr().err


def test_train_follows_the_options_of_the_text(tmp_path, training):
    def texts(*options):
        output = tmp_path / "-".join(options)
        assert cli.main([*training, *options, "--output_dir", str(output)]) == 0
        return [ids.tolist() for ids, _ in FeatureShards(output / "features", [2]).token_ids()]

    greedy = texts("--sampled_share", "0")
    assert texts("--sampled_share", "1", "--temperature", "3") != greedy
    flagged = texts("--sampled_share", "0", "--chat_template_kwargs", '{"thinking": true}')
    assert flagged != greedy
