"""`AdaFlashTrainer`: a `transformers.Trainer` that distils a target into a drafter and its length head.

Offline form: the text is fixed (the target's own responses, `training/rollouts.py`). Everything but the loss, that
is devices, mixed precision, accumulation, logging, checkpoints, resume and push, is the Trainer's.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ..errors import AdaFlashError, AdaFlashValueError
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .anchors import BlockAttention, sample_anchors
from .data import FEATURE_KEYS, collate, noisy, target_features
from .losses import DIVERGENCES, distillation_loss, position_weights


@dataclass
class AdaFlashTrainingArguments(TrainingArguments):
    """TrainingArguments and the settings of distillation."""

    anchors_per_sequence: int = field(default=512, metadata={"help": "Most blocks drawn from one sequence and step."})
    alpha: float = field(default=0.8, metadata={"help": "Weight of cross-entropy on the teacher argmax, 0 to 1."})
    divergence: str = field(default="reverse_kl", metadata={"help": f"The rest of the loss: one of {DIVERGENCES}."})
    kl_clip: float | None = field(default=10.0, metadata={"help": "Cap of the divergence per token, in nats."})
    position_decay: float = field(default=4.0, metadata={"help": "gamma of the position weights, in positions."})
    feature_noise: float = field(
        default=0.0,
        metadata={"help": "Normal noise on context features in training, in standard deviations of each feature."},
    )
    length_head_weight: float = field(default=1.0, metadata={"help": "Weight of the length head's loss."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Left off: features must reach the model."})

    def __post_init__(self):
        super().__post_init__()
        if self.divergence not in DIVERGENCES:
            raise AdaFlashValueError(f"`divergence` is {self.divergence!r}: use one of {DIVERGENCES}.")
        if not 0 <= self.alpha <= 1:
            raise AdaFlashValueError(f"`alpha` is {self.alpha}: use 0 to 1.")
        if not self.position_decay > 0:
            raise AdaFlashValueError(f"`position_decay` is {self.position_decay}: use a number above 0.")
        if not self.feature_noise >= 0:
            raise AdaFlashValueError(f"`feature_noise` is {self.feature_noise}: use 0 or more (0.05 is usual).")


class DistillationModel(nn.Module):
    """Drafter and target in one `forward` that does the whole step, as FSDP needs. Only the drafter has parameters
    here; the target is reached through a plain reference and never trained, moved or saved."""

    def __init__(self, drafter: AdaFlashDrafter, target: PreTrainedModel, args: AdaFlashTrainingArguments):
        super().__init__()
        self.drafter = drafter
        self.config = drafter.config
        self._target = (Target(target.eval().requires_grad_(False), drafter.config),)
        self.settings = args
        decay = position_weights(drafter.config.num_drafted_tokens, args.position_decay)
        self.register_buffer("weights", decay, persistent=False)
        self.register_buffer("draft_index", torch.arange(drafter.config.vocab_size), persistent=False)
        self.read_draft_vocabulary()

    def read_draft_vocabulary(self) -> None:
        """Follows the drafter's `draft_token_ids`: the head's rows, and the index of each token among them or -1."""
        token_ids = getattr(self.drafter, "draft_token_ids", None)
        self._head = (self._target[0].head_rows(token_ids),)
        if token_ids is not None:
            self.draft_index.fill_(-1)
            self.draft_index[token_ids.to(self.draft_index.device)] = torch.arange(len(token_ids)).to(self.draft_index)

    def activation_checkpointing_enable(self, *args, **kwargs):
        self.drafter.activation_checkpointing_enable(*args, **kwargs)

    def forward(self, input_ids, attention_mask, loss_mask, features=None, teacher_hidden=None, teacher_argmax=None):
        """Shapes as `data.collate` makes them. Returns `loss`, `hits` and `counts` (`[num_drafted_tokens]`, accepted
        and trained positions by depth, each given that all before were accepted), and `head_loss`."""
        config = self.config
        if features is None:
            made = target_features(self._target[0], input_ids, attention_mask)
            features, teacher_hidden, teacher_argmax = (made[key] for key in FEATURE_KEYS)
        anchors, used = sample_anchors(loss_mask, self.settings.anchors_per_sequence)
        batch, blocks = anchors.shape
        length, drafted = input_ids.shape[1], config.num_drafted_tokens

        # 1. Draft every block in one pass.
        if self.training and self.settings.feature_noise > 0:
            features = noisy(features, loss_mask, self.settings.feature_noise)
        slots = torch.arange(config.block_size, device=anchors.device)
        noise_ids = torch.full((batch, blocks, config.block_size), config.mask_token_id, device=anchors.device)
        noise_ids[..., 0] = input_ids.gather(1, anchors)
        with torch.no_grad():
            noise = self._target[0].embed(noise_ids.reshape(batch, -1))
        context_positions = torch.arange(length, device=anchors.device).expand(batch, -1)
        hidden = self.drafter(
            noise_embeds=noise,
            context_hidden_states=features,
            ragged=BlockAttention(anchors, used, length, config),
            position_ids=torch.cat([context_positions, (anchors[..., None] + slots).reshape(batch, -1)], dim=1),
        ).last_hidden_state
        hidden = hidden.reshape(batch * blocks, config.block_size, -1)

        # 2. Supervised positions: drafted token k of anchor a is position a + k, its teacher sits at a + k - 1.
        depth = torch.arange(1, drafted + 1, device=anchors.device)
        position = anchors[..., None] + depth
        inside = used[..., None] & (position < length)
        position = position.clamp(max=length - 1)
        supervised = (inside & loss_mask.gather(1, position.reshape(batch, -1)).reshape(position.shape)).flatten(0, 1)
        teacher_position = (position - 1).reshape(batch, -1)
        labels = self.draft_index[teacher_argmax.gather(1, teacher_position)].reshape(-1, drafted)
        rows = torch.arange(batch, device=anchors.device)[:, None]
        teacher = teacher_hidden[rows, teacher_position].reshape(batch * blocks, drafted, -1)

        # 3. Losses.
        weights = self.weights * supervised
        result = distillation_loss(
            self.drafter.drafted(hidden),
            teacher,
            self._head[0],
            labels,
            weights / weights.sum().clamp(min=1e-6),
            alpha=self.settings.alpha,
            divergence=self.settings.divergence,
            clip=self.settings.kl_clip,
        )
        loss, matches = result.loss, result.hits
        # On sampled text the teacher's next label follows from the token in the text, which may not be its argmax.
        actual = self.draft_index[input_ids.gather(1, position.reshape(batch, -1))].reshape(-1, drafted)
        going_on = matches & (labels == actual)
        reached = torch.cat([torch.ones_like(matches[:, :1]), going_on.cumprod(1)[:, :-1].bool()], 1) & supervised
        output = {"hits": (matches & reached).sum(0), "counts": reached.sum(0)}
        if self.drafter.length_head is not None:
            output["head_loss"] = self._head_loss(hidden.detach(), matches, reached, going_on)
            loss = loss + self.settings.length_head_weight * output["head_loss"]
        return {"loss": loss, **output}

    def _head_loss(self, hidden, matches, reached, going_on):
        """`survival`: cross-entropy at each depth that was reached. `length`: AdaFlash's squared error to
        (accepted + 1) / block_size, without blocks whose text ends or leaves the path before the first miss."""
        logits = self.drafter.length_head(hidden).float()
        if self.config.length_head.kind == "survival":
            losses = F.binary_cross_entropy_with_logits(logits, matches.float(), reduction="none")
            return (losses * reached).sum() / reached.sum().clamp(min=1)
        accepted = (matches & reached).sum(1)
        missed = (reached & ~matches).any(1)
        known = missed | (going_on & reached).all(1)
        label = (accepted + 1).clamp(max=self.config.block_size) / self.config.block_size
        return ((logits.sigmoid() - label) ** 2 * known).sum() / known.sum().clamp(min=1)


class AdaFlashTrainer(Trainer):
    """Trains a drafter for a target.

    Args:
        drafter: the model to train; saved alone, as `AdaFlashDrafter.from_pretrained` reads it.
        target: the frozen teacher; needed for its embedding and head even when features are cached.
        args: `AdaFlashTrainingArguments`.
        train_dataset: samples with `input_ids` and `prompt_length`, and optionally cached features.

    Raises:
        AdaFlashValueError: when drafter and target don't fit together.
        AdaFlashError: when the loss stops being finite; nothing is written to the weights by that step.
    """

    def __init__(self, drafter: AdaFlashDrafter, target: PreTrainedModel, args: AdaFlashTrainingArguments, **kwargs):
        kwargs.setdefault("data_collator", collate)
        super().__init__(model=DistillationModel(drafter, target, args), args=args, **kwargs)
        self.model_accepts_loss_kwargs = False
        self._sums: dict[str, torch.Tensor] = {}

    @property
    def drafter(self) -> AdaFlashDrafter:
        return self.accelerator.unwrap_model(self.model).drafter

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
            self._sums["steps"] = self._sums.get("steps", 0) + 1
        return (output["loss"], output) if return_outputs else output["loss"]

    def log(self, logs, *args, **kwargs):
        """Adds the teacher-forced accepted length (`tau`, bonus included), by depth, since the last log."""
        if "loss" in logs and "counts" in self._sums:
            rates = self._sums["hits"] / self._sums["counts"].clamp(min=1)
            logs["tau"] = round(1 + rates.cumprod(0).sum().item(), 4)
            logs |= {f"accepted_{k}": round(rate, 3) for k, rate in enumerate(rates.tolist(), start=1)}
            if "head_loss" in self._sums:
                logs["head_loss"] = round(self._sums["head_loss"].item() / self._sums["steps"], 4)
            self._sums = {}
        super().log(logs, *args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs)).detach()
        return loss, None, None

    def _save(self, output_dir=None, state_dict=None):
        output_dir = Path(output_dir or self.args.output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        if state_dict is not None:
            state_dict = {key.removeprefix("drafter."): value for key, value in state_dict.items()}
        self.drafter.save_pretrained(output_dir, state_dict=state_dict)
        torch.save(self.args, output_dir / "training_args.bin")

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        loaded = AdaFlashDrafter.from_pretrained(resume_from_checkpoint, dtype=self.drafter.dtype)
        self.drafter.load_state_dict(loaded.state_dict())
        self.accelerator.unwrap_model(self.model).read_draft_vocabulary()

    def _load_best_model(self):
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _clip_grad_norm(self, *args, **kwargs):
        norm = super()._clip_grad_norm(*args, **kwargs)
        if norm is not None and not torch.isfinite(torch.as_tensor(norm)):
            raise AdaFlashError(
                f"The gradient norm is {float(norm)} at step {self.state.global_step}: lower `learning_rate`; resume "
                "from the last checkpoint."
            )
        return norm
