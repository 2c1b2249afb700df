"""A whole training run, from command-line arguments to a saved drafter: what `adaflash train` and the examples run."""

import dataclasses
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import set_seed
from transformers.utils import logging

from ..chat_template import read_flags
from ..errors import AdaFlashValueError
from ..evaluation.calibration import CalibrationReport, calibrate
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .arguments import AdaFlashTrainingArguments
from .data import FeatureShards, collate
from .exchange import Exchange
from .length_head import attach_length_head
from .rollout_worker import RolloutArguments, RolloutWorker
from .rollouts import build_feature_shards, end_tokens, frequent_tokens
from .setup import (
    FILE_KINDS,
    DrafterArguments,
    PromptArguments,
    drafter_config,
    load_prompts,
    load_target,
    new_drafter,
)
from .trainer import AdaFlashTrainer


logger = logging.get_logger(__name__)


def run_training(
    prompts: PromptArguments,
    shape: DrafterArguments,
    rollout: RolloutArguments,
    args: AdaFlashTrainingArguments,
    external_workers: bool = False,
) -> Path:
    """Trains as `args` say, going on from the newest complete checkpoint of `args.output_dir`. With `bf16` the target
    computes in bfloat16, too.

    Args:
        external_workers: `on_policy`: rollouts come from worker processes (`run_worker`), not from this one.

    Returns:
        The folder of the finished drafter, `OUTPUT_DIR/drafter`.
    """
    output = Path(args.output_dir)
    target, tokenizer = load_target(prompts, "bfloat16" if args.bf16 else "auto", args.device)
    worker, dataset = None, None
    if args.mode == "on_policy":
        if prompts.features is not None:
            raise AdaFlashValueError("`features` is text made before: leave it out with `mode` on_policy.")
        drafter = make_drafter(target, shape, args.seed)
        if not external_workers and args.process_index == 0:
            exchange = Exchange(args.exchange or output / "exchange")
            worker = RolloutWorker(target, tokenizer, load_prompts(prompts), exchange, rollout)
    else:
        named = make_drafter(target, shape, args.seed) if shape.drafter is not None else None
        layout = drafter_config(target, shape) if named is None else named.config
        dataset = load_features(Target(target, layout), tokenizer, prompts, rollout, args)
        drafter = make_drafter(target, shape, args.seed, dataset) if named is None else named
    trainer = AdaFlashTrainer(drafter, target, args, train_dataset=dataset, rollout_worker=worker)
    flags = template_flags(prompts, rollout, dataset, external_workers)
    warn_of_other_flags(drafter, flags)
    trainer.train(resume_from_checkpoint=True)
    record_training(trainer, prompts, rollout, flags)
    trainer.save_drafter(output / "drafter")
    if dataset is not None and drafter.length_head is not None:
        if trainer.is_fsdp_enabled:
            logger.warning_once(
                "The length head isn't calibrated, since the drafter is sharded: run the same command once more in "
                f"one process, with `--max_steps {trainer.state.max_steps}`, for that."
            )
        else:
            if args.should_save:
                calibrate_head(trainer, dataset)
            trainer.save_drafter(output / "drafter")
    return output / "drafter"


def load_features(
    target: Target, tokenizer, prompts: PromptArguments, rollout: RolloutArguments, args: AdaFlashTrainingArguments
) -> FeatureShards:
    """The named feature shards, or those made of the target's responses to the prompts, in `OUTPUT_DIR/features`, a
    share by each process."""
    if prompts.features is not None:
        return FeatureShards(prompts.features, target.layer_ids)
    return build_feature_shards(
        target,
        tokenizer,
        load_prompts(prompts),
        Path(args.output_dir) / "features",
        rollout.rollout_max_new_tokens,
        rollout.rollout_batch_size,
        rollout.sampling,
        rollout.sampled_share,
        rollout.template_flags,
        rollout.rollout_seed,
        args.process_index,
        args.world_size,
    )


def template_flags(
    prompts: PromptArguments,
    rollout: RolloutArguments,
    dataset: FeatureShards | None = None,
    external_workers: bool = False,
) -> dict | None:
    """The chat template's flags of the training text; `None` where nothing says yet.

    Raises:
        AdaFlashValueError: when flags are given beside text that was made with others.
    """
    given = rollout.template_flags
    if external_workers:
        return None
    if prompts.features is None or dataset.chat_template_kwargs is None:
        return given if prompts.features is None else given or None
    if given and given != dataset.chat_template_kwargs:
        raise AdaFlashValueError(
            f"`chat_template_kwargs` is {json.dumps(given)}, but {prompts.features} was made with "
            f"{json.dumps(dataset.chat_template_kwargs)}: leave it out, or make other text."
        )
    return dataset.chat_template_kwargs


def warn_of_other_flags(drafter: AdaFlashDrafter, flags: dict | None) -> None:
    """Warns where a drafter goes on with text of another kind than its card records."""
    recorded = drafter.card.chat_template_kwargs
    if None not in (recorded, flags) and recorded != flags:
        logger.warning(
            f"The drafter was trained with `chat_template_kwargs` {json.dumps(recorded)} and goes on with "
            f"{json.dumps(flags)}: pass the former, unless it is to be used with the latter."
        )


def record_training(
    trainer: AdaFlashTrainer, prompts: PromptArguments, rollout: RolloutArguments, flags: dict | None
) -> None:
    """Puts into the drafter's card how it was trained, after what it says of earlier training. Results measured with
    the earlier weights are dropped, and so is the earlier repo's name."""
    args, card, made = trainer.args, trainer.drafter.card, dataclasses.asdict(rollout)
    if trainer.exchange is not None:
        made = trainer.exchange.recipe()  # what the workers were told
        flags = read_flags(made["chat_template_kwargs"])
    text = f"the prompts of {prompts.dataset}" if prompts.dataset is not None else "built-in prompts"
    if prompts.features is not None:
        text = f"prompts, as {prompts.features} holds them"
    else:
        text += f" ({made['sampled_share']:.0%} sampled at temperature {made['temperature']:g}, the rest greedy)"
    hub = prompts.features is None and prompts.dataset and Path(prompts.dataset).suffix not in FILE_KINDS
    done = (
        f"{trainer.state.global_step:,} steps of {trainer.get_total_train_batch_size(args)} sequences, mode "
        f"`{args.mode}`, on the target's responses to {text}: {_losses(args)}, learning rate {args.learning_rate:g}."
    )
    trainer.drafter.card = dataclasses.replace(
        card,
        repo_id=None,
        datasets=list(dict.fromkeys([*card.datasets, *([prompts.dataset] if hub else [])])),
        training_data=done if card.training_data is None else f"{card.training_data}\n\nThen: {done}",
        chat_template_kwargs=card.chat_template_kwargs if flags is None else flags,
        results={},
    )


def _losses(args: AdaFlashTrainingArguments) -> str:
    if args.length_head_only:
        return f"the length head alone, `{args.length_head_labels}` labels"
    parts = [
        f"{args.alpha:g} cross-entropy + {1 - args.alpha:g} {args.divergence}",
        f"position decay {args.position_decay:g}",
        f"up to {args.anchors_per_sequence} anchors" + (", more of narrow blocks" if args.narrow_blocks else ""),
    ]
    parts += [
        f"`{key}` {getattr(args, key):g}" for key in ("acceptance_weight", "feature_noise") if getattr(args, key)
    ]
    return ", ".join(parts)


def make_drafter(target, shape: DrafterArguments, seed: int, dataset: FeatureShards | None = None) -> AdaFlashDrafter:
    """The named drafter in float32, with a new length head where it has none and one is wanted, or a new drafter.

    Args:
        seed: of new weights, so that a run that was killed before its first checkpoint begins again as it began.
    """
    set_seed(seed)
    if shape.drafter is not None:
        drafter = AdaFlashDrafter.from_pretrained(shape.drafter, dtype=torch.float32)
        if drafter.length_head is None and shape.length_head != "none":
            attach_length_head(drafter, shape.length_head, shape.bottleneck_size)
        return drafter
    config = drafter_config(target, shape)
    token_ids = None
    if config.draft_vocab_size is not None and dataset is not None:
        token_ids = frequent_tokens(dataset, config.draft_vocab_size, end_tokens(target))
    return new_drafter(target, config, shape.warm_start, token_ids)


def calibrate_head(trainer: AdaFlashTrainer, dataset, sequences: int = 256) -> CalibrationReport:
    """Calibrates the trainer's length head on the first sequences of a data set, logs the report's table, and draws
    `OUTPUT_DIR/reliability.png`.

    Raises:
        AdaFlashValueError: when the data set is empty.
    """
    if not len(dataset):
        raise AdaFlashValueError("The data set is empty: give sequences to calibrate the length head on.")
    part = torch.utils.data.Subset(dataset, range(min(sequences, len(dataset))))
    device = trainer.args.device
    batches = (
        {key: value.to(device) for key, value in batch.items()}
        for batch in DataLoader(part, trainer.args.per_device_eval_batch_size, collate_fn=collate)
    )
    report = calibrate(trainer.accelerator.unwrap_model(trainer.model), batches)
    logger.warning(f"Length head, blocks held out from the fit:\n{report.table()}")
    report.plot(Path(trainer.args.output_dir) / "reliability.png")
    return report
