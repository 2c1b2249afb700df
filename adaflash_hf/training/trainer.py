"""`AdaFlashTrainer`: a `transformers.Trainer` that distils a target into a drafter and its length head.

`offline`: the text is fixed (the target's own responses, `training/rollouts.py`). `on_policy`: the target answers
prompts with the drafter as it is being trained (`training/rollout_worker.py`), and the drafter is published every
`steps_per_version` steps. Everything but data and loss, that is devices, mixed precision, accumulation, logging,
checkpoints and resume, is the Trainer's.
"""

import contextlib
import dataclasses
import json
import math
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import AdaFlashError, AdaFlashValueError
from ..evaluation.acceptance import AcceptanceReport, measure_acceptance
from ..modeling_adaflash import AdaFlashDrafter
from .arguments import AdaFlashTrainingArguments
from .data import collate
from .distillation import DistillationModel
from .exchange import Exchange
from .rollout_worker import RolloutWorker
from .stream import RolloutStream


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint of an output folder, `None` without one. `trainer_state.json` is written last, so
    a checkpoint whose writing was interrupted is passed over."""
    found = []
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            found.append((int(path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")), str(path)))
        except (OSError, ValueError):
            continue
    return max(found)[1] if found else None


class AdaFlashTrainer(Trainer):
    """Trains a drafter for a target.

    Args:
        drafter: the model to train, in float32; saved alone, as `AdaFlashDrafter.from_pretrained` reads it.
        target: the frozen teacher; needed for its embedding and head even when features are cached.
        args: `AdaFlashTrainingArguments`.
        train_dataset: samples with `input_ids` and `prompt_length`, and optionally cached features; a map-style
            or an iterable data set. None with `on_policy`, which reads rollouts.
        rollout_worker: `on_policy`: makes rollouts in this process when none is waiting; `None` leaves that to worker
            processes. With several training processes only the first one uses its worker.
        evaluation_prompts: domain -> prompts as token ids. `evaluate` then generates with the drafter and reports
            tau and accepted shares as `eval_tau_DOMAIN`, `eval_accepted_DOMAIN_K`.
        evaluation_tokens: most tokens generated for each of these prompts.

    Raises:
        AdaFlashValueError: when drafter, target, data and arguments don't fit together.
        AdaFlashError: when loss or gradient stop being finite; nothing is written to the weights by that step.
    """

    def __init__(
        self,
        drafter: AdaFlashDrafter,
        target: PreTrainedModel,
        args: AdaFlashTrainingArguments,
        train_dataset=None,
        rollout_worker: RolloutWorker | None = None,
        evaluation_prompts: dict[str, list[list[int]]] | None = None,
        evaluation_tokens: int = 128,
        **kwargs,
    ):
        kwargs.setdefault("data_collator", collate)
        self.exchange: Exchange | None = None
        if args.mode == "on_policy":
            if train_dataset is not None:
                raise AdaFlashValueError("`train_dataset` has no use in `on_policy` mode, which reads rollouts.")
            if args.dataloader_num_workers:
                raise AdaFlashValueError("`dataloader_num_workers` must be 0 in `on_policy` mode: leave it out.")
            self.exchange = Exchange(args.exchange or Path(args.output_dir) / "exchange")
            if rollout_worker is not None and rollout_worker.exchange.folder != self.exchange.folder:
                raise AdaFlashValueError(
                    f"`exchange` is {self.exchange.folder}, the worker's is {rollout_worker.exchange.folder}: use one."
                )
        elif rollout_worker is not None:
            raise AdaFlashValueError("`rollout_worker` is for `on_policy`: set `mode`, or pass a `train_dataset`.")
        super().__init__(
            model=DistillationModel(drafter, target, args), args=args, train_dataset=train_dataset, **kwargs
        )
        self.model_accepts_loss_kwargs = False
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.fsdp_version == 2 and plugin.mixed_precision_policy is not None:
            # accelerate has one dtype for all: gradients would be summed, and the loss returned, in half precision.
            plugin.mixed_precision_policy = dataclasses.replace(
                plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
            )
        self.target, self.evaluation_prompts, self.evaluation_tokens = target, evaluation_prompts, evaluation_tokens
        self._sums: dict[str, torch.Tensor] = {}
        if self.exchange is not None:
            leads = args.process_index == 0
            self.train_dataset = RolloutStream(
                self.exchange,
                samples_per_version=self.get_total_train_batch_size(args) * args.steps_per_version,
                versions=math.ceil(args.max_steps / args.steps_per_version),
                max_staleness=args.max_staleness,
                passes=args.rollout_passes,
                seed=args.seed,
                worker=rollout_worker if leads else None,
                leads=leads,
            )
            self.add_callback(_PublishVersions(self))

    @property
    def drafter(self) -> AdaFlashDrafter:
        return self.accelerator.unwrap_model(self.model).drafter

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs):
        """As the Trainer's; `resume_from_checkpoint=True` takes the newest complete checkpoint, if there is any."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps:  # resumed where it had ended: one more step would follow
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        rate, head = self.args.length_head_learning_rate, self.drafter.length_head
        if rate is not None and head is not None:
            mine = set(map(id, head.parameters()))
            for group in list(optimizer.param_groups):
                theirs = [p for p in group["params"] if id(p) in mine]
                group["params"] = [p for p in group["params"] if id(p) not in mine]
                optimizer.add_param_group({**group, "params": theirs, "lr": rate})
        return optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        output = model(**inputs)
        if not torch.isfinite(output["loss"]):
            raise AdaFlashError(
                f"The loss is {output['loss'].item()} at step {self.state.global_step}: lower `learning_rate`, or "
                "check the features of the batch; resume from the last checkpoint."
            )
        if model.training:
            for key in ("hits", "counts", "head_loss"):
                if key in output:
                    self._sums[key] = self._sums.get(key, 0) + output[key].detach().double()
            self._sums["steps"] = self._sums.get("steps", 0) + torch.ones((), dtype=torch.double)
        return (output["loss"], output) if return_outputs else output["loss"]

    def log(self, logs, *args, **kwargs):
        """Adds the teacher-forced accepted length (`tau`, bonus included), by depth, since the last log, over all
        processes."""
        if "loss" in logs and "counts" in self._sums:
            sums = {key: self.accelerator.reduce(value.to(self.args.device)) for key, value in self._sums.items()}
            rates = sums["hits"] / sums["counts"].clamp(min=1)
            logs["tau"] = round(1 + rates.cumprod(0).sum().item(), 4)
            logs |= {f"accepted_{k}": round(rate, 3) for k, rate in enumerate(rates.tolist(), start=1)}
            if "head_loss" in sums:
                logs["head_loss"] = round((sums["head_loss"] / sums["steps"]).item(), 4)
            if self.exchange is not None:
                logs["stale_jobs"] = self.train_dataset.stale_jobs
            self._sums = {}
        super().log(logs, *args, **kwargs)

    def _get_grad_norm(self, *args, **kwargs):  # called whether or not `max_grad_norm` clips
        norm = super()._get_grad_norm(*args, **kwargs)
        if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
            raise AdaFlashError(
                f"The gradient norm is {float(norm)} at step {self.state.global_step}: lower `learning_rate`; resume "
                "from the last checkpoint."
            )
        return norm

    # Evaluation

    def evaluate(self, *args, metric_key_prefix: str = "eval", **kwargs):
        """The Trainer's, and tau of the real decoding loop where `evaluation_prompts` were given."""
        metrics = super().evaluate(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self.evaluation_prompts:
            measured = self.acceptance().metrics(metric_key_prefix)
            self.log(measured)
            metrics |= measured
        return metrics

    def acceptance(self, **options) -> AcceptanceReport:
        """Generates for the evaluation prompts with the drafter as it is; each process takes its share of prompts.

        Args:
            options: of `measure_acceptance`, such as `do_sample`.
        """
        rank, count = self.args.process_index, self.args.world_size
        mine = {domain: prompts[rank::count] for domain, prompts in self.evaluation_prompts.items()}
        with self._whole_drafter() as drafter:
            report = measure_acceptance(self.target, drafter, mine, max_new_tokens=self.evaluation_tokens, **options)
        if count > 1:
            parts: list = [None] * count
            torch.distributed.all_gather_object(parts, report)
            report = AcceptanceReport.joined(parts)
        return report

    @contextlib.contextmanager
    def _whole_drafter(self):
        """The drafter in evaluation mode, put together from its shards where it is sharded."""
        if not self.is_fsdp_enabled:
            training = self.drafter.training
            try:
                yield self.drafter.eval()
            finally:
                self.drafter.train(training)
            return
        folder = Path(self.args.output_dir) / ".whole"
        self.save_model(folder, _internal_call=True)
        self.accelerator.wait_for_everyone()
        yield AdaFlashDrafter.from_pretrained(folder).to(self.args.device)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            shutil.rmtree(folder)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs)).detach()
        return loss, None, None

    # Saving and loading

    def _state_dict(self) -> dict | None:
        """The drafter's whole state on the first process, which all call; `None` where the module holds it itself."""
        if not self.is_fsdp_enabled:
            return None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        return {key.removeprefix("drafter."): value for key, value in state.items()}

    def _save_drafter(self, folder, state_dict: dict | None) -> None:
        self.drafter.save_pretrained(folder, state_dict=state_dict)

    def save_model(self, output_dir=None, _internal_call=False):
        state_dict = self._state_dict()
        if self.args.should_save:
            output_dir = Path(output_dir or self.args.output_dir)
            self._save_drafter(output_dir, state_dict)
            torch.save(self.args, output_dir / "training_args.bin")

    def save_drafter(self, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        """Saves the drafter alone, for use, in `dtype`. All processes call it; the one that saves it is the
        only one that finds it whole afterwards."""
        state_dict = self._state_dict()
        if self.args.should_save:
            self._save_drafter(folder, state_dict)
            AdaFlashDrafter.from_pretrained(folder, dtype=dtype).save_pretrained(folder)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # `trainer_state.json`, written next, says that the checkpoint is complete.
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        loaded = AdaFlashDrafter.from_pretrained(resume_from_checkpoint, dtype=torch.float32).state_dict()
        if self.is_fsdp_enabled:
            set_model_state_dict(self.drafter, loaded, options=StateDictOptions(full_state_dict=True))
        else:
            self.drafter.load_state_dict(loaded)
        self.accelerator.unwrap_model(self.model).read_draft_vocabulary()

    def _load_best_model(self):
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def publish(self, version: int) -> None:
        """Publishes the drafter to rollout workers. All processes call it."""
        state_dict = self._state_dict()
        if self.args.should_save:
            self.exchange.publish(version, lambda folder: self._save_drafter(folder, state_dict))
        self.accelerator.wait_for_everyone()


class _PublishVersions(TrainerCallback):
    """Publishes version s / steps_per_version after step s."""

    def __init__(self, trainer: AdaFlashTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if args.should_save:
            self.trainer.exchange.set_finished(False)
        self.trainer.publish(state.global_step // args.steps_per_version)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.steps_per_version == 0:
            self.trainer.publish(state.global_step // args.steps_per_version)

    def on_train_end(self, args, state, control, **kwargs):
        if args.should_save:
            self.trainer.exchange.set_finished(True)


class MeasureAcceptance(TrainerCallback):
    """Logs tau per domain and accepted shares per position, measured by generating, every `every` steps.

    Args:
        trainer: one with `evaluation_prompts`.
    """

    def __init__(self, trainer: AdaFlashTrainer, every: int):
        self.trainer, self.every = trainer, every

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.trainer.log(self.trainer.acceptance().metrics())
