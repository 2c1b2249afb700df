"""Trains only the adaptive length head, for any finished drafter, then calibrates it and shows what it saves.

    python examples/train_length_head.py --new_head --length_head survival --output_dir runs/head --max_steps 200 \\
        --learning_rate 1e-3 --use_cpu

The target answers prompts (half of them greedily), their features are stored, the head learns which drafted
positions are accepted, and a temperature per position is fitted. Prints Brier score and expected against realised
accepted length, draws `OUTPUT_DIR/reliability.png`, and compares verified tokens per step with verifying every block
in full. `--length_head length` trains AdaFlash's own kind.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import set_seed

from adaflash_hf import AdaFlashDrafter
from adaflash_hf.evaluation.acceptance import measure_acceptance
from adaflash_hf.target import Target
from adaflash_hf.training.arguments import AdaFlashTrainingArguments
from adaflash_hf.training.length_head import attach_length_head
from adaflash_hf.training.rollout_worker import RolloutArguments
from adaflash_hf.training.rollouts import evaluation_ids
from adaflash_hf.training.run import (
    calibrate_head,
    load_features,
    record_training,
    template_flags,
    warn_of_other_flags,
)
from adaflash_hf.training.setup import PromptArguments, load_target, parse_arguments
from adaflash_hf.training.trainer import AdaFlashTrainer


DRAFTER = Path(__file__).parent.parent / "hub_cards" / "SmolLM2-135M-Instruct-AdaFlash"


@dataclass
class ScriptArguments(PromptArguments):
    drafter: str = field(default=str(DRAFTER), metadata={"help": "Folder or Hub id of the drafter."})
    new_head: bool = field(default=False, metadata={"help": "Drop the head that the drafter has."})
    length_head: str = field(default="survival", metadata={"help": "Kind of a new head: `survival` or `length`."})
    bottleneck_size: int = field(default=128, metadata={"help": "Inner width of a new head."})
    eval_prompts_per_domain: int = field(default=8, metadata={"help": "Held-out prompts of each domain, up to 40."})
    eval_tokens: int = field(default=128, metadata={"help": "Longest answer to a held-out prompt."})


def main():
    script, rollout, args = parse_arguments(
        ScriptArguments, RolloutArguments, AdaFlashTrainingArguments, length_head_only=True
    )
    output = Path(args.output_dir)
    target, tokenizer = load_target(script, "bfloat16" if args.bf16 else "auto", args.device)
    drafter = AdaFlashDrafter.from_pretrained(script.drafter, dtype="float32")
    if script.new_head:
        drafter.length_head = None
    if drafter.length_head is None:
        set_seed(args.seed)
        attach_length_head(drafter, script.length_head, script.bottleneck_size)

    # 1. The target's responses and features.
    dataset = load_features(Target(target, drafter.config), tokenizer, script, rollout, args)
    flags = template_flags(script, rollout, dataset)
    warn_of_other_flags(drafter, flags)

    # 2. Train and calibrate.
    trainer = AdaFlashTrainer(drafter, target, args, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=True)
    if args.should_save:
        print(calibrate_head(trainer, dataset).table())
    record_training(trainer, script, rollout, flags)
    trainer.save_drafter(output / "drafter")
    if not args.should_save:
        return

    # 3. Compare with verifying whole blocks.
    drafter = AdaFlashDrafter.from_pretrained(output / "drafter", dtype=target.dtype).to(target.device)
    prompts = evaluation_ids(tokenizer, script.eval_prompts_per_domain, drafter.card.chat_template_kwargs or {})
    for policy in ("fixed", "head"):
        report = measure_acceptance(target, drafter, prompts, script.eval_tokens, length_policy=policy)
        print(f"\nlength_policy {policy}\n{report.table()}")


if __name__ == "__main__":
    main()
