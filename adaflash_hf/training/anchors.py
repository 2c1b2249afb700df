"""Training blocks: anchors among response positions, and the mask that keeps each block to itself.

The block anchored at position a sees context features strictly before a and its own slots, nothing else: features at
or past the anchor would hold the answer, and other blocks hold other answers.
"""

import torch


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


def block_masks(anchors, used, context_length: int, config) -> dict[str, torch.Tensor]:
    """Attention masks by layer type, bool `[b, 1, A*B, context_length + A*B]`, true where a slot may look.

    A sliding layer drops context further back than `sliding_window` from the slot, and is causal inside the block
    where the configuration says so, exactly as the drafter does when decoding.
    """
    batch, blocks = anchors.shape
    size = config.block_size
    slots = torch.arange(size, device=anchors.device)
    slot_position = (anchors[:, :, None] + slots).reshape(batch, -1)
    block_of_slot = torch.arange(blocks, device=anchors.device).repeat_interleave(size)
    context = torch.arange(context_length, device=anchors.device)
    sees_context = (context < anchors.repeat_interleave(size, dim=1)[..., None]) & used.repeat_interleave(size, dim=1)[
        ..., None
    ]
    same_block = (block_of_slot[:, None] == block_of_slot).expand(batch, -1, -1)
    masks = {}
    if "full_attention" in config.layer_types:
        masks["full_attention"] = torch.cat([sees_context, same_block], dim=-1)[:, None]
    if "sliding_attention" in config.layer_types:
        reach = config.sliding_window - 1 if config.sliding_window_causal else config.sliding_window
        near = context >= slot_position[..., None] - reach
        offset = slots.repeat(blocks)
        in_block = same_block & ((offset[:, None] - offset).abs() <= reach)
        if config.sliding_window_causal:
            in_block = in_block & (offset <= offset[:, None])
        masks["sliding_attention"] = torch.cat([sees_context & near, in_block], dim=-1)[:, None]
    return masks
