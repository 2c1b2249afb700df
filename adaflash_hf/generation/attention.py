"""Attention for packed tokens of several sequences over a `RaggedCache`.

Linear layers run on packed tokens `[1, T]`; only here is the query block padded to `[rows, Q]`. Registered with
transformers under a name without "flash", which would make transformers look for a flash-attention kernel.
"""

import torch
from torch.nn import functional as F

from ..errors import AdaFlashError


class PackedBatch:
    """The tokens of one forward pass: which row and position each has.

    Args:
        query_rows, query_positions: int64 `[T]`, tokens that attend; those of a row are consecutive.
        key_rows, key_positions: int64 `[K]`, tokens whose keys are written; the queries themselves by default.
        longest: slots to attend over, one more than the highest position of any row.
        block_ends: int64 `[rows]`, last slot that a row's queries may see, where attention isn't causal.
        starts_at_zero: whether every row begins here (prefill), which needs no mask.
        ring: positions that the cache has slots for, where it keeps only the latest ones of each row: position p lies
            in slot p modulo `ring`. `None` where each position has its own slot.
        keep_weights: collect attention weights in `weights`, per layer `[heads, T, longest]` and the layer's window.
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
        starts_at_zero: bool = False,
        ring: int | None = None,
        keep_weights: bool = False,
    ):
        self.query_rows, self.query_positions = query_rows, query_positions
        self.key_rows = query_rows if key_rows is None else key_rows
        self.key_positions = query_positions if key_positions is None else key_positions
        self.key_slots = self.key_positions if ring is None else self.key_positions % ring
        self.ring, self.longest = ring, longest if ring is None else min(longest, ring)
        self.num_rows, self.counts = num_rows, counts
        self.block_ends = block_ends
        self.width = max(counts)
        self.rectangular = min(counts) == self.width and len(counts) == num_rows
        self.starts_at_zero = starts_at_zero
        self.keep_weights, self.weights = keep_weights, []
        self.used = False
        self._masks: dict[tuple, torch.Tensor | None] = {}
        if not self.rectangular:
            starts = torch.tensor([0, *counts]).cumsum(0)[:-1].to(query_rows.device)
            self.columns = torch.arange(len(query_rows), device=query_rows.device) - starts[query_rows]

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """`[T, ...]` to `[rows, Q, ...]`."""
        if self.rectangular:
            return packed.reshape(self.num_rows, self.width, *packed.shape[1:])
        padded = packed.new_zeros(self.num_rows, self.width, *packed.shape[1:])
        padded[self.query_rows.to(packed.device), self.columns.to(packed.device)] = packed
        return padded

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """`[rows, Q, ...]` to `[T, ...]`."""
        if self.rectangular:
            return padded.flatten(0, 1)
        return padded[self.query_rows.to(padded.device), self.columns.to(padded.device)]

    def mask(self, causal: bool, window: int | None, groups: int) -> torch.Tensor | None:
        """Bool `[rows, 1, groups * Q, longest]`, true where a query may look; `None` when it may look everywhere.
        Made once per forward pass and kind of layer."""
        key = (causal, window, groups)
        if key not in self._masks:
            self._masks[key] = self._make_mask(causal, window, groups)
        return self._masks[key]

    def _make_mask(self, causal: bool, window: int | None, groups: int) -> torch.Tensor | None:
        if self.num_rows == 1 and window is None and (self.width == 1 or not causal):
            return None
        positions = self.pad(self.query_positions)
        last = positions if causal else self.block_ends[:, None].expand_as(positions)
        slots = torch.arange(self.longest, device=positions.device)
        if self.ring is not None:  # from here on, the positions that the slots hold; below 0 where they hold none
            slots = (self.block_ends[:, None] - (self.block_ends[:, None] - slots) % self.ring)[:, None]
        mask = (slots <= last[..., None]) & (slots >= 0)
        if window is not None:
            # transformers counts the query's own position in a causal window, and not in a bidirectional one.
            reach = window - 1 if causal else window
            mask = mask & (slots >= positions[..., None] - reach)
        return mask[:, None].repeat(1, 1, groups, 1)

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
        heads, kv_heads = query.shape[1], key.shape[1]
        groups = heads // kv_heads
        plain = softcap is None and s_aux is None
        if self.starts_at_zero and module.is_causal and sliding_window is None and plain:
            return self._prefill_attention(query, key, value, scaling), None
        padded = self.pad(query[0].transpose(0, 1)).transpose(1, 2)
        # Heads that share keys are stacked along the query axis, so that keys are never repeated in memory.
        folded = padded.reshape(self.num_rows, kv_heads, groups * self.width, -1)
        mask = self.mask(module.is_causal, sliding_window, groups)
        mask = None if mask is None else mask.to(query.device)
        if plain and not self.keep_weights:
            output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
        else:
            output, weights = _eager_attention(folded, key, value, mask, scaling, softcap, s_aux, groups)
            if self.keep_weights:
                weights = weights.reshape(self.num_rows, heads, self.width, -1).transpose(1, 2)
                self.weights.append((self.unpad(weights).transpose(0, 1), sliding_window))
        output = output.reshape(self.num_rows, heads, self.width, -1).transpose(1, 2)
        return self.unpad(output)[None], None

    def _prefill_attention(self, query, key, value, scaling) -> torch.Tensor:
        """Row by row and causal, so that a long prompt never needs a mask of its length squared."""
        outputs, start = [], 0
        for row, count in enumerate(self.counts):
            outputs.append(
                F.scaled_dot_product_attention(
                    query[:, :, start : start + count],
                    key[row : row + 1, :, :count],
                    value[row : row + 1, :, :count],
                    is_causal=True,
                    scale=scaling,
                    enable_gqa=True,
                )
            )
            start += count
        return torch.cat(outputs, dim=2).transpose(1, 2)


def _eager_attention(query, key, value, mask, scaling, softcap, sinks, groups):
    """Attention whose weights are wanted, or with soft-capped logits (Gemma 2) or attention sinks (gpt-oss), which
    the fused kernel has no room for. Returns output and weights."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = logits.softmax(dim=-1)
    else:
        width = query.shape[2] // groups
        sink = sinks.float().reshape(1, key.shape[1], groups).repeat_interleave(width, dim=-1)[..., None]
        sink = sink.expand(query.shape[0], -1, -1, -1)
        weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    weights = weights.to(value.dtype)
    return torch.matmul(weights, value), weights


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
        kwargs["sliding_window"] = _window(module)
    unknown = [key for key, value in kwargs.items() if torch.is_tensor(value) and key not in _KNOWN_TENSORS]
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
