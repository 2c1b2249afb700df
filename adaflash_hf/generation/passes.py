"""Passes of the target over packed tokens: put together, run, and taken apart."""

from dataclasses import dataclass

import numpy as np
import torch

from ..errors import AdaFlashError
from ..target import Target
from .attention import PackedBatch
from .cache import RaggedCache
from .candidate_generator import Draft
from .integration import packed_attention


@dataclass
class Pass:
    """Results of one packed pass over T tokens.

    Attributes:
        logits: `[T, V]`, where the caller's ids are.
        features: `[T, T_layers * d]`, tapped.
        packed: the tokens' rows and slots.
        hidden_states: per layer `[1, T, d]`; `None` where not wanted.
    """

    logits: torch.Tensor
    features: torch.Tensor
    packed: PackedBatch
    hidden_states: tuple | None = None

    def attention_rows(self, at: int) -> list[tuple[torch.Tensor, int | None]]:
        """Per layer the weights `[heads, slots]` of packed token `at`, and the layer's window."""
        return [(weights[:, at], window) for weights, window in self.packed.weights]


def packed_pass(
    target: Target,
    tokens: torch.Tensor,
    packed: PackedBatch,
    cache: RaggedCache,
    last: list[int] | None = None,
    position_offsets: torch.Tensor | None = None,
    output_hidden_states: bool = False,
) -> Pass:
    """The target on packed tokens int64 `[T]`, with logits at all of them or at the packed indices `last` only. Taps
    are open for this pass alone: a logits processor may run the target too."""
    cache.begin(packed)
    packed.windows = target.windows
    position_ids = packed.query_positions[None]
    if position_offsets is not None:
        offsets = position_offsets.to(position_ids.device)[..., packed.query_rows]
        position_ids = (packed.query_positions + offsets).unsqueeze(-2)
    with packed_attention(target.model, decoding=last is None), target.taps() as captured:
        output = target.model(
            input_ids=tokens[None].to(packed.query_rows.device),
            position_ids=position_ids,
            cache=cache,
            use_cache=True,
            logits_to_keep=0 if last is None else last,
            output_hidden_states=output_hidden_states,
            ragged=packed,
        )
    if not packed.used:
        raise AdaFlashError(
            f"{type(target.model).__name__} didn't use the attention that its configuration names: generate without "
            "the drafter."
        )
    logits = output.logits[0]
    if last is not None and len(logits) != len(last):  # a target that doesn't know `logits_to_keep`
        logits = logits[last]
    # Scores go where the caller's ids are, as in plain `generate`: that is where processors hold their tensors.
    return Pass(logits.to(tokens.device), target.features(captured)[0], packed, output.get("hidden_states"))


def input_device(model, tokens: torch.Tensor) -> torch.device:
    """Where the target takes its inputs: where its weights are, unless accelerate brings these in layer by layer."""
    return tokens.device if model.device.type == "meta" else model.device


def pack(counts: list[int], first_positions: list[int], device, **settings) -> PackedBatch:
    """The packed batch of `counts[r]` tokens of row r, maybe 0, that start at slot `first_positions[r]`."""
    # On the host, where the counts are: a device would be waited for.
    query_rows = np.arange(len(counts)).repeat(counts)
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(first_positions, counts, strict=True)])
    longest = max(first + count for first, count in zip(first_positions, counts, strict=True))
    span = (first_positions[0], longest) if len(counts) == 1 else None
    query_rows, positions = (torch.from_numpy(x).to(device) for x in (query_rows, positions))
    return PackedBatch(query_rows, positions, len(counts), longest, counts, span=span, **settings)


def interleave(anchors: torch.Tensor, draft: Draft) -> torch.Tensor:
    """Packed tokens: each row's anchor, then its drafts."""
    drafts = draft.tokens.to(anchors).split(draft.counts)
    return torch.cat([part for pair in zip(anchors.split(1), drafts, strict=True) for part in pair])


def kept_indices(counts: list[int], committed: list[int], device) -> torch.Tensor:
    """Packed indices of the verified tokens that are now committed: each row's anchor and accepted drafts."""
    kept, start = [], 0
    for count, number in zip(counts, committed, strict=True):
        kept.extend(range(start, start + number))
        start += count
    return torch.tensor(kept, dtype=torch.long, device=device)
