"""Accepted length (tau) of a drafter per domain, with 95 % intervals, and accepted share per position.

    python examples/evaluate_drafter.py --prompts_per_domain 40
    python examples/evaluate_drafter.py --prompts_per_domain 40 --temperature 1 --length_policy budget

Prompts are held out: MT-Bench (chat), GSM8K (math), HumanEval (code). Everything is measured by generating.
"""

import argparse
from pathlib import Path

from adaflash_hf import AdaFlashDrafter
from adaflash_hf.chat_template import FLAGS_HELP, flags_for, read_flags
from adaflash_hf.evaluation.acceptance import measure_acceptance
from adaflash_hf.training.rollouts import evaluation_ids
from adaflash_hf.training.setup import PromptArguments, load_target


DRAFTER = Path(__file__).parent.parent / "hub_cards" / "SmolLM2-135M-Instruct-AdaFlash"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default=str(DRAFTER), help="Folder or Hub id of the drafter.")
    parser.add_argument("--target", help="Folder or Hub id of the target; default SmolLM2-135M-Instruct.")
    parser.add_argument("--dtype", default="float32", help="Of target and drafter.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts_per_domain", type=int, default=8, help="1 to 40 held-out prompts of each domain.")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy.")
    parser.add_argument("--chat_template_kwargs", help=FLAGS_HELP)
    parser.add_argument(
        "--length_policy",
        choices=("fixed", "head", "budget"),
        default="fixed",
        help="`fixed` is the drafter alone; `budget` adds looked-up tokens and this machine's costs.",
    )
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if arguments.chat_template_kwargs is not None:
        read_flags(arguments.chat_template_kwargs)
    target, tokenizer = load_target(PromptArguments(target=arguments.target), arguments.dtype, arguments.device)
    drafter = AdaFlashDrafter.from_pretrained(arguments.drafter, dtype=target.dtype).to(target.device)
    report = measure_acceptance(
        target,
        drafter,
        evaluation_ids(tokenizer, arguments.prompts_per_domain, flags_for(drafter, arguments.chat_template_kwargs)),
        max_new_tokens=arguments.max_new_tokens,
        do_sample=arguments.temperature > 0,
        temperature=arguments.temperature or 1.0,
        batch_size=arguments.batch_size,
        length_policy=arguments.length_policy,
    )
    print(report.table())


if __name__ == "__main__":
    main()
