"""Command-line arguments: dataclasses, as in transformers, with values from a YAML file under the command line."""

import argparse
import json
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from ..errors import AdaFlashValueError


def make_parser(command: str, description: str, dataclasses, positionals: dict[str, str] | None = None):
    """An HfArgumentParser for `adaflash COMMAND`.

    Args:
        command: the subcommand's name.
        description: what `--help` says first.
        dataclasses: one or more dataclasses, whose fields become options.
        positionals: name -> help of the arguments without a name; they come back as a namespace, last.
    """
    parser = HfArgumentParser(
        dataclasses,
        prog=f"adaflash {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Options can stand in a YAML file: --config FILE.yaml (keys are the long options).",
        allow_abbrev=False,
    )
    for name, text in (positionals or {}).items():
        parser.add_argument(name, help=text)
    return parser


def parse(parser: HfArgumentParser, argv: list[str]) -> tuple:
    """The parsed dataclasses, and the namespace of positionals if there are any.

    Raises:
        AdaFlashValueError: for options that the command doesn't have.
    """
    *parsed, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        raise AdaFlashValueError(f"Unknown options {unknown}: `{parser.prog} --help` lists what there is.")
    return tuple(parsed)


def expand_config(argv: list[str]) -> list[str]:
    """Replaces `--config FILE` by the options in the file, placed so that the command line's own options win.

    Raises:
        AdaFlashValueError: for a file that is missing or isn't a mapping of option names to values.
    """
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    if at + 1 == len(argv):
        raise AdaFlashValueError("`--config` needs a file: --config FILE.yaml.")
    path, rest = Path(argv[at + 1]), argv[:at] + argv[at + 2 :]
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise AdaFlashValueError(f"`--config` {path} can't be read ({error}): give a YAML file.") from error
    if not isinstance(values, dict):
        raise AdaFlashValueError(f"`--config` {path} isn't a mapping: write lines like `max_steps: 200`.")
    options = []
    for key, value in values.items():
        if isinstance(value, list):
            options += [f"--{key}", *map(str, value)]
        elif value is not None:
            options.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    first = next((i for i, argument in enumerate(rest) if argument.startswith("-")), len(rest))
    return rest[:first] + options + rest[first:]
