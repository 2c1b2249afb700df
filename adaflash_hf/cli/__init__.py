"""The `adaflash` command. Each subcommand is a module with `main(argv)`, imported only when it is called."""

import importlib
import sys

from ..errors import AdaFlashError
from .arguments import expand_config


# Name -> (module with `main(argv)`, one line of help).
COMMANDS = {
    "train": ("adaflash_hf.cli.train", "train a drafter and its length head for a target"),
    "prompts": ("adaflash_hf.cli.prompts", "let the target write prompts to train on"),
    "rollout": ("adaflash_hf.cli.rollout", "write training text with the newest drafter, beside `train`"),
    "bench": ("adaflash_hf.evaluation.benchmark", "measure accepted length and speed against plain `generate`"),
    "convert": ("adaflash_hf.cli.convert", "convert a drafter to the layout of another implementation"),
    "card": ("adaflash_hf.cli.card", "write a drafter's model card, with measured results"),
    "generate": ("adaflash_hf.cli.generate", "chat with a target in the terminal, with its drafter"),
}


def usage() -> str:
    """The text of `adaflash --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: adaflash COMMAND [options]",
            "",
            "Speculative decoding with AdaFlash drafters: faster text from a language model (the target), and the",
            "same text. A small drafter proposes several tokens at a time; the target checks them in one pass.",
            "",
            "commands:",
            *lines,
            "",
            "`adaflash COMMAND --help` explains a command. Every command takes `--config FILE.yaml`, whose keys are",
            "the long options; options on the command line win over it.",
            "",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status. Errors of the package, and files that aren't there, become one
    line without a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        sys.stderr.write(f"adaflash: unknown command {name!r}: use one of {', '.join(COMMANDS)}.\n")
        return 2
    try:
        importlib.import_module(COMMANDS[name][0]).main(expand_config(rest))
    except AdaFlashError as error:
        sys.stderr.write(f"adaflash {name}: {error}\n")
        return 1
    except OSError as error:  # a folder or repo that isn't there; transformers adds lines of advice
        sys.stderr.write(f"adaflash {name}: {str(error).splitlines()[0]}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
