"""`AdaFlashTrainingArguments`: `TrainingArguments` and the settings of distillation."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..errors import AdaFlashValueError
from .losses import DIVERGENCES


MODES = ("offline", "on_policy")
HEAD_LABELS = ("greedy", "sampling")


@dataclass
class AdaFlashTrainingArguments(TrainingArguments):
    """TrainingArguments and the settings of distillation.

    Raises:
        AdaFlashValueError: for a value that can't work, naming the key.
    """

    mode: str = field(default="offline", metadata={"help": f"Where text comes from: one of {MODES}."})
    anchors_per_sequence: int = field(
        default=512, metadata={"help": "Most whole blocks drawn from one sequence and step."}
    )
    narrow_blocks: bool = field(
        default=False,
        metadata={"help": "Draw each step's block size from 2 up to the drafter's, with as many slots in all."},
    )
    alpha: float = field(default=0.8, metadata={"help": "Weight of cross-entropy on the teacher argmax, 0 to 1."})
    divergence: str = field(default="reverse_kl", metadata={"help": f"The rest of the loss: one of {DIVERGENCES}."})
    kl_clip: float | None = field(default=10.0, metadata={"help": "Cap of the divergence per token, in nats."})
    acceptance_weight: float = field(
        default=0.0, metadata={"help": "Weight of the end-to-end term, one minus the share of a block accepted."}
    )
    position_decay: float = field(default=4.0, metadata={"help": "gamma of the position weights, in positions."})
    feature_noise: float = field(
        default=0.0,
        metadata={"help": "Normal noise on context features in training, in standard deviations of each feature."},
    )
    length_head_weight: float = field(default=1.0, metadata={"help": "Weight of the length head's loss."})
    length_head_labels: str = field(
        default="greedy",
        metadata={"help": "`greedy`: match with the teacher's argmax; `sampling`: probability of acceptance."},
    )
    length_head_only: bool = field(default=False, metadata={"help": "Train the length head of a finished drafter."})
    length_head_learning_rate: float | None = field(
        default=None, metadata={"help": "The length head's own learning rate; default `learning_rate`."}
    )
    exchange: str | None = field(
        default=None, metadata={"help": "on_policy: folder shared with workers; default OUTPUT_DIR/exchange."}
    )
    steps_per_version: int = field(default=64, metadata={"help": "on_policy: steps between published drafters."})
    rollout_passes: int = field(default=1, metadata={"help": "on_policy: times that each rollout is trained on."})
    max_staleness: int = field(
        default=2, metadata={"help": "on_policy: rollouts of drafters more versions older than this are passed over."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Left off: features must reach the model."})

    def __post_init__(self):
        # Every process reads the same stream and takes its share. Batches sent out by one process must all have the
        # same length, which padding per batch doesn't give.
        if self.accelerator_config is None:
            self.accelerator_config = {"dispatch_batches": False}
        super().__post_init__()
        if self.n_gpu > 1:  # one process with several GPUs: DataParallel would copy the drafter, but not the target
            self._n_gpu = 1
        for key, allowed in (("mode", MODES), ("divergence", DIVERGENCES), ("length_head_labels", HEAD_LABELS)):
            if getattr(self, key) not in allowed:
                raise AdaFlashValueError(f"`{key}` is {getattr(self, key)!r}: use one of {allowed}.")
        if not 0 <= self.alpha <= 1:
            raise AdaFlashValueError(f"`alpha` is {self.alpha}: use 0 to 1.")
        if not self.position_decay > 0:
            raise AdaFlashValueError(f"`position_decay` is {self.position_decay}: use a number above 0.")
        for key in ("feature_noise", "acceptance_weight", "length_head_weight"):
            if not getattr(self, key) >= 0:
                raise AdaFlashValueError(f"`{key}` is {getattr(self, key)}: use 0 or more.")
        # A version's first rollouts are asked for one step before it is published, so they are one version older.
        for key in ("anchors_per_sequence", "steps_per_version", "rollout_passes", "max_staleness"):
            if getattr(self, key) < 1:
                raise AdaFlashValueError(f"`{key}` is {getattr(self, key)}: use 1 or more.")
        if self.fp16:
            raise AdaFlashValueError("`fp16` can't hold the gradients of rare tokens: use `bf16`, or neither.")
        if self.push_to_hub:
            raise AdaFlashValueError(
                "`push_to_hub` would upload all of `output_dir`, training text included: leave it out, and call "
                "`push_to_hub` of the finished drafter, or `hf upload REPO OUTPUT_DIR/drafter`."
            )
        if self.mode == "on_policy" and self.max_steps < 1:
            raise AdaFlashValueError("`max_steps` is missing: rollouts never end, so say how long to train.")
