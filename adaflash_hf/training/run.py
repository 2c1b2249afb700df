"""A whole training run, from command-line arguments to a saved drafter: what `adaflash train` and the examples run."""

import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers.utils import logging

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
from .setup import DrafterArguments, PromptArguments, drafter_config, load_prompts, load_target, new_drafter
from .trainer import AdaFlashTrainer


logger = logging.get_logger(__name__)


def run_training(
    prompts: PromptArguments,
    shape: DrafterArguments,
    rollout: RolloutArguments,
    args: AdaFlashTrainingArguments,
    external_workers: bool = False,
) -> Path:
    """Trains as `args` say, going on from the newest complete checkpoint of `args.output_dir`.

    Args:
        external_workers: `on_policy`: rollouts come from worker processes (`run_worker`), not from this one.

    Returns:
        The folder of the finished drafter, `OUTPUT_DIR/drafter`.
    """
    output = Path(args.output_dir)
    target, tokenizer = load_target(prompts, device=args.device)
    worker, dataset = None, None
    if args.mode == "on_policy":
        if prompts.features is not None:
            raise AdaFlashValueError("`features` is text made before: leave it out with `mode` on_policy.")
        drafter = make_drafter(target, shape)
        if not external_workers and args.process_index == 0:
            exchange = Exchange(args.exchange or output / "exchange")
            worker = RolloutWorker(target, tokenizer, load_prompts(prompts), exchange, rollout)
    else:
        named = make_drafter(target, shape) if shape.drafter is not None else None
        layout = drafter_config(target, shape) if named is None else named.config
        with args.main_process_first(desc="responses and features"):
            dataset = load_features(Target(target, layout), tokenizer, prompts, rollout, output / "features")
        drafter = make_drafter(target, shape, dataset) if named is None else named
    trainer = AdaFlashTrainer(drafter, target, args, train_dataset=dataset, rollout_worker=worker)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_drafter(output / "drafter")
    if dataset is not None and drafter.length_head is not None:
        if args.world_size == 1:
            calibrate_head(trainer, dataset)
            trainer.save_drafter(output / "drafter")
        else:
            logger.warning("The length head isn't calibrated: run the same command once more in one process for that.")
    return output / "drafter"


def load_features(
    target: Target, tokenizer, prompts: PromptArguments, rollout: RolloutArguments, folder: Path
) -> FeatureShards:
    """The named feature shards, or those made of the target's responses to the prompts, in `folder`."""
    if prompts.features is not None:
        return FeatureShards(prompts.features, target.layer_ids)
    return build_feature_shards(
        target,
        tokenizer,
        load_prompts(prompts),
        folder,
        rollout.rollout_max_new_tokens,
        rollout.rollout_batch_size,
        rollout.sampling,
        rollout.sampled_share,
        json.loads(rollout.chat_template_kwargs),
        rollout.rollout_seed,
    )


def make_drafter(target, shape: DrafterArguments, dataset: FeatureShards | None = None) -> AdaFlashDrafter:
    """The named drafter in float32, with a new length head where it has none and one is wanted, or a new drafter."""
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
