"""Configurations of the block-diffusion drafter, its adaptive length head, and their generation policy.

Words used throughout the package: the *target* is the model whose output is wanted; the *drafter* proposes; the
*anchor* is the last committed token; a *block* is the anchor followed by `block_size - 1` mask tokens; the *tapped
layers* are the target layers whose outputs the drafter reads as context.
"""

from huggingface_hub.dataclasses import strict
from transformers import GenerationConfig, PreTrainedConfig

from .errors import AdaFlashValueError


LABEL_CONVENTIONS = ("fill_in", "sample_from_anchor")
LENGTH_HEAD_KINDS = ("length", "survival")
LENGTH_POLICIES = ("budget", "head", "fixed")


@strict
class AdaptiveLengthConfig(PreTrainedConfig):
    """Configuration of an `AdaptiveLengthHead`.

    Args:
        kind: `length` (AdaFlash: one number per block, its share worth verifying) or `survival` (one logit per
            drafted position for "accepted, given that all before were").
        hidden_size: width of the drafter's hidden states.
        block_size: slots of a block, anchor included.
        num_drafted_tokens: drafted positions of a block; `block_size - 1` unless the anchor slot drafts too.
        bottleneck_size: inner width of the head.
        calibrated: whether a `survival` checkpoint holds `position_scale`, one over the temperature per position.
    """

    model_type = "adaflash_length_head"

    kind: str = "length"
    hidden_size: int = 0
    block_size: int = 16
    num_drafted_tokens: int | None = None
    bottleneck_size: int = 256
    calibrated: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs):
        if self.num_drafted_tokens is None:
            self.num_drafted_tokens = self.block_size - 1
        super().__post_init__(**kwargs)
        if self.kind not in LENGTH_HEAD_KINDS:
            raise AdaFlashValueError(f"`kind` of the length head is {self.kind!r}: use one of {LENGTH_HEAD_KINDS}.")

    def check_complete(self) -> None:
        """Raises AdaFlashValueError when a value that has no sensible default was left out."""
        if self.hidden_size < 1:
            raise AdaFlashValueError(
                f"`hidden_size` of the length head is {self.hidden_size}: set it to the drafter's hidden size."
            )


@strict
class AdaFlashConfig(PreTrainedConfig):
    """Configuration of an `AdaFlashDrafter`.

    Args:
        vocab_size: the target's vocabulary size.
        hidden_size: the target's hidden size, since the drafter borrows its embedding and head.
        num_hidden_layers: layers of the drafter.
        block_size: slots of a block, anchor included (at least 2).
        mask_token_id: id inside the target's embedding that marks a slot to fill.
        target_layer_ids: 0-based indices of the tapped target layers; layer i's output is `hidden_states[i + 1]`.
        num_target_layers: layers of the target, to check `target_layer_ids` and the target itself.
        label_convention: `fill_in` (slot 0 holds the anchor, slots 1.. predict their own position) or
            `sample_from_anchor` (slot k predicts position k + 1, so the anchor slot drafts too).
        use_qk_norm: normalise queries and keys per head, as Qwen3 does.
        layer_types: `full_attention` or `sliding_attention` for each drafter layer.
        sliding_window: positions that a sliding layer sees back from the query; the query's own counts where the
            layer is causal, and doesn't where it isn't, as in transformers.
        sliding_window_causal: whether sliding layers are causal inside the block.
        rope_parameters: RoPE settings, theta and `partial_rotary_factor` included.
        draft_vocab_size: when set, draft logits are taken on this many rows of the target's head, listed in the
            checkpoint's `draft_token_ids`.
        length_head: configuration of the length head that the checkpoint carries, if any.
        target_model: repo id or path of the target, for messages and the model card.

    Raises:
        AdaFlashValueError: for a value that can't work, naming the key.
    """

    model_type = "adaflash"
    sub_configs = {"length_head": AdaptiveLengthConfig}
    default_theta = 10000.0

    vocab_size: int | None = None
    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 3
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    mlp_bias: bool = False
    initializer_range: float = 0.02
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_causal: bool = True
    use_qk_norm: bool = True

    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    label_convention: str = "fill_in"
    draft_vocab_size: int | None = None
    length_head: dict | AdaptiveLengthConfig | None = None
    target_model: str | None = None

    def __post_init__(self, **kwargs):
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * self.num_hidden_layers
        if isinstance(self.length_head, dict):
            known = {key: value for key, value in self.length_head.items() if key != "model_type"}
            if known.get("num_drafted_tokens") is None:
                known["num_drafted_tokens"] = self.num_drafted_tokens
            self.length_head = AdaptiveLengthConfig(**known)
        super().__post_init__(**kwargs)
        self._check_values()

    @property
    def num_drafted_tokens(self) -> int:
        """Tokens that one block proposes."""
        return self.block_size - (self.label_convention == "fill_in")

    def _check_values(self) -> None:
        if self.block_size < 2:
            raise AdaFlashValueError(
                f"`block_size` is {self.block_size}: a block holds the anchor and at least one mask, so use 2 or more."
            )
        if self.label_convention not in LABEL_CONVENTIONS:
            raise AdaFlashValueError(
                f"`label_convention` is {self.label_convention!r}: use one of {LABEL_CONVENTIONS}."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise AdaFlashValueError(
                f"`layer_types` lists {len(self.layer_types)} layers but `num_hidden_layers` is "
                f"{self.num_hidden_layers}: give one entry per drafter layer."
            )
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise AdaFlashValueError(
                f"`layer_types` contains {sorted(unknown)}: use `full_attention` or `sliding_attention`."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise AdaFlashValueError(
                "`sliding_window` is missing: `layer_types` asks for sliding attention, so set it."
            )
        if self.mask_token_id is not None and self.vocab_size is not None:
            if not 0 <= self.mask_token_id < self.vocab_size:
                raise AdaFlashValueError(
                    f"`mask_token_id` is {self.mask_token_id}, outside the embedding of {self.vocab_size} rows: "
                    "use an id below `vocab_size`."
                )
        if self.target_layer_ids is not None and self.num_target_layers is not None:
            outside = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
            if outside:
                raise AdaFlashValueError(
                    f"`target_layer_ids` contains {outside}, outside the target's {self.num_target_layers} layers: "
                    f"use 0 to {self.num_target_layers - 1}."
                )
        if self.draft_vocab_size is not None and self.vocab_size is not None:
            if not 0 < self.draft_vocab_size <= self.vocab_size:
                raise AdaFlashValueError(
                    f"`draft_vocab_size` is {self.draft_vocab_size}: use 1 to `vocab_size` ({self.vocab_size})."
                )
        head = self.length_head
        if head is not None:
            theirs = head.hidden_size, head.block_size, head.num_drafted_tokens
            ours = self.hidden_size, self.block_size, self.num_drafted_tokens
            if theirs != ours:
                raise AdaFlashValueError(
                    f"`length_head` has hidden size, block size, drafted tokens {theirs}, the drafter {ours}: "
                    "train or load a head made for this drafter."
                )

    def check_complete(self) -> None:
        """Raises AdaFlashValueError when a value that has no sensible default was left out."""
        for key, remedy in (
            ("vocab_size", "set it to the target's vocabulary size"),
            ("mask_token_id", "set it to the id that the drafter was trained with, never to the padding token"),
            ("target_layer_ids", "list the 0-based target layers that the drafter reads"),
        ):
            if getattr(self, key) in (None, []):
                raise AdaFlashValueError(f"`{key}` is missing from the drafter's configuration: {remedy}.")


class AdaFlashGenerationConfig(GenerationConfig):
    """Policy settings of a drafter, saved beside it in `generation_config.json`.

    Args:
        length_policy: `budget` (default) verifies what commits the most expected tokens per second on this machine,
            over all rows, from the drafter's block or from the row's own text; `head` asks the length head, row by
            row (AdaFlash's rule); `fixed` verifies the whole block.
        lookup_tokens: with `budget`, most tokens proposed from a match in the row's own text; 0 switches lookup off.
        length_rate: factor on the `length` head's answer (AdaFlash's threshold rate).
        min_candidate_length: shortest candidate, anchor slot included: length c verifies c - 1 drafted tokens.
        survival_threshold: with a `survival` head, positions whose survival probability is below are not verified.
            Break-even is the cost of one more verified token over the cost of one committed token: about 0.05 where
            verification is nearly free (a GPU at batch size 1), 0.3 where it is dear.
        num_assistant_tokens: most drafted tokens per step; `None` means the whole block.
        context_window: the drafter looks at, and keeps, this many of the latest committed tokens only; `None` means
            all. What it costs in acceptance, it saves in memory and draft time on long contexts.
    """

    def __init__(self, **kwargs):
        self.length_policy = kwargs.pop("length_policy", None) or "budget"
        self.lookup_tokens = kwargs.pop("lookup_tokens", 10)
        self.length_rate = kwargs.pop("length_rate", 1.0)
        self.min_candidate_length = kwargs.pop("min_candidate_length", 1)
        self.survival_threshold = kwargs.pop("survival_threshold", 0.1)
        self.context_window = kwargs.pop("context_window", None)
        super().__init__(**kwargs)

    @classmethod
    def from_model_config(cls, model_config):
        """The defaults: a drafter's model configuration holds no generation settings."""
        return cls()

    def validate(self, **kwargs):
        super().validate(**kwargs)
        if self.lookup_tokens < 0:
            raise AdaFlashValueError(f"`lookup_tokens` is {self.lookup_tokens}: use 0 or more.")
        if self.length_policy not in LENGTH_POLICIES:
            raise AdaFlashValueError(f"`length_policy` is {self.length_policy!r}: use one of {LENGTH_POLICIES}.")
        if not self.length_rate > 0:
            raise AdaFlashValueError(f"`length_rate` is {self.length_rate}: use a number above 0.")
        if not self.min_candidate_length >= 1:
            raise AdaFlashValueError(f"`min_candidate_length` is {self.min_candidate_length}: use 1 or more.")
        if not 0 <= self.survival_threshold <= 1:
            raise AdaFlashValueError(f"`survival_threshold` is {self.survival_threshold}: use 0 to 1.")
        if self.context_window is not None and self.context_window < 1:
            raise AdaFlashValueError(f"`context_window` is {self.context_window}: use 1 or more, or None for all.")
        if self.num_assistant_tokens is not None and self.num_assistant_tokens < 0:
            raise AdaFlashValueError(f"`num_assistant_tokens` is {self.num_assistant_tokens}: use 0 or more.")


__all__ = ["AdaFlashConfig", "AdaFlashGenerationConfig", "AdaptiveLengthConfig"]
