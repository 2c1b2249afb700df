"""`adaflash rollout`: a process that writes training text with the newest drafter, beside `adaflash train`."""

from ..training.rollout_worker import RolloutArguments, WorkerArguments, run_worker
from ..training.setup import PromptArguments
from .arguments import make_parser, parse


DESCRIPTION = """\
Answers prompts with the target, drafting with the newest drafter that the trainer has published, and hands the text
to the trainer through a folder. Start it beside a trainer, with the same target and prompts; either side may be killed
and started again at any moment.

  adaflash train --mode on_policy --external_workers --max_steps 2000 --drafter runs/try/drafter --output_dir runs/mine
  adaflash rollout --exchange runs/mine/exchange --device cuda:1"""


def main(argv: list[str]) -> None:
    run_worker(*parse(make_parser("rollout", DESCRIPTION, (WorkerArguments, PromptArguments, RolloutArguments)), argv))
