"""Trains a drafter for a target on the target's own responses, offline.

    python examples/train_drafter.py --output_dir runs/smollm2

Three steps, each resumed where it stopped when the command is repeated: the target answers prompts and its features
are stored (`OUTPUT_DIR/features`), the drafter and its length head learn from them (`OUTPUT_DIR/checkpoint-*`), and
the result is written to `OUTPUT_DIR/drafter`. Without a GPU this takes hours; `--prompts_per_domain 100 --max_steps
200` shows every step in minutes. For another target, pass `--target` and, with the Hub at hand, `--dataset` (a data
set with a text column `--prompt_column`).
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from adaflash_hf.target import Target
from adaflash_hf.training.arguments import AdaFlashTrainingArguments
from adaflash_hf.training.rollouts import build_feature_shards, end_tokens, frequent_tokens
from adaflash_hf.training.setup import (
    DrafterArguments,
    PromptArguments,
    drafter_config,
    load_prompts,
    load_target,
    new_drafter,
    parse_arguments,
)
from adaflash_hf.training.trainer import AdaFlashTrainer


@dataclass
class ScriptArguments(PromptArguments, DrafterArguments):
    max_new_tokens: int = field(default=256, metadata={"help": "Longest response, in tokens."})


def main():
    script, args = parse_arguments(ScriptArguments, AdaFlashTrainingArguments)
    output = Path(args.output_dir)
    target, tokenizer = load_target(script, device=args.device)
    config = drafter_config(target, script)

    # 1. The target's responses and features.
    with args.main_process_first(desc="responses and features"):
        dataset = build_feature_shards(
            Target(target, config), tokenizer, load_prompts(script), output / "features", script.max_new_tokens
        )
    print(f"{len(dataset)} sequences in {output / 'features'}")

    # 2. Train.
    torch.manual_seed(args.seed)
    token_ids = None
    if config.draft_vocab_size is not None:
        token_ids = frequent_tokens(dataset, config.draft_vocab_size, end_tokens(target))
    drafter = new_drafter(target, config, script.warm_start, token_ids)
    trainer = AdaFlashTrainer(drafter, target, args, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=True)

    # 3. Save.
    trainer.save_drafter(output / "drafter")
    print(f"The drafter is in {output / 'drafter'}.")


if __name__ == "__main__":
    main()
