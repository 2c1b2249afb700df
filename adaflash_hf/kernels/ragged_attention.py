"""Attention of packed queries over a ragged cache: slot j of a row holds that row's position j.

Used for verification (causal: a query sees its row's slots up to its own position) and for the drafter's block
(bidirectional: a query sees its row's slots up to the end of the block). T = packed queries, H = query heads, Hkv =
key heads, D = head size, S = slots.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..errors import AdaFlashValueError
from .dispatch import takes_triton
from .greedy_verify import check_rows_contiguous


# What a row of a rectangle, and a row on its own, cost torch's attention on a CPU beside their queries, in queries
# (measured over 120 and 300 slots, 4 to 32 rows).
_ROW, _ALONE = 8, 25


@dataclass
class Tail:
    """Queries of one row that are attended on their own.

    Attributes:
        row: the row.
        first, last: its packed queries, `last` excluded.
        length: slots that they can see.
        mask: added to logits, `[last - first, length]`, or `None` where all may see all of them.
    """

    row: int
    first: int
    last: int
    length: int
    mask: torch.Tensor | None


class RaggedQueries:
    """The queries of one forward pass: which row and position each has. Made once, used by every layer.

    Args:
        query_rows, query_positions: int64 `[T]`; the queries of a row are consecutive, rows in order, and so are the
            positions within a row.
        num_rows: rows of the cache.
        longest: slots to attend over, one more than the highest position of any row.
        counts: queries per row, maybe 0.
        block_ends: int64 `[rows]`, last position that a row's queries may see, where attention isn't causal.
        ring: positions that the cache has slots for, where it keeps only the latest ones of each row: position p lies
            in slot p modulo `ring`. `None` where each position has its own slot. Needs `block_ends`.
    """

    def __init__(
        self,
        query_rows: torch.Tensor,
        query_positions: torch.Tensor,
        num_rows: int,
        longest: int,
        counts: list[int],
        block_ends: torch.Tensor | None = None,
        ring: int | None = None,
    ):
        self.query_rows, self.query_positions = query_rows, query_positions
        self.ring, self.longest = ring, longest if ring is None else min(longest, ring)
        self.num_rows, self.counts = num_rows, counts
        self.block_ends = block_ends
        self.width = max(counts)
        self.rectangular = min(counts) == self.width and len(counts) == num_rows
        self.offsets = torch.tensor([0, *counts]).cumsum(0).to(query_rows.device)
        self._masks: dict[tuple, torch.Tensor | None] = {}
        self._parts: dict[tuple, tuple] = {}
        if not self.rectangular:
            self.columns = torch.arange(len(query_rows), device=query_rows.device) - self.offsets[query_rows]

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

    def parts(
        self, causal: bool, window: int | None, dtype: torch.dtype
    ) -> tuple["RaggedQueries | None", torch.Tensor | None, list[Tail]]:
        """For a CPU, where a padded query costs as much as a real one: the first few queries of every row as a
        rectangle of their own, where they lie in the packed queries (int64), and what is left of the long rows.

        `(self, None, [])` where padding to the longest row is cheapest; no rectangle where each row is best alone.
        Made once per forward pass and kind of layer.
        """
        key = causal, window, dtype
        if key not in self._parts:
            self._parts[key] = self._make_parts(causal, window, dtype)
        return self._parts[key]

    def _make_parts(self, causal, window, dtype):
        def cost(width: int) -> int:
            tails = [count - width + _ALONE for count in self.counts if count > width]
            return (self.num_rows * (_ROW + width) if width else 0) + sum(tails)

        width = min(sorted({0, *self.counts}, reverse=True), key=cost)
        if width == self.width or self.ring is not None:
            return self, None, []
        ends = None if self.block_ends is None else self.block_ends.tolist()
        positions, tails, first = self.query_positions, [], 0
        for row, count in enumerate(self.counts):
            start, first = first + min(width, count), first + count
            if start < first:
                own = positions[start:first, None]
                length = 1 + (int(own[-1]) if causal else ends[row])
                slots = torch.arange(length, device=own.device)
                mask = slots <= own if causal and len(own) > 1 else None
                if window is not None:
                    near = slots >= own - reach(causal, window)
                    mask = near if mask is None else mask & near
                tails.append(Tail(row, start, first, length, None if mask is None else additive(mask, dtype)))
        if not width:
            return None, None, tails
        counts = [min(width, count) for count in self.counts]
        kept = torch.cat([torch.arange(n) + int(start) for n, start in zip(counts, self.offsets[:-1], strict=True)])
        kept = kept.to(positions.device)
        longest = 1 + (int(positions[kept].max()) if causal else max(ends))
        rows = self.query_rows[kept]
        return RaggedQueries(rows, positions[kept], self.num_rows, longest, counts, self.block_ends), kept, tails

    def mask(self, causal: bool, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Added to logits, `[rows, 1, groups * Q, longest]`: 0 where a query may look, else -inf; `None` when it may
        look everywhere. Made once per forward pass and kind of layer; torch's attention would make as much of a bool
        mask in each layer."""
        key = (causal, window, groups, dtype)
        if key not in self._masks:
            self._masks[key] = self._make_mask(causal, window, groups, dtype)
        return self._masks[key]

    def _make_mask(self, causal: bool, window: int | None, groups: int, dtype: torch.dtype) -> torch.Tensor | None:
        if self.num_rows == 1 and window is None and (self.width == 1 or not causal):
            return None
        positions = self.pad(self.query_positions)
        last = positions if causal else self.block_ends[:, None].expand_as(positions)
        slots = torch.arange(self.longest, device=positions.device)
        if self.ring is not None:  # from here on, the positions that the slots hold; below 0 where they hold none
            slots = (self.block_ends[:, None] - (self.block_ends[:, None] - slots) % self.ring)[:, None]
        mask = (slots <= last[..., None]) & (slots >= 0)
        if window is not None:
            mask = mask & (slots >= positions[..., None] - reach(causal, window))
        return additive(mask[:, None].repeat(1, 1, groups, 1), dtype)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask as what is added to logits."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


def reach(causal: bool, window: int) -> int:
    """Slots before its own that a query sees: transformers counts the query's own position in a causal window, and
    not in a bidirectional one."""
    return window - 1 if causal else window


def ragged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: RaggedQueries,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of each packed query over the slots of its own row.

    Args:
        query: `[T, H, D]`, float16, bfloat16 or float32.
        key, value: `[rows, Hkv, S, D]` with S at least `queries.longest`; H is a multiple of Hkv. They and `query`
            may be strided, except along D.
        causal: a query sees slots up to its own position; else up to its row's `block_ends`.
        window: also only the last `window` slots, own position included if causal.
        scale: of the logits; D ** -0.5 if left out.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2).
        sinks: `[H]`, a logit per head that takes part in the softmax without a value (gpt-oss).

    Returns:
        `[T, H, D]`.

    Raises:
        AdaFlashValueError: for shapes that don't fit together, or tensors strided along D.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % kv_heads or key.shape != value.shape or key.shape[2] < queries.longest:
        raise AdaFlashValueError(
            f"`query` is {list(query.shape)}, `key` {list(key.shape)} and `value` {list(value.shape)} for "
            f"{queries.longest} slots: pass [T, H, D] and [rows, Hkv, S, D] with H a multiple of Hkv."
        )
    if not causal and queries.block_ends is None:
        raise AdaFlashValueError("`causal` is false and `queries` has no `block_ends`: give each row's last slot.")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if queries.ring is None and takes_triton(query):
        from .ragged_attention_triton import ragged_attention_triton

        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_rows_contiguous(name, tensor)
        return ragged_attention_triton(query, key, value, queries, causal, window, scale, softcap, sinks)
    return ragged_attention_torch(query, key, value, queries, causal, window, scale, softcap, sinks)


def ragged_attention_torch(query, key, value, queries, causal, window, scale, softcap, sinks) -> torch.Tensor:
    """The PyTorch twin of `ragged_attention`: the query block padded to `[rows, Q]` and masked; on a CPU, rows with
    many more queries than the others in part on their own."""
    if softcap is not None or sinks is not None:
        return ragged_attention_with_weights(query, key, value, queries, causal, window, scale, softcap, sinks)[0]
    if (
        len(query) == queries.num_rows == 1
    ):  # a third faster than heads stacked, since there are more of them than threads
        mask = queries.mask(causal, window, 1, query.dtype)
        mask = None if mask is None else mask.to(query.device)
        key, value = in_use(key, queries), in_use(value, queries)
        return F.scaled_dot_product_attention(
            query[None].transpose(1, 2), key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )[:, :, 0]
    if query.device.type != "cpu":
        return _rectangle(query, key, value, queries, causal, window, scale)
    rectangle, kept, tails = queries.parts(causal, window, query.dtype)
    if not tails:
        return _rectangle(query, key, value, queries, causal, window, scale)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if rectangle is not None:
        output[kept] = _rectangle(query[kept], key, value, rectangle, causal, window, scale)
    for tail in tails:
        part, row, slots = slice(tail.first, tail.last), slice(tail.row, tail.row + 1), slice(tail.length)
        output[part] = F.scaled_dot_product_attention(
            query[part].transpose(0, 1)[None],
            key[row, :, slots],
            value[row, :, slots],
            attn_mask=tail.mask,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return output


def _rectangle(query, key, value, queries, causal, window, scale) -> torch.Tensor:
    folded, key, value, mask = _padded(query, key, value, queries, causal, window)
    output = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return _packed(output, queries, query.shape[1])


def ragged_attention_with_weights(
    query, key, value, queries, causal=True, window=None, scale=None, softcap=None, sinks=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ragged_attention`, by plain matrix products; also the weights `[H, T, longest]`. Soft-capped logits and
    attention sinks, which torch's fused attention has no room for, come through here too."""
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    folded, key, value, mask = _padded(query, key, value, queries, causal, window)
    logits = torch.matmul(folded, key.transpose(-1, -2)).float() * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if mask is not None:
        logits = logits + mask
    if sinks is None:
        weights = logits.softmax(dim=-1)
    else:
        sink = sinks.float().reshape(1, key.shape[1], groups).repeat_interleave(queries.width, dim=-1)[..., None]
        sink = sink.expand(len(folded), -1, -1, -1)
        weights = torch.cat([logits, sink], dim=-1).softmax(dim=-1)[..., :-1]
    weights = weights.to(value.dtype)
    output = _packed(torch.matmul(weights, value), queries, heads)
    return output, _packed(weights, queries, heads).transpose(0, 1)


def _padded(query, key, value, queries: RaggedQueries, causal: bool, window: int | None):
    """Queries `[rows, Hkv, groups * Q, D]`, keys and values of the rows in use, and their mask. Heads that share keys
    are stacked along the query axis, so that keys are never repeated in memory."""
    rows, kv_heads, groups = queries.num_rows, key.shape[1], query.shape[1] // key.shape[1]
    folded = queries.pad(query).transpose(1, 2).reshape(rows, kv_heads, groups * queries.width, -1)
    mask = queries.mask(causal, window, groups, query.dtype)
    mask = None if mask is None else mask.to(query.device)
    return folded, in_use(key, queries), in_use(value, queries), mask


def in_use(states: torch.Tensor, queries: RaggedQueries) -> torch.Tensor:
    """Keys or values `[rows, Hkv, longest, D]` of those that are at hand."""
    if states.shape[0] == queries.num_rows and states.shape[2] == queries.longest:
        return states  # a slice costs as much as a small matrix product on a CPU
    return states[: queries.num_rows, :, : queries.longest]


def _packed(output: torch.Tensor, queries: RaggedQueries, heads: int) -> torch.Tensor:
    """`[rows, Hkv, groups * Q, X]` to `[T, H, X]`."""
    return queries.unpad(output.reshape(queries.num_rows, heads, queries.width, -1).transpose(1, 2))
