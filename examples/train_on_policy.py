"""Trains a drafter on what the target writes while that drafter drafts for it (on-policy distillation).

    python examples/train_on_policy.py --drafter hub_cards/SmolLM2-135M-Instruct-AdaFlash --max_steps 200 \\
        --steps_per_version 20 --per_device_train_batch_size 4 --learning_rate 3e-4 --output_dir runs/smol --use_cpu
    accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml \\
        examples/train_on_policy.py examples/recipes/qwen3-8b.yaml

Rollouts are made in the training process. With a second device, pass `--external_workers` and start one or more
`adaflash rollout --exchange runs/smol/exchange` with the same target and prompts beside it. A run that was
interrupted goes on when the command is repeated. `--report_to tensorboard` or `trackio` draws curves, with tau per
domain and position from the real decoding loop every `--eval_every` steps.
"""

from dataclasses import dataclass, field
from pathlib import Path

from adaflash_hf.training.arguments import AdaFlashTrainingArguments
from adaflash_hf.training.exchange import Exchange
from adaflash_hf.training.rollout_worker import RolloutArguments, RolloutWorker
from adaflash_hf.training.rollouts import evaluation_ids
from adaflash_hf.training.run import make_drafter, record_training, template_flags, warn_of_other_flags
from adaflash_hf.training.setup import DrafterArguments, PromptArguments, load_prompts, load_target, parse_arguments
from adaflash_hf.training.trainer import AdaFlashTrainer, MeasureAcceptance


@dataclass
class ScriptArguments(PromptArguments, DrafterArguments):
    external_workers: bool = field(default=False, metadata={"help": "Rollouts come from `adaflash rollout`."})
    eval_every: int = field(default=100, metadata={"help": "Steps between measurements of tau; 0 for none."})
    eval_prompts_per_domain: int = field(default=8, metadata={"help": "Held-out prompts of each domain, up to 40."})
    eval_tokens: int = field(default=128, metadata={"help": "Tokens generated for each of them."})


def main():
    script, rollout, args = parse_arguments(
        ScriptArguments, RolloutArguments, AdaFlashTrainingArguments, mode="on_policy", draft_vocab_size=0
    )
    output = Path(args.output_dir)
    target, tokenizer = load_target(script, "bfloat16" if args.bf16 else "auto", args.device)
    drafter = make_drafter(target, script, args.seed)

    # 1. Rollouts: in this process, or from worker processes.
    worker = None
    if not script.external_workers and args.process_index == 0:
        exchange = Exchange(args.exchange or output / "exchange")
        worker = RolloutWorker(target, tokenizer, load_prompts(script), exchange, rollout)

    # 2. Train.
    flags = template_flags(script, rollout, external_workers=script.external_workers)
    warn_of_other_flags(drafter, flags)
    prompts = {}
    if script.eval_every:
        shown = drafter.card.chat_template_kwargs if flags is None else flags
        prompts = evaluation_ids(tokenizer, script.eval_prompts_per_domain, shown or {})
    trainer = AdaFlashTrainer(
        drafter,
        target,
        args,
        rollout_worker=worker,
        evaluation_prompts=prompts,
        evaluation_tokens=script.eval_tokens,
    )
    if script.eval_every:
        trainer.add_callback(MeasureAcceptance(trainer, script.eval_every))
    trainer.train(resume_from_checkpoint=True)

    # 3. Save.
    record_training(trainer, script, rollout, flags)
    trainer.save_drafter(output / "drafter")
    print(f"The drafter is in {output / 'drafter'}.")
    if prompts:
        print(trainer.acceptance().table())


if __name__ == "__main__":
    main()
