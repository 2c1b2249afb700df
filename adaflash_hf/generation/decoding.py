"""The decoding loop: draft a block per row, choose lengths, verify in one packed pass, commit what is accepted.

One loop serves every batch size. Rows are left-padded on entry and on return only; inside, slot j of a row holds its
j-th token. A row that has finished leaves the batch.
"""

import time

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .cache import RaggedCache
from .candidate_generator import DiffusionCandidateGenerator, Draft
from .outputs import Outputs, Stream, fill_cache
from .prefill import input_device, own_prefill, pack, packed_pass, packed_prefill
from .processing import TargetChoice
from .rows import Rows
from .statistics import AdaFlashStatistics, GenerateAdaFlashOutput, report
from .stopping import Stopping


@torch.no_grad()
def assisted_decoding(
    model,
    drafter: AdaFlashDrafter,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    mask: torch.Tensor,
    cache: Cache,
    prefill_kwargs: dict | None = None,
    streamer=None,
):
    """Generates as plain `generate` would, faster.

    Args:
        model: the target.
        input_ids: int64 `[b, L]`.
        mask: bool `[b, past + L]`, the columns of a reused cache and of the ids that may be looked at.
        cache: the cache that `generate` prepared, or the caller's own; filled at the end where somebody can see it.
        prefill_kwargs: model arguments for transformers' own prefill; `None` for the packed one.

    Returns:
        int64 `[b, L + generated]`, rows that ended early right-padded, or a `GenerateAdaFlashOutput`.
    """
    # 1. Set up.
    target = Target(model, drafter.config)
    batch_size = input_ids.shape[0]
    keep = generation_config.return_dict_in_generate
    keep_cache = keep or getattr(cache, "_is_user_defined", False)
    choice = TargetChoice(logits_processor, generation_config.do_sample, keep and generation_config.output_scores)
    generator = DiffusionCandidateGenerator(
        drafter,
        target,
        generation_config.do_sample,
        choice.temperature,
        drafter.draft_processors,
        generation_config.num_assistant_tokens,
    )
    pad = generation_config._pad_token_tensor
    max_length = min(generation_config.max_length, stopping_criteria.max_length or generation_config.max_length)
    rows = Rows(input_ids, mask, max_length, int(pad) if pad is not None else 0)
    stopping, stream = Stopping(stopping_criteria, rows), Stream(streamer, rows)
    statistics = AdaFlashStatistics([[] for _ in range(batch_size)], [[] for _ in range(batch_size)])
    ragged_cache = RaggedCache(offloaded=cache.offloading)
    device = input_ids.device
    finished_keys: dict[int, list] = {}

    # 2. Prefill, scores at each row's last token only.
    clock = time.perf_counter()
    if prefill_kwargs is None:
        prefill = packed_prefill(target, rows, ragged_cache)
    else:
        prefill = own_prefill(target, rows, mask, ragged_cache, generation_config, prefill_kwargs)
    outputs = Outputs(generation_config, rows, prefill)
    starts = torch.tensor(rows.context_starts, device=prefill.feature_rows.device)
    generator.observe(prefill.features, prefill.feature_rows, prefill.feature_slots - starts[prefill.feature_rows])
    keep_weights = outputs.wanted["attentions"] and model.get_decoder().config._attn_implementation == "eager"
    draft, current = Draft([0] * batch_size, input_ids[0, :0]), prefill

    while True:
        # 3. Accept drafts that the target would have chosen, and its own next token; commit them.
        counts = [count + 1 for count in draft.counts]
        starts = [sum(counts[:row]) for row in range(len(counts))]
        tokens = _interleave(rows.anchors(), draft)
        committed, leaving = [0] * len(counts), []
        for new, scores in choice.rounds(current.logits, tokens, counts, draft.probabilities, rows):
            for row, index in enumerate(rows.live):
                kept = stopping.cut(index, new[row])
                rows.commit(index, kept)
                row_scores = None if scores is None else scores[row]
                outputs.add(index, current, starts[row] + committed[row], len(kept), row_scores)
                committed[row] += len(kept)
            leaving = stopping.leaving(outputs.scores)
            stream.put(stopping.settled)
            if leaving:
                break
        # The clock stops here: on a GPU the pass is only known to be over once its result has been read.
        if current is prefill:
            statistics.prefill_seconds = time.perf_counter() - clock
        else:
            statistics.verify_seconds += time.perf_counter() - clock
            for row, index in enumerate(rows.live):
                statistics.accepted_lengths[index].append(committed[row])
                statistics.candidate_lengths[index].append(counts[row])

            # 4. Hand the features of committed tokens to the drafter.
            features, packed = current.features, current.packed
            read = _kept(counts, committed, features.device)
            read_rows, slots = (x.to(features.device)[read] for x in (packed.query_rows, packed.query_positions))
            bases = torch.tensor([rows.context_starts[i] for i in rows.live], device=features.device)
            generator.observe(features[read], read_rows, slots - bases[read_rows])

        # 5. Finished rows leave; the last live row takes the free place.
        for row in reversed(leaving):
            index, last_row = rows.live[row], len(rows.live) - 1
            if keep_cache:
                layers = (ragged_cache.row(i, row, rows.slots(index) - 1) for i in range(len(ragged_cache.keys)))
                finished_keys[index] = [None if pair is None else [t.clone() for t in pair] for pair in layers]
            ragged_cache.move_row(last_row, row)
            generator.move_row(last_row, row)
            rows.live[row] = rows.live[last_row]
            rows.live.pop()
        if not rows.live:
            break

        # 6. Draft one block per live row, unless none has room for a draft.
        clock = time.perf_counter()
        anchors = rows.anchors()
        positions = torch.tensor(rows.drafter_positions(), device=device)
        room = rows.room()
        if max(room) > 0 and generator.length_processor.most > 0:
            prefixes = [rows.prefix(row) for row in range(len(room))] if drafter.draft_processors else None
            draft = generator.draft(anchors, positions, torch.tensor(room, device=device), prefixes)
        else:
            draft = Draft([0] * len(room), anchors[:0])
        statistics.draft_seconds += time.perf_counter() - clock

        # 7. Verify: anchors and drafts of all rows in one packed pass.
        clock = time.perf_counter()
        tokens, lengths = _interleave(anchors, draft), [count + 1 for count in draft.counts]
        current = packed_pass(
            target,
            tokens,
            pack(lengths, rows.positions(), input_device(model, tokens), keep_weights=keep_weights),
            ragged_cache,
            position_offsets=None if prefill.position_offsets is None else prefill.position_offsets[..., rows.live],
            output_hidden_states=outputs.wanted["hidden_states"],
        )

    stream.end()
    statistics.trim([length - rows.prompt_width for length in rows.lengths])
    report(statistics)
    sequences = rows.tokens[:, : max(rows.lengths)]
    if keep_cache:
        fill_cache(cache, finished_keys, rows)
    if not keep:
        return sequences
    return GenerateAdaFlashOutput(
        sequences=sequences,
        scores=outputs.scores(),
        logits=outputs.logits(),
        hidden_states=outputs.hidden_states(),
        attentions=outputs.attentions(),
        cache=cache,
        statistics=statistics,
    )


def _interleave(anchors: torch.Tensor, draft: Draft) -> torch.Tensor:
    """Packed tokens: each row's anchor, then its drafts."""
    counts = torch.tensor(draft.counts, device=anchors.device) + 1
    starts = counts.cumsum(0) - counts
    tokens = anchors.new_empty(int(counts.sum()))
    is_anchor = torch.zeros(len(tokens), dtype=torch.bool, device=anchors.device)
    is_anchor[starts] = True
    tokens[is_anchor], tokens[~is_anchor] = anchors, draft.tokens.to(anchors)
    return tokens


def _kept(counts: list[int], committed: list[int], device) -> torch.Tensor:
    """Packed indices of the verified tokens that are now committed: each row's anchor and accepted drafts."""
    kept, start = [], 0
    for count, number in zip(counts, committed, strict=True):
        kept.extend(range(start, start + number))
        start += count
    return torch.tensor(kept, dtype=torch.long, device=device)
