"""Training blocks: anchors among response positions, and the attention that keeps each block to itself.

The block anchored at position a sees context features strictly before a and its own slots, nothing else: features at
or past the anchor would hold the answer, and other blocks hold other answers.
"""

import torch
from torch.utils.checkpoint import checkpoint


# Scores of one group of blocks, over heads and batch: what bounds the memory of `BlockAttention`.
_GROUP_ELEMENTS = 2**25


def sample_anchors(loss_mask: torch.Tensor, count: int, generator=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws up to `count` anchors per sequence, without replacement, among positions whose next token is supervised.

    A position qualifies when it and the next one are response tokens, as in decoding, where the first anchor is the
    first generated token.

    Args:
        loss_mask: bool `[b, n]`, true on response tokens.

    Returns:
        anchors `[b, count]` (int64, ascending; unused ones are 0) and bool `[b, count]`, true on used ones.
    """
    eligible = loss_mask[:, :-1] & loss_mask[:, 1:]
    noise = torch.rand(eligible.shape, generator=generator, device=loss_mask.device).masked_fill(~eligible, -1)
    count = min(count, eligible.shape[1])
    chosen = noise.topk(count, dim=-1)
    used = chosen.values >= 0
    anchors = chosen.indices.masked_fill(~used, loss_mask.shape[1])
    anchors, order = anchors.sort(dim=-1)
    used = used.gather(1, order)
    return anchors.masked_fill(~used, 0), used


class BlockAttention:
    """Attention of many training blocks at once, passed to the drafter as its `ragged` argument.

    Each block looks at its context and at its own slots only, so scores are `[slots, context + block_size]`, never
    `[slots, context + all slots]`. Blocks are taken in groups of ascending anchors, whose context ends at the group's
    last anchor; groups are recomputed in the backward pass where more than one is needed. A sliding layer drops
    context further back than `sliding_window` from the slot, and is causal inside the block where the configuration
    says so, exactly as the drafter does when decoding.

    Args:
        anchors: int64 `[b, A]`, ascending in each row but for unused ones.
        used: bool `[b, A]`; unused blocks see nothing but themselves.
        context_length: tokens of context before the blocks' slots in keys and values.
        config: the drafter's configuration.
        size: slots of a block; default `config.block_size`.
    """

    def __init__(
        self, anchors: torch.Tensor, used: torch.Tensor, context_length: int, config, size: int | None = None
    ):
        self.context_length = context_length
        self.size = size or config.block_size
        blocks = anchors.shape[1]
        row = context_length * self.size * config.num_attention_heads * anchors.shape[0]
        # At least 4 groups, so that early blocks don't pay for late context.
        per_group = max(1, min(_GROUP_ELEMENTS // row, -(-blocks // 4)))
        ends = (anchors * used).amax(dim=0).tolist()
        self.groups = [
            (start, min(start + per_group, blocks), max(ends[start : start + per_group]))
            for start in range(0, blocks, per_group)
        ]
        self.recompute = blocks * row > _GROUP_ELEMENTS
        self.biases = {
            kind: [self._bias(anchors, used, *group, config, kind == "sliding_attention") for group in self.groups]
            for kind in set(config.layer_types)
        }

    def _bias(self, anchors, used, start, stop, end, config, sliding):
        """0 where a slot may look, -inf elsewhere: float32 `[b, 1, 1, blocks, B, end + B]`."""
        anchors, used = anchors[:, start:stop, None, None], used[:, start:stop, None, None]
        slots = torch.arange(self.size, device=anchors.device)
        context = torch.arange(end, device=anchors.device)
        sees = ((context < anchors) & used).expand(-1, -1, self.size, -1)
        inside = torch.ones(self.size, self.size, dtype=torch.bool, device=anchors.device)
        if sliding:
            reach = config.sliding_window - 1 if config.sliding_window_causal else config.sliding_window
            sees = sees & (context >= anchors + slots[:, None] - reach)
            inside = (slots[:, None] - slots).abs() <= reach
            if config.sliding_window_causal:
                inside = inside & (slots <= slots[:, None])
        seen = torch.cat([sees, inside.expand(*sees.shape[:2], -1, -1)], dim=-1)
        bias = torch.zeros(seen.shape, device=anchors.device).masked_fill_(~seen, float("-inf"))
        return bias[:, None, None]

    def attention(self, module, query, key, value, attention_mask, dropout=0.0, scaling=1.0, **kwargs):
        """query `[b, h, A*B, D]`, key and value `[b, h_kv, n + A*B, D]` -> `[b, A*B, h, D]` and `None`, as attention
        functions of transformers answer."""
        batch, heads, slots, width = query.shape
        groups = heads // key.shape[1]
        blocks = slots // self.size
        query = query.reshape(batch, key.shape[1], groups, blocks, self.size, width) * scaling
        context_key, context_value = (x[:, :, : self.context_length] for x in (key, value))
        own_key, own_value = (
            x[:, :, self.context_length :].reshape(batch, key.shape[1], blocks, self.size, width) for x in (key, value)
        )
        kind = "full_attention" if module.sliding_window is None else "sliding_attention"
        parts = []
        for (start, stop, end), bias in zip(self.groups, self.biases[kind], strict=True):
            arguments = (
                query[:, :, :, start:stop],
                context_key[:, :, :end],
                context_value[:, :, :end],
                own_key[:, :, start:stop],
                own_value[:, :, start:stop],
                bias,
                dropout,
            )
            part = checkpoint(_attend, *arguments, use_reentrant=False) if self.recompute else _attend(*arguments)
            parts.append(part)
        output = torch.cat(parts, dim=3).reshape(batch, heads, slots, width)
        return output.transpose(1, 2), None


def _attend(query, context_key, context_value, own_key, own_value, bias, dropout):
    """query `[b, h_kv, g, A, B, D]`, context `[b, h_kv, n, D]`, own `[b, h_kv, A, B, D]` -> like query."""
    batch, heads, groups, blocks, size, width = query.shape
    length = context_key.shape[2]
    rows = query.flatten(2, 4)
    from_context = (rows @ context_key.transpose(-1, -2)).reshape(batch, heads, groups, blocks, size, length)
    from_block = query @ own_key[:, :, None].transpose(-1, -2)
    scores = torch.cat([from_context, from_block], dim=-1).float().add_(bias)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)
    out = weights[..., :length].flatten(2, 4) @ context_value
    return out.reshape(query.shape) + weights[..., length:] @ own_value[:, :, None]
