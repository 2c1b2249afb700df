"""`adaflash card FOLDER`."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModel

from ..cards import RESULT_KEYS, CardDetails
from ..chat_template import read_flags
from ..configuration_adaflash import AdaFlashConfig, AdaptiveLengthConfig
from ..errors import AdaFlashValueError
from .arguments import make_parser, parse


DESCRIPTION = f"""\
Writes the model card (README.md) of a drafter or length head in FOLDER, from its configuration, from what earlier
calls recorded (card.json), and from the options. Everything else in FOLDER is brought up to date too, so that it is
what `push_to_hub` or `hf upload` would put on the Hub.

`--results` takes the results.json of `adaflash bench --output`, of which the greedy records of `--method` with the
most prompts are used, or a JSON file with the keys {", ".join(RESULT_KEYS)}:

  {{"tau": {{"chat": 1.3, "math": 1.7}}, "command": "adaflash bench ...", "versions": {{"torch": "2.13.0"}},
   "settings": "Greedy, 64 new tokens."}}

For example:

  adaflash card runs/smollm2/drafter --results results.json --license apache-2.0 --language en \\
      --training_data "1,000 responses of the target to questions, 200,000 tokens."

An option that begins with @ names a file that holds the text."""


@dataclass
class CardArguments:
    results: str | None = field(default=None, metadata={"help": "JSON file of measured results; see above."})
    method: str = field(default="budget", metadata={"help": "Whose records of a benchmark: budget, head or fixed."})
    repo_id: str | None = field(default=None, metadata={"help": "Name on the Hub, which the card's snippets load."})
    base_model: str | None = field(
        default=None, metadata={"help": "Repo id of the target; default: the configuration's `target_model`."}
    )
    drafter: str | None = field(default=None, metadata={"help": "For a length head: repo id of its drafter."})
    license: str | None = field(default=None, metadata={"help": "SPDX name, such as apache-2.0."})
    language: list[str] | None = field(default=None, metadata={"help": "ISO codes of the languages trained on."})
    datasets: list[str] | None = field(default=None, metadata={"help": "Hub ids of the training data."})
    training_data: str | None = field(default=None, metadata={"help": "A paragraph on the training text and run."})
    chat_template_kwargs: str | None = field(
        default=None,
        metadata={"help": "JSON of the flags that the target's chat template got in training; {} means none."},
    )
    notes: str | None = field(default=None, metadata={"help": "A last paragraph: limits, origin of the weights."})


def main(argv: list[str]) -> None:
    parser = make_parser("card", DESCRIPTION, CardArguments, {"folder": "Folder of the drafter or length head."})
    options, places = parse(parser, argv)
    given = {key: _text(key, value) for key, value in vars(options).items() if value is not None}
    method = given.pop("method")
    if "results" in given:
        results = _json("results", _text("results", f"@{given['results']}"))
        given["results"] = benchmark_results(results, method) if "records" in results else results
    if "chat_template_kwargs" in given:
        given["chat_template_kwargs"] = read_flags(given["chat_template_kwargs"])
    folder = Path(places.folder)
    if not (folder / "config.json").is_file():
        raise AdaFlashValueError(f"{folder} has no config.json: name the folder of a drafter or length head.")
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in (AdaFlashConfig.model_type, AdaptiveLengthConfig.model_type):
        raise AdaFlashValueError(f"{folder} holds a {kind!r} model: `adaflash convert` it to the `adaflash` layout.")
    model = AutoModel.from_pretrained(folder)
    model.card = CardDetails(**(dataclasses.asdict(model.card) | given))
    model.save_pretrained(folder)


def benchmark_results(measured: dict, method: str) -> dict:
    """What a card says of the results of `adaflash bench`: the greedy records of `method` with the most prompts.

    Raises:
        AdaFlashValueError: when there are none.
    """
    records = [r for r in measured["records"] if r["method"] == method and r["temperature"] == 0]
    if not records:
        raise AdaFlashValueError(
            f"`results` has no greedy records of `method` {method!r}: measure it, or name another."
        )
    prompts = max(record["concurrency"] for record in records)
    environment = measured["environment"]
    batches = environment["arguments"].get("batches", 1)
    shown = f"one batch of {prompts}" if batches == 1 else f"{batches} batches of {prompts}"
    return {
        "tau": {r["domain"]: round(r["tau"], 2) for r in records if r["concurrency"] == prompts},
        "command": environment["command"],
        "versions": {package: environment[package] for package in ("torch", "transformers")},
        "settings": f"Greedy, {environment['dtype'].removeprefix('torch.')} on {environment['device']}, "
        f"{environment['arguments']['max_new_tokens']} new tokens, length policy `{method}`, {shown} "
        "held-out prompts a domain.",
    }


def _text(key: str, value):
    if not (isinstance(value, str) and value.startswith("@")):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise AdaFlashValueError(f"`{key}` names a file that can't be read ({error}): check its path.") from error


def _json(key: str, text: str) -> dict:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise AdaFlashValueError(f"`{key}` isn't JSON ({error}): see `adaflash card --help`.") from error
    if not isinstance(value, dict):
        raise AdaFlashValueError(f"`{key}` is {value!r}: give a JSON object; see `adaflash card --help`.")
    return value
