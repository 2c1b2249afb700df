"""Reading the prompts.

Prompts that start from nothing are read in one packed pass, without padding. What several of them begin with (a system
prompt, `num_return_sequences`) is read once, and what rows that are being generated begin with isn't read again. What
only the target's own code knows how to read (images, a reused cache, positions of the caller's, chunks, masks with
holes) goes through transformers' prefill, and its keys and values are then copied to their slots.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import AdaFlashValueError
from ..target import Target
from .attention import PackedBatch
from .cache import RaggedCache
from .integration import plain_prefill
from .passes import input_device, pack, packed_pass
from .rows import Rows


# A prompt's tail needs a mask, which a prompt read whole does without. One of more elements than `_LARGE_MASK` has to
# save an eighth of the prompt, and none has more than `_LARGEST_MASK`.
_LARGE_MASK, _LARGEST_MASK = 2**22, 2**24


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


def packed_prefill(
    target: Target, rows: Rows, cache: RaggedCache, first: int, copy_context: Callable | None = None
) -> Prefill:
    """Reads left-padded prompts of the live rows from place `first` on in one packed pass, scores at each row's last
    token only.

    Args:
        copy_context: called with a live row, a new one, and how many tokens both begin with, which then aren't read;
            left out where the drafter can't do without their features.
    """
    prompts = [rows.prompt(index) for index in rows.live[first:]]
    held = [] if copy_context is None else [rows.cached(index).cpu().numpy() for index in rows.live[:first]]
    reading = read_once([prompt.tolist() for prompt in prompts], held)
    for new, (row, length) in enumerate(reading.copies, start=first):
        if length:
            cache.copy_beginning(row, new, length)
            copy_context(row, new, length)
    lengths, nothing = [len(prompt) for prompt in prompts], [0] * first
    device = input_device(target.model, rows.tokens)
    copied = [length for _, length in reading.copies]
    starts = [length - count for length, count in zip(lengths, reading.counts, strict=True)]
    keys = {}
    if starts != copied:
        written = pack(
            nothing + [length - n for length, n in zip(lengths, copied, strict=True)], nothing + copied, device
        )
        keys = {
            "key_rows": written.query_rows,
            "key_positions": written.query_positions,
            "key_sources": reading.sources.to(device),
        }
    packed = pack(nothing + reading.counts, nothing + starts, device, prompt_lengths=nothing + lengths, **keys)
    ends = torch.tensor([length - n for length, n in zip(lengths, copied, strict=True)]).cumsum(0) - 1
    tokens = torch.cat([prompt[n:] for prompt, n in zip(prompts, starts, strict=True)])
    done = packed_pass(target, tokens, packed, cache, last=reading.sources[ends].tolist())
    features = done.features
    if keys:
        features = features[reading.sources.to(features.device)]
    where = (x.to(features.device) for x in (packed.key_rows, packed.key_positions))
    return Prefill(done.logits, features, *where)


@dataclass
class Reading:
    """How to read prompts that begin alike.

    Attributes:
        copies: per prompt, the held text that it begins like, and how many tokens both have in common.
        counts: per prompt, how many of its last tokens are read in its own row, maybe 0.
        sources: for all tokens that aren't copied, prompt by prompt, the packed index of the token that is read in
            their place, int64.
    """

    copies: list[tuple[int, int]]
    counts: list[int]
    sources: torch.Tensor


def read_once(prompts: list[list[int]], held: Sequence[np.ndarray] = ()) -> Reading:
    """Divides the reading of prompts, of which some begin alike, or like texts whose keys are at hand."""
    texts, copies = [np.array(prompt) for prompt in prompts], []
    for text in texts:
        # The last token is read in any case: it says what comes next.
        found = [(_shared(other, text[:-1]), row) for row, other in enumerate(held)]
        length, row = max(found, default=(0, 0))
        copies.append((row, length))
    starts = [length for _, length in copies]
    # In order, a prompt has most in common with the one before, and so with what that one is copied from.
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    for before, this in itertools.pairwise(order):
        alike = _shared(texts[before], texts[this])
        if alike > starts[this]:
            starts[this] = alike
            copies[this] = copies[before][0], min(copies[before][1], alike)
    counts = [len(prompt) - n for prompt, n in zip(prompts, starts, strict=True)]
    read = torch.arange(sum(counts)).split(counts)
    sources: dict[int, torch.Tensor] = {}
    for before, this in zip([None, *order], order, strict=False):
        copied = copies[this][1]
        sources[this] = read[this]
        if starts[this] > copied:
            skipped = copies[before][1]
            sources[this] = torch.cat([sources[before][copied - skipped : starts[this] - skipped], read[this]])
    return Reading(copies, counts, torch.cat([sources[i] for i in range(len(prompts))]))


def _shared(before: np.ndarray, prompt: np.ndarray) -> int:
    """How many tokens a prompt begins with like another text; 0 where it is better read whole."""
    length = min(len(before), len(prompt))
    different = before[:length] != prompt[:length]
    alike = int(different.argmax()) if different.any() else length
    elements = (len(prompt) - alike) * len(prompt)
    pays = elements <= _LARGE_MASK or (elements <= _LARGEST_MASK and 8 * alike >= len(prompt))
    return alike if pays else 0


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
