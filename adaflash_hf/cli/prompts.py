"""`adaflash prompts`: the target writes the prompts that a drafter is then trained on."""

import sys
from dataclasses import dataclass, field

from ..training.setup import PromptArguments, load_target
from ..training.written_prompts import WrittenPromptArguments, write_prompts
from .arguments import make_parser, parse


DESCRIPTION = """\
Lets the target write users' messages itself (Magpie, arXiv 2406.08464): its chat template is cut off where the user
speaks, and it goes on. Messages that share wording with the evaluation prompts are dropped. A repeated command goes on
where it stopped.

  adaflash prompts --output_file runs/prompts.jsonl --count 3000
  adaflash train --output_dir runs/mine --dataset runs/prompts.jsonl"""


@dataclass
class TargetArguments:
    target: str | None = field(default=None, metadata={"help": "Repo id or folder; default SmolLM2-135M-Instruct."})
    device: str = field(default="auto", metadata={"help": "`auto`, `cpu`, `cuda:1`, ..."})
    dtype: str = field(default="auto", metadata={"help": "The target's dtype; `auto` for its own."})


def main(argv: list[str]) -> None:
    where, what = parse(make_parser("prompts", DESCRIPTION, (TargetArguments, WrittenPromptArguments)), argv)
    target, tokenizer = load_target(PromptArguments(target=where.target), where.dtype, where.device)
    prompts = write_prompts(target, tokenizer, what)
    sys.stdout.write(f"{len(prompts)} prompts are in {what.output_file}.\n")
