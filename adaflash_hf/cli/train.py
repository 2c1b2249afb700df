"""`adaflash train`: the target's responses and features, then a drafter and its length head that learn from them."""

import sys
from dataclasses import dataclass, field

from ..training.arguments import AdaFlashTrainingArguments
from ..training.rollout_worker import RolloutArguments
from ..training.run import run_training
from ..training.setup import DrafterArguments, PromptArguments
from .arguments import make_parser, parse


DESCRIPTION = """\
Trains a drafter for a target on the target's own responses. Three steps, each resumed where it stopped when the
command is repeated:

  1. the target answers prompts, and its features are stored  OUTPUT_DIR/features
  2. the drafter and its length head learn from them          OUTPUT_DIR/checkpoint-*
  3. the result is written, with its card                     OUTPUT_DIR/drafter

Without a GPU this takes hours; the first example shows every step in minutes. For a target of your own, `--dataset`
names a Hub data set with a text column of prompts, and `--mask_token_id` an id that never occurs in text.

  adaflash train --output_dir runs/try --prompts_per_domain 100 --max_steps 200
  adaflash train --output_dir runs/mine --target ORG/MODEL --dataset ORG/PROMPTS --mask_token_id 3

With `--mode on_policy` the text is written while the drafter learns: see `adaflash rollout --help`.

The options up to --max_backlog are about the drafter and its text; those after them are of AdaFlashTrainingArguments
and transformers.TrainingArguments."""


@dataclass
class TrainArguments(PromptArguments, DrafterArguments):
    external_workers: bool = field(
        default=False, metadata={"help": "on_policy: rollouts come from `adaflash rollout`, not from this process."}
    )


def main(argv: list[str]) -> None:
    parser = make_parser("train", DESCRIPTION, (TrainArguments, RolloutArguments, AdaFlashTrainingArguments))
    script, rollout, args = parse(parser, argv)
    folder = run_training(script, script, rollout, args, script.external_workers)
    sys.stdout.write(f"The drafter is in {folder}.\n")
