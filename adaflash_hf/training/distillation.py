"""One training step as one module: blocks drafted on text, compared with the teacher, and turned into losses."""

from dataclasses import dataclass

import torch
from torch import distributed, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ..errors import AdaFlashValueError
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .anchors import BlockAttention, sample_anchors
from .arguments import AdaFlashTrainingArguments
from .data import FEATURE_KEYS, noisy, target_features
from .length_head import HeadLabels, length_head_loss
from .losses import distillation_loss, position_weights


# Shapes: m blocks of a batch, B slots each, k drafted tokens each, d hidden size.


@dataclass
class Blocks:
    """The blocks of a batch, drafted.

    Attributes:
        hidden: the drafter's final hidden states `[m, B, d]`.
        teacher: input of the target's head `[m, k, d]` at the position before each drafted one.
        labels: int64 `[m, k]`, the teacher's argmax as an index of the draft vocabulary, -1 outside it.
        actual: int64 `[m, k]`, the text's token, likewise.
        supervised: bool `[m, k]`, response positions inside the sequence.
    """

    hidden: torch.Tensor
    teacher: torch.Tensor
    labels: torch.Tensor
    actual: torch.Tensor
    supervised: torch.Tensor


class DistillationModel(nn.Module):
    """Drafter and target in one `forward` that does the whole step, as FSDP needs. Only the drafter has parameters
    here; the target is reached through a plain reference and never trained, moved or saved.

    Raises:
        AdaFlashValueError: when drafter and target don't fit, the drafter isn't float32, a length head is to be
            trained alone and there is none, or `narrow_blocks` meets a `length` head.
    """

    _no_split_modules = ["AdaFlashLayer"]

    def __init__(self, drafter: AdaFlashDrafter, target: PreTrainedModel, args: AdaFlashTrainingArguments):
        super().__init__()
        if drafter.dtype != torch.float32:
            raise AdaFlashValueError(
                f"The drafter's `dtype` is {drafter.dtype}, in which small steps round away: load it with "
                "`dtype=torch.float32`, and pass `bf16=True` to compute in bfloat16."
            )
        if args.length_head_only and drafter.length_head is None:
            raise AdaFlashValueError("`length_head_only` is set but the drafter has no length head: attach one.")
        if args.narrow_blocks and drafter.length_head is not None and drafter.length_head.config.kind == "length":
            raise AdaFlashValueError(
                "`narrow_blocks` is set but the drafter's length head is of kind `length`, which judges whole blocks "
                "only: leave it out, or train with a `survival` head."
            )
        self.drafter = drafter
        self.config = drafter.config
        self._target = (Target(target.eval().requires_grad_(False), drafter.config),)
        self.settings = args
        if args.length_head_only:
            drafter.requires_grad_(False)
            drafter.length_head.requires_grad_(True)
        decay = position_weights(drafter.config.num_drafted_tokens, args.position_decay)
        self.register_buffer("weights", decay, persistent=False)
        self.register_buffer("draft_index", torch.arange(drafter.config.vocab_size), persistent=False)
        self.read_draft_vocabulary()

    def read_draft_vocabulary(self) -> None:
        """Follows the drafter's `draft_token_ids`: the head's rows, and the index of each token among them or -1."""
        token_ids = getattr(self.drafter, "draft_token_ids", None)
        self._head = (self._target[0].head_rows(token_ids),)
        self._whole_head = (None if token_ids is None else self._target[0].head_rows(None),)
        if token_ids is not None:
            self.draft_index.fill_(-1)
            self.draft_index[token_ids.to(self.draft_index.device)] = torch.arange(len(token_ids)).to(self.draft_index)

    def activation_checkpointing_enable(self, *args, **kwargs):
        self.drafter.activation_checkpointing_enable(*args, **kwargs)

    def forward(self, input_ids, attention_mask, loss_mask, features=None, teacher_hidden=None, teacher_argmax=None):
        """Shapes as `data.collate` makes them. Returns `loss`, `hits` and `counts` (`[k]`, accepted and trained
        positions by depth, each given that all before were accepted), and `head_loss`."""
        settings = self.settings
        with torch.set_grad_enabled(torch.is_grad_enabled() and not settings.length_head_only):
            blocks = self.blocks(input_ids, attention_mask, loss_mask, features, teacher_hidden, teacher_argmax)
            weights = self.weights[: blocks.supervised.shape[1]] * blocks.supervised
            acceptance_weight = settings.acceptance_weight
            if acceptance_weight > 0:
                acceptance_weight = acceptance_weight / self._share(blocks.supervised.any(dim=1).sum()).clamp(min=1)
            result = distillation_loss(
                self.drafter.drafted(blocks.hidden),
                blocks.teacher,
                self._head[0],
                blocks.labels,
                weights / self._share(weights.sum()).clamp(min=1e-6),
                alpha=settings.alpha,
                divergence=settings.divergence,
                clip=settings.kl_clip,
                acceptance_weight=acceptance_weight,
                with_acceptance=settings.length_head_labels == "sampling",
                whole_head=self._whole_head[0],
            )
        head_labels = HeadLabels.of(blocks, result)
        loss = 0.0 if settings.length_head_only else result.loss
        sums = {"hits": (head_labels.matches & head_labels.reached).sum(0), "counts": head_labels.reached.sum(0)}
        output = {key: functional.pad(x, (0, len(self.weights) - len(x))) for key, x in sums.items()}
        if self.drafter.length_head is not None:
            logits = self.drafter.length_head(blocks.hidden.detach()).float()
            total, count = length_head_loss(logits, head_labels, self.drafter.length_head.config)
            output["head_loss"] = total / self._share(count).clamp(min=1e-6)
            loss = loss + settings.length_head_weight * output["head_loss"]
        return {"loss": loss, **output}

    def _share(self, count: torch.Tensor) -> torch.Tensor:
        """The mean of a count over processes, so that gradients, averaged over processes, are those of one process
        with the whole batch."""
        count = count.float()
        if not (self.training and distributed.is_available() and distributed.is_initialized()):
            return count
        distributed.all_reduce(count)
        return count / distributed.get_world_size()

    def blocks(self, input_ids, attention_mask, loss_mask, features=None, teacher_hidden=None, teacher_argmax=None):
        """Draws anchors and drafts a `Blocks` of all of them in one pass. With `narrow_blocks`, in training, B and k
        are those of the size drawn for the step."""
        config, target = self.config, self._target[0]
        if features is None:
            made = target_features(target, input_ids, attention_mask)
            features, teacher_hidden, teacher_argmax = (made[key] for key in FEATURE_KEYS)
        if self.training and self.settings.feature_noise > 0:
            features = noisy(features, loss_mask, self.settings.feature_noise)
        size, count = config.block_size, self.settings.anchors_per_sequence
        if self.training and self.settings.narrow_blocks:
            size = int(torch.randint(2, size + 1, ()))
            count = count * config.block_size // size
        anchors, used = sample_anchors(loss_mask, count)
        batch, count = anchors.shape
        length, device = input_ids.shape[1], anchors.device
        drafted = size - config.block_size + config.num_drafted_tokens

        # 1. Draft every block in one pass.
        slots = torch.arange(size, device=device)
        noise_ids = torch.full((batch, count, size), config.mask_token_id, device=device)
        noise_ids[..., 0] = input_ids.gather(1, anchors)
        with torch.no_grad():
            noise = target.embed(noise_ids.reshape(batch, -1))
        context_positions = torch.arange(length, device=device).expand(batch, -1)
        hidden = self.drafter(
            noise_embeds=noise,
            context_hidden_states=features,
            position_ids=torch.cat([context_positions, (anchors[..., None] + slots).reshape(batch, -1)], dim=1),
            ragged=BlockAttention(anchors, used, length, config, size),
        ).last_hidden_state

        # 2. Supervised positions: drafted token k of anchor a is position a + k, its teacher sits at a + k - 1.
        position = anchors[..., None] + torch.arange(1, drafted + 1, device=device)
        inside = used[..., None] & (position < length)
        position = position.clamp(max=length - 1).reshape(batch, -1)
        rows = torch.arange(batch, device=device)[:, None]
        return Blocks(
            hidden=hidden.reshape(batch * count, size, -1),
            teacher=teacher_hidden[rows, position - 1].reshape(batch * count, drafted, -1),
            labels=self.draft_index[teacher_argmax.gather(1, position - 1)].reshape(-1, drafted),
            actual=self.draft_index[input_ids.gather(1, position)].reshape(-1, drafted),
            supervised=(inside.reshape(batch, -1) & loss_mask.gather(1, position)).reshape(-1, drafted),
        )
