"""Attention for packed tokens of several sequences over a `RaggedCache`.

Linear layers run on packed tokens `[1, T]`; only attention knows of rows (`kernels.ragged_attention`). Registered with
transformers under a name without "flash", which would make transformers look for a flash-attention kernel.
"""

import torch
from torch.nn import functional as F

from .. import kernels
from ..errors import AdaFlashError
from ..kernels import RaggedQueries


# Elements of the largest mask that is kept from layer to layer.
_KEPT_MASK = 2**20


class PackedBatch(RaggedQueries):
    """The tokens of one forward pass: which row and position each has.

    Args:
        query_rows, query_positions, num_rows, longest, counts, block_ends, ring: as in `RaggedQueries`.
        key_rows, key_positions: int64 `[K]`, tokens whose keys are written; the queries themselves by default.
        key_sources: int64 `[K]`, the packed token that each key is taken from, where rows share some (prefill).
        prompt_lengths: per row with queries, the slots that it holds after this pass, where that is all it has ever
            held (prefill): whole prompts then need no mask.
        keep_weights: collect attention weights in `weights`, per layer `[heads, T, longest]` and the layer's window.
        span: first and last slot, plus one, of the keys of the only row, where they are known to be consecutive.
    """

    def __init__(
        self,
        query_rows: torch.Tensor,
        query_positions: torch.Tensor,
        num_rows: int,
        longest: int,
        counts: list[int],
        key_rows: torch.Tensor | None = None,
        key_positions: torch.Tensor | None = None,
        block_ends: torch.Tensor | None = None,
        key_sources: torch.Tensor | None = None,
        prompt_lengths: list[int] | None = None,
        ring: int | None = None,
        keep_weights: bool = False,
        span: tuple[int, int] | None = None,
    ):
        super().__init__(query_rows, query_positions, num_rows, longest, counts, block_ends, ring)
        self.key_rows = query_rows if key_rows is None else key_rows
        self.key_positions = query_positions if key_positions is None else key_positions
        self.key_slots = self.key_positions if ring is None else self.key_positions % ring
        self.key_sources = key_sources
        self.prompt_lengths, self._tails = prompt_lengths, {}
        self.keep_weights, self.weights = keep_weights, []
        self.span = span
        self.windows: dict[torch.nn.Module, int | None] = {}
        self.used = False

    def attention(
        self,
        module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask=None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        """Attention with transformers' interface.

        Args:
            query: `[1, heads, T, D]`, packed.
            key, value: `[rows, kv_heads, longest, D]`, from `RaggedCache.update`.
            s_aux: one attention-sink logit per head.

        Returns:
            `[1, T, heads, D]` and `None` for the weights.
        """
        self.used = True
        bare = module.is_causal and sliding_window is None and softcap is None and s_aux is None
        if self.prompt_lengths is not None and bare:
            return self._prefill_attention(query, key, value, scaling), None
        packed = query[0].transpose(0, 1)
        arguments = packed, key, value, self, module.is_causal, sliding_window, scaling, softcap, s_aux
        if not self.keep_weights:
            return kernels.ragged_attention(*arguments)[None], None
        output, weights = kernels.ragged_attention_with_weights(*arguments)
        self.weights.append((weights, sliding_window))
        return output[None], None

    def _tail_mask(self, row: int, count: int, length: int, device: torch.device) -> torch.Tensor:
        """Bool `[count, length]`, for the end of a prompt that began in another row. Kept for the other layers, on
        each device, unless it is large: masks of many long rows would fill the memory."""
        mask = self._tails.get((row, device))
        if mask is None:
            mask = torch.ones(count, length, dtype=torch.bool, device=device).tril(length - count)
            if mask.numel() <= _KEPT_MASK:
                self._tails[row, device] = mask
        return mask

    def _prefill_attention(self, query, key, value, scaling) -> torch.Tensor:
        """Row by row and causal, so that a long prompt never needs a mask of its length squared."""
        outputs, start = [], 0
        for row, (count, length) in enumerate(zip(self.counts, self.prompt_lengths, strict=True)):
            if not count:
                continue
            mask = self._tail_mask(row, count, length, query.device) if count < length else None
            outputs.append(
                F.scaled_dot_product_attention(
                    query[:, :, start : start + count],
                    key[row : row + 1, :, :length],
                    value[row : row + 1, :, :length],
                    attn_mask=mask,
                    is_causal=mask is None,
                    scale=scaling,
                    enable_gqa=True,
                )
            )
            start += count
        return torch.cat(outputs, dim=2).transpose(1, 2)


# Tensors that transformers' models hand through to the attention and that packed attention has or doesn't need.
_KNOWN_TENSORS = {"s_aux", "position_ids", "position_embeddings", "cache_position"}


def ragged_attention(module, query, key, value, attention_mask=None, ragged: PackedBatch | None = None, **kwargs):
    """The attention function registered with transformers; the batch arrives as the keyword `ragged`.

    Raises:
        AdaFlashError: when the model was called from elsewhere during a packed pass, or passes an argument that
            packed attention doesn't know.
    """
    if ragged is None:
        raise AdaFlashError(
            "The target is generating with a drafter in another thread: run plain calls on the same model object "
            "before or after, or load the model twice."
        )
    if kwargs.get("sliding_window") is None:
        if module not in ragged.windows:  # a configuration takes its time to answer
            ragged.windows[module] = _window(module)
        kwargs["sliding_window"] = ragged.windows[module]
    unknown = [key for key, value in kwargs.items() if isinstance(value, torch.Tensor) and key not in _KNOWN_TENSORS]
    if unknown:
        raise AdaFlashError(
            f"{type(module).__name__} passes `{unknown[0]}` to its attention, which packed verification doesn't know: "
            "generate without the drafter."
        )
    return ragged.attention(module, query, key, value, attention_mask, **kwargs)


def _window(module) -> int | None:
    """The sliding window of models that put it into the mask only (Qwen2-MoE, PhiMoE)."""
    window = getattr(module, "sliding_window", None)
    if window is None:
        kinds = getattr(module.config, "layer_types", None)
        if kinds is None or kinds[module.layer_idx] == "sliding_attention":
            window = getattr(module.config, "sliding_window", None)
    return window or None
