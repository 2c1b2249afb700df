"""Every command and snippet of README.md is run by a test or by CI."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from tiny import make_drafter, make_target
from tiny_tokenizer import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from adaflash_hf import AdaFlashDrafter, cli


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
EXAMPLE_TESTS = (ROOT / "tests" / "test_examples.py").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    """Lines of the bash blocks without comments, continuations joined, and commands that stand in the text."""
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in lines if not line.lstrip().startswith("#")]
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    inline = re.findall(r"`((?:OMP_NUM_THREADS=\d\s+)?(?:make|adaflash|python|\w+\.py)\s[^`]*)`", prose)
    return list(dict.fromkeys([line for line in lines if line] + [" ".join(text.split()) for text in inline]))


# Serving engines, which need a GPU and environments of their own.
OTHERS = ("vllm serve ", "python -m sglang.launch_server ")


class Parsed(Exception):
    pass


@pytest.fixture
def parsed(monkeypatch):
    """Stops a subcommand once its arguments were understood."""
    original = HfArgumentParser.parse_args_into_dataclasses

    def parse(self, *args, **kwargs):
        original(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(HfArgumentParser, "parse_args_into_dataclasses", parse)


def test_commands_are_found():
    assert {"make demo", "make test"} <= set(commands())


@pytest.mark.parametrize("command", commands())
def test_command(command, parsed, tmp_path, monkeypatch):
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    name = words[0]
    if command.startswith(OTHERS):
        assert "DFLASH" in command or '"dflash"' in command
        return
    if name == "make":
        # CI runs it, or the Makefile's recipe for it is an example that a test runs.
        recipe = re.search(rf"^{words[1]}:.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
        assert recipe is not None
        scripts = re.findall(r"examples/(\w+\.py)", recipe.group(1))
        formats = words[1] == "style" and "ruff format" in recipe.group(1) and "make quality" in CI
        assert command in CI or formats or (scripts and all(f'run("{s}"' in EXAMPLE_TESTS for s in scripts))
    elif name == "pip":
        # Installed by the Makefile in CI: the extras, and the data packages that go without their dependencies.
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for word in words[2:]:
            if match := re.fullmatch(r"\.\[(.*)\]", word):
                assert set(match.group(1).split(",")) <= extras.keys()
            elif not word.startswith("-"):
                assert word in MAKEFILE
    elif name == "adaflash":
        if words[1] in ("rollout", "bench") or "COMMAND" in words or len(words) == 1:
            assert len(words) < 2 or words[1] in {*cli.COMMANDS, "COMMAND"}
            return
        monkeypatch.chdir(ROOT)
        with pytest.raises((Parsed, SystemExit)) as caught:
            cli.main(words[1:])
        assert caught.type is Parsed or caught.value.code == 0  # --help
    else:
        script = next((Path(word) for word in words if word.endswith(".py")), Path("no script"))
        if script.parts[0] == "tests":  # pytest runs what it prints
            assert (ROOT / script).is_file()
            return
        script = script.name
        assert (ROOT / "examples" / script).is_file()
        assert f'run("{script}"' in EXAMPLE_TESTS or 'EXAMPLES.glob("*.py")' in EXAMPLE_TESTS


def test_python_snippets(monkeypatch):
    """The Python blocks, one after the other in one namespace, on tiny models and without a GPU."""
    target, tokenizer, drafter = make_target(), make_tokenizer(), make_drafter(head="survival")
    for owner, model in ((AutoModelForCausalLM, target), (AutoTokenizer, tokenizer), (AdaFlashDrafter, drafter)):
        monkeypatch.setattr(owner, "from_pretrained", lambda *args, model=model, **kwargs: model)
    namespace: dict = {}
    for block in blocks("python"):
        exec(block.replace('"cuda"', '"cpu"'), namespace)
    assert namespace["output"].shape[0] == 2 and torch.is_tensor(namespace["output"])
