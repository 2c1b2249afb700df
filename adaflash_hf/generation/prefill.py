"""Reading the prompts.

Prompts that start from nothing are read in one packed pass, without padding, and what several of them begin with (a
system prompt, `num_return_sequences`) is read once. What only the target's own code knows
how to read (images, a reused cache, positions of the caller's, chunks, masks with holes) goes through transformers'
prefill, and its keys and values are then copied to their slots.
"""

import itertools
from dataclasses import dataclass

import torch

from ..errors import AdaFlashValueError
from ..target import Target
from .attention import PackedBatch
from .cache import RaggedCache
from .integration import plain_prefill
from .passes import input_device, pack, packed_pass
from .rows import Rows


# Most elements of the mask of a prompt's tail; a longer one is read whole, which needs none.
_MASK_ELEMENTS = 2**26


@dataclass
class Prefill:
    """Results of reading the prompts.

    Attributes:
        logits: `[b, V]`, at each row's last column.
        features, feature_rows, feature_slots: `[n, T_layers * d]` and int64 `[n]`, of the columns that were read.
        position_offsets: what to add to a row's slots for the target's positions, `[b]` or, with several position
            axes, `[axes, b]`; `None` where they are equal.
        hidden_states: per layer `[b, L, d]`; attentions: per layer `[b, heads, L, L]`; `None` where not wanted.
    """

    logits: torch.Tensor
    features: torch.Tensor
    feature_rows: torch.Tensor
    feature_slots: torch.Tensor
    position_offsets: torch.Tensor | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None


def packed_prefill(target: Target, rows: Rows, cache: RaggedCache, first: int) -> Prefill:
    """Reads left-padded prompts of the live rows from place `first` on in one packed pass, scores at each row's last
    token only."""
    prompts = [rows.prompt(index) for index in rows.live[first:]]
    lengths, nothing = [len(prompt) for prompt in prompts], [0] * first
    device = input_device(target.model, rows.tokens)
    counts, sources = read_once([prompt.tolist() for prompt in prompts])
    shared = [length - count for length, count in zip(lengths, counts, strict=True)]
    keys = {}
    if any(shared):
        whole = pack(nothing + lengths, [0] * len(rows.live), device)
        keys = {
            "key_rows": whole.query_rows,
            "key_positions": whole.query_positions,
            "key_sources": sources.to(device),
        }
    packed = pack(nothing + counts, nothing + shared, device, prompt_lengths=nothing + lengths, **keys)
    last = sources[torch.tensor(lengths).cumsum(0) - 1].to(device)
    tokens = torch.cat([prompt[n:] for prompt, n in zip(prompts, shared, strict=True)])
    done = packed_pass(target, tokens, packed, cache, last=last)
    features = done.features
    if any(shared):
        features = features[sources.to(features.device)]
    where = (x.to(features.device) for x in (packed.key_rows, packed.key_positions))
    return Prefill(done.logits, features, *where)


def read_once(prompts: list[list[int]]) -> tuple[list[int], torch.Tensor]:
    """Divides the reading of prompts that begin alike.

    Returns:
        per prompt, how many of its last tokens are read in its own row, maybe 0; and for all tokens of all prompts the
        packed index of the token that is read in their place, int64 `[sum of lengths]`.
    """
    # In order, a prompt has most in common with the one before.
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    shared = [0] * len(prompts)
    for before, this in itertools.pairwise(order):
        pairs = enumerate(zip(prompts[before], prompts[this], strict=False))
        alike = next((n for n, (a, b) in pairs if a != b), min(len(prompts[before]), len(prompts[this])))
        if (len(prompts[this]) - alike) * len(prompts[this]) <= _MASK_ELEMENTS:
            shared[this] = alike
    counts = [len(prompt) - n for prompt, n in zip(prompts, shared, strict=True)]
    read = torch.arange(sum(counts)).split(counts)
    sources: dict[int, torch.Tensor] = {}
    for before, this in zip([None, *order], order, strict=False):
        sources[this] = torch.cat([sources[before][: shared[this]], read[this]]) if shared[this] else read[this]
    return counts, torch.cat([sources[i] for i in range(len(prompts))])


def own_prefill(target: Target, rows: Rows, mask, cache: RaggedCache, generation_config, model_kwargs) -> Prefill:
    """Reads the prompts as plain `generate` does, then copies keys and values.

    Args:
        mask: bool `[b, past + L]`, as in `Rows`.
        model_kwargs: as prepared by `generate`; the cache in it is filled.

    Raises:
        AdaFlashValueError: when the target read other columns than the ids' (embeddings of another length).
    """
    model, own_cache = target.model, model_kwargs["cache"]
    before = int(own_cache.get_seq_length())
    with target.taps() as captured:
        output = plain_prefill(model, rows.tokens[:, : rows.prompt_width], generation_config, model_kwargs)
    features = target.features(captured)
    held = int(own_cache.get_seq_length())
    read = held - before
    if features.shape[1] != read or held != mask.shape[1]:
        raise AdaFlashValueError(
            f"{type(model).__name__} turns {mask.shape[1]} columns into {held} cached ones: "
            "generate without the drafter."
        )
    mask = mask.to(features.device)
    slots = mask.long().cumsum(dim=1) - 1
    if own_cache.offloading:  # its copies to the CPU don't wait
        torch.accelerator.synchronize()
    for layer, states in enumerate(own_cache.layers):
        if states.is_initialized:
            _copy_layer(cache, layer, states, mask, slots)
    position_ids = model_kwargs.get("position_ids")
    offsets = None
    if position_ids is not None:
        last_slots = torch.tensor(rows.prompt_slots, device=position_ids.device) - 1
        offsets = position_ids[..., -1] - last_slots
    new = mask.clone()
    new[:, : mask.shape[1] - read] = False
    rows.context_starts = (slots[:, -1] + 1 - new.sum(dim=1)).tolist()
    return Prefill(
        logits=output.logits[:, -1].to(rows.tokens.device),
        features=features[new[:, mask.shape[1] - read :]],
        feature_rows=new.nonzero()[:, 0],
        feature_slots=slots[new],
        position_offsets=offsets,
        hidden_states=output.get("hidden_states"),
        attentions=output.get("attentions"),
    )


def _copy_layer(cache: RaggedCache, layer: int, states, mask: torch.Tensor, slots: torch.Tensor) -> None:
    """Copies one layer of transformers' cache, of which a sliding one holds the last columns only."""
    filled = min(int(states.get_seq_length()), states.keys.shape[2])
    keys, values = states.keys[:, :, :filled], states.values[:, :, :filled]
    kept = mask[:, -filled:].to(states.keys.device)
    rows, columns = kept.nonzero(as_tuple=True)
    positions = slots[:, -filled:].to(kept.device)[rows, columns]
    counts = kept.sum(dim=1).tolist()
    cache.begin(PackedBatch(rows, positions, len(mask), int(slots.max()) + 1, counts))
    cache.update(*(t[rows, :, columns].transpose(0, 1)[None] for t in (keys, values)), layer)
