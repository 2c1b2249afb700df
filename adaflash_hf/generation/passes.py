"""Passes over packed tokens: what a step verifies, put together, run, and taken apart."""

import torch

from ..errors import AdaFlashError
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .attention import PackedBatch
from .cache import RaggedCache
from .candidate_generator import DiffusionCandidateGenerator, Draft
from .costs import CostModel, describe, load_costs, measure
from .integration import packed_attention


def target_pass(target: Target, tokens, packed: PackedBatch, cache: RaggedCache, last: torch.Tensor | None):
    """The target's logits at packed tokens, at all `[T, V]` or at the packed indices `last` only, and the tapped
    features of all of them `[T, T_layers * d]`. Taps are open for this pass alone: a logits processor may run the
    target too."""
    cache.begin(packed)
    with packed_attention(target.model, decoding=last is None), target.taps() as captured:
        logits = target.model(
            input_ids=tokens[None].to(target.model.device),
            position_ids=packed.query_positions[None],
            cache=cache,
            use_cache=True,
            logits_to_keep=0 if last is None else last,
            ragged=packed,
        ).logits[0]
    if not packed.used:
        raise AdaFlashError(
            f"{type(target.model).__name__} didn't use the attention that its configuration names: generate without "
            "the drafter."
        )
    if last is not None and len(logits) != len(last):  # a target that doesn't know `logits_to_keep`
        logits = logits[last]
    # Scores go where the caller's ids are, as in plain `generate`: that is where processors hold their tensors.
    return logits.to(tokens.device), target.features(captured)[0]


def pack(counts: list[int], first_positions: list[int], device, starts_at_zero: bool = False) -> PackedBatch:
    """The packed batch of `counts[r]` tokens of row r, maybe 0, that start at `first_positions[r]`."""
    lengths = torch.tensor(counts, device=device)
    query_rows = torch.arange(len(counts), device=device).repeat_interleave(lengths)
    offsets = torch.arange(sum(counts), device=device) - (lengths.cumsum(0) - lengths)[query_rows]
    positions = torch.tensor(first_positions, device=device)[query_rows] + offsets
    longest = max(first + count for first, count in zip(first_positions, counts, strict=True))
    return PackedBatch(query_rows, positions, len(counts), longest, counts, starts_at_zero=starts_at_zero)


def interleave(anchors: torch.Tensor, draft: Draft) -> torch.Tensor:
    """Packed tokens: each row's anchor, then its drafts."""
    counts = torch.tensor(draft.counts, device=anchors.device) + 1
    starts = counts.cumsum(0) - counts
    tokens = anchors.new_empty(int(counts.sum()))
    is_anchor = torch.zeros(len(tokens), dtype=torch.bool, device=anchors.device)
    is_anchor[starts] = True
    tokens[is_anchor], tokens[~is_anchor] = anchors, draft.tokens.to(anchors)
    return tokens


def kept(counts: list[int], accepted: list[int], device) -> torch.Tensor:
    """Packed indices of the verified tokens that are now committed: each row's anchor and accepted drafts."""
    kept, start = [], 0
    for count, number in zip(counts, accepted, strict=True):
        kept.extend(range(start, start + number + 1))
        start += count
    return torch.tensor(kept, device=device)


def target_costs(target: Target, drafter: AdaFlashDrafter) -> CostModel:
    """What passes of this pair cost here: known from before, or measured now on made-up tokens."""

    def measure_here() -> CostModel:
        device, cache = target.model.device, RaggedCache()
        generator = DiffusionCandidateGenerator(drafter, target)
        width = len(target.layer_ids) * drafter.config.hidden_size

        def verify(counts: list[int], position: int) -> None:
            tokens = torch.arange(sum(counts), device=device) % drafter.config.vocab_size
            logits, _ = target_pass(target, tokens, pack(counts, [position] * len(counts), device), cache, None)
            logits[-1, -1].item()  # a GPU is done only when a result has been read

        def draft(rows: int, late: int, position: int) -> None:
            features = torch.zeros(rows * late, width, dtype=target.model.dtype, device=device)
            row_of = torch.arange(rows, device=device).repeat_interleave(late)
            positions = torch.arange(position, position + late, device=device).repeat(rows)
            generator.observe(features, row_of, positions)
            ends = torch.full((rows,), position + late, device=device)
            generator.draft(torch.zeros_like(ends), ends, ends).tokens.tolist()

        return measure(verify, draft)

    return load_costs(describe(target.model, drafter), measure_here)
