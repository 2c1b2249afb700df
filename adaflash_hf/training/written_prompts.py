"""Training prompts that the target writes itself, where nobody collected any, or too few (Magpie, arXiv 2406.08464).

A chat model has seen users' messages in its own training. Given its template up to the place where the user speaks, it
writes one; given the beginning of one, it goes on.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import is_progress_bar_enabled

from ..errors import AdaFlashValueError
from ..generation.rows import left_padded
from ..hub import replace_text
from .prompts import CODE_INSTRUCTION, DOMAINS, LIST_IMPORT, evaluation_wordings, shares_wording
from .rollouts import Sampling, end_tokens


# Domain -> how messages begin: with anything, as word problems do, as HumanEval's problems do. Four draws of ten are
# free, since a target writes of mathematics and programs there too.
OPENINGS = {
    "chat": ("",),
    "math": tuple(
        "James|Mary|John|Linda|Sarah|David|Emma|Tom|Anna|Carlos|Lily|Sophia|Ben|Kate|Jane|Alex|Sam|Rachel|Laura|Grace|"
        "There are|If|In a|The|At the|Every day,|Two|A".split("|")
    ),
    "code": tuple(CODE_INSTRUCTION + start + "def " for start in ("", "\n\n", LIST_IMPORT)),
}
_SHARES = (4, 3, 3)
_DOCSTRING = '"""'


@dataclass
class WrittenPromptArguments:
    """What is written, and where."""

    output_file: str = field(metadata={"help": "JSON Lines file to write, with the column `prompt`."})
    count: int = field(default=3000, metadata={"help": "Prompts to write; those that the file has already count."})
    openings: str | None = field(
        default=None, metadata={"help": "Text file: one beginning of a message per line, drawn evenly."}
    )
    temperature: float = field(default=0.9, metadata={"help": "Of sampling; the higher, the more varied and odd."})
    longest: int = field(default=128, metadata={"help": "Longest message, in tokens; longer ones are dropped."})
    batch_size: int = field(default=32, metadata={"help": "Messages written at a time."})
    seed: int = field(default=0, metadata={"help": "Seed of openings and sampling."})

    def __post_init__(self):
        for key in ("count", "longest", "batch_size"):
            if getattr(self, key) < 1:
                raise AdaFlashValueError(f"`{key}` is {getattr(self, key)}: use 1 or more.")
        if not self.temperature > 0:
            raise AdaFlashValueError(f"`temperature` is {self.temperature}: use a number above 0, or all are alike.")


def write_prompts(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: WrittenPromptArguments
) -> list[str]:
    """Writes the file, batch by batch, going on where an earlier call stopped; returns all its prompts.

    Messages that share wording with an evaluation prompt are dropped, and so are repeats, empty ones and those that
    didn't end.

    Raises:
        AdaFlashValueError: when the template has no place for a user's message, the openings can't be read, or ten
            batches in a row yield nothing.
    """
    path = Path(arguments.output_file)
    openings = _read_openings(arguments.openings)
    before, after = _around_user(tokenizer)
    stops = {*end_tokens(target), *tokenizer.encode(after, add_special_tokens=False)[:1]}
    held_out = evaluation_wordings(*DOMAINS)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done = dict.fromkeys(json.loads(line)["prompt"] for line in lines)
    cuda = [target.device] if target.device.type == "cuda" else []
    barren = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with tqdm(total=arguments.count, initial=len(done), desc="prompts", disable=not is_progress_bar_enabled()) as bar:
        while len(done) < arguments.count:
            rng = random.Random(f"{arguments.seed}-{len(done)}-{barren}")
            starts = _draw(openings, arguments.batch_size, rng)
            with torch.random.fork_rng(devices=cuda):
                torch.manual_seed(rng.getrandbits(63))
                messages = _go_on(target, tokenizer, [before + start for start in starts], stops, arguments)
            usable = [_usable(start, message) for start, message in zip(starts, messages, strict=True)]
            new = [text for text in usable if text and text not in done and not shares_wording(text, held_out)]
            done |= dict.fromkeys(new[: arguments.count - len(done)])
            replace_text(path, "".join(json.dumps({"prompt": text}) + "\n" for text in done))
            bar.update(len(done) - bar.n)
            barren = 0 if new else barren + 1
            if barren == 10:
                raise AdaFlashValueError(
                    f"{10 * arguments.batch_size} messages running were unusable: name a `target` tuned for chat, "
                    "lower `temperature` or raise `longest`."
                )
    return list(done)


def _around_user(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The chat template's text before and after a user's message."""
    mark = "USERMESSAGE"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
    )
    before, found, after = text.partition(mark)
    if not (found and after):
        raise AdaFlashValueError("The target's chat template shows no user's message: give prompts by `--dataset`.")
    return before, after


def _read_openings(path: str | None) -> dict[str, tuple[str, ...]]:
    if path is None:
        return OPENINGS
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise AdaFlashValueError(f"`openings` can't be read ({error}): name a text file.") from error
    if not lines:
        raise AdaFlashValueError(f"`openings` {path} is empty: write one beginning per line; an empty line is free.")
    return {"own": tuple(lines)}


def _draw(openings: dict[str, tuple[str, ...]], count: int, rng: random.Random) -> list[str]:
    domains = rng.choices(list(openings), _SHARES if openings is OPENINGS else None, k=count)
    return [rng.choice(openings[domain]) for domain in domains]


def _go_on(target, tokenizer, texts: list[str], stops: set[int], arguments) -> list[tuple[str, bool]]:
    """What the target adds to each text, and whether it came to an end there."""
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    inputs = left_padded(rows, target.device)
    sequences = target.generate(
        **inputs,
        max_new_tokens=arguments.longest,
        eos_token_id=sorted(stops),
        pad_token_id=min(stops),
        **Sampling(arguments.temperature).options(),
    )
    added = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    ends = [next((i for i, token in enumerate(row) if token in stops), None) for row in added]
    return [
        (tokenizer.decode(row[:end], skip_special_tokens=True), end is not None)
        for row, end in zip(added, ends, strict=True)
    ]


def _usable(start: str, message: tuple[str, bool]) -> str | None:
    """The whole message, or `None` where it is unfinished or a word. Of a function, its header and docstring count."""
    text, ended = start + message[0].rstrip(), message[1]
    if start.endswith("def "):
        parts = text.split(_DOCSTRING, 2)
        text, ended = _DOCSTRING.join([*parts[:2], "\n"]), len(parts) == 3
    return text if ended and len(text.split()) > 1 else None
