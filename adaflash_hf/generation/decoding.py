"""The decoding loop: draft a block per row, choose lengths, verify in one packed pass, commit what is accepted.

One loop serves every batch size, and a queue of more rows than are live at a time. Rows are left-padded on entry and
on return only; inside, slot j of a row holds its j-th token. A row that has finished leaves the batch.

Each turn of the loop is one target pass: prompts of rows that are let in, or anchors and drafts of all live rows.
"""

import itertools
import time

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..errors import AdaFlashValueError
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .cache import RaggedCache
from .candidate_generator import DiffusionCandidateGenerator, Draft
from .costs import describe, forget_costs
from .outputs import Outputs, Stream, fill_cache
from .passes import input_device, interleave, kept_indices, pack, packed_pass
from .prefill import own_prefill, packed_prefill
from .probing import target_costs
from .processing import TargetChoice
from .queue import Queue, take_queue
from .rows import Rows
from .statistics import AdaFlashStatistics, GenerateAdaFlashOutput, report
from .stopping import Stopping, longest


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
    most: int | None = None,
    prefill_kwargs: dict | None = None,
    streamer=None,
):
    """Generates as plain `generate` would, faster.

    Args:
        model: the target.
        input_ids: int64 `[b, L]`.
        mask: bool `[b, past + L]`, the columns of a reused cache and of the ids that may be looked at.
        cache: the cache that `generate` prepared, or the caller's own; filled at the end where somebody can see it.
        most: the call's cap on drafted tokens per row and step, beside the drafter's own.
        prefill_kwargs: model arguments for transformers' own prefill; `None` for the packed one.

    Returns:
        int64 `[b, L + generated]`, rows that ended early right-padded, or a `GenerateAdaFlashOutput`.
    """
    # 1. Set up.
    target, inputs_at = Target(model, drafter.config), input_device(model, input_ids)
    batch_size = input_ids.shape[0]
    asked = take_queue()
    queue = Queue(batch_size) if asked is None else asked
    keep = generation_config.return_dict_in_generate
    keep_cache = keep or getattr(cache, "_is_user_defined", False)
    choice = TargetChoice(
        logits_processor,
        generation_config.do_sample,
        keep and generation_config.output_scores,
        hide_padding=asked is not None,
    )
    policy = drafter.generation_config
    drafts_at_all = 0 not in (policy.num_assistant_tokens, most)
    weighs_costs = policy.length_policy == "budget" and drafts_at_all and not drafter.draft_processors
    generator = DiffusionCandidateGenerator(
        drafter,
        target,
        generation_config.do_sample,
        choice.temperature,
        drafter.draft_processors,
        most,
        target_costs(target, drafter, inputs_at) if weighs_costs else None,
    )
    pad = generation_config._pad_token_tensor
    rows = Rows(input_ids, mask, longest(stopping_criteria, input_ids.shape[1]), int(pad) if pad is not None else 0)
    stopping, stream = Stopping(stopping_criteria, rows), Stream(streamer, rows)
    statistics = AdaFlashStatistics.of(batch_size)
    ragged_cache = RaggedCache(offloaded=cache.offloading)
    device = input_ids.device
    finished_keys: dict[int, list] = {}

    if asked is not None:
        if prefill_kwargs is not None or stopping.others or not (choice.scores_only or choice.row_by_row):
            raise AdaFlashValueError(
                "A queue of prompts takes no stopping criteria, processors with memory, images or caches, which "
                "concern a whole batch at once: drop them, or call `generate` on batches."
            )
    prefill = outputs = None
    # A window's features are gone where another row would begin with them.
    copy_context = generator.copy_beginning if generator.window is None else None

    while rows.live or rows.waiting:
        clock, first = time.perf_counter(), len(rows.live)
        prefilling = bool(rows.waiting) and first < queue.max_live_rows
        if prefilling:
            # 2. Let waiting rows in: their prompts in one pass, scores at each row's last token only.
            rows.admit(queue.max_live_rows - first)
            if prefill_kwargs is None:
                prefill = packed_prefill(target, rows, ragged_cache, first, copy_context)
            else:
                prefill = own_prefill(target, rows, mask, ragged_cache, generation_config, prefill_kwargs)
            outputs = Outputs(generation_config, rows, prefill) if outputs is None else outputs
            starts = torch.tensor([rows.context_starts[i] for i in rows.live], device=prefill.feature_rows.device)
            slots = prefill.feature_slots - starts[prefill.feature_rows]
            generator.observe(prefill.features, prefill.feature_rows, slots)
            for index in rows.live[first:]:
                generator.admit(rows.prompt(index).tolist())
            draft, current = Draft([0] * (len(rows.live) - first), input_ids[0, :0]), prefill
            tokens = rows.anchors()[first:]
        else:
            # 3. Draft at most one block per live row, unless none has room for a draft.
            first = 0
            anchors, room = rows.anchors(), rows.room()
            if max(room) > 0 and generator.length_processor.most > 0:
                positions = torch.tensor(rows.drafter_positions(), device=device)
                prefixes = [rows.prefix(row) for row in range(len(room))] if drafter.draft_processors else None
                room = torch.tensor(room, device=device)
                draft = generator.draft(anchors, positions, room, prefixes, waiting=bool(rows.waiting))
            else:
                draft = Draft([0] * len(room), anchors[:0])
            statistics.draft_seconds += time.perf_counter() - clock

            # 4. Verify: anchors and drafts of all rows in one packed pass.
            clock = time.perf_counter()
            lengths, offsets = [count + 1 for count in draft.counts], prefill.position_offsets
            weights, tokens = outputs.keeps_weights(model), interleave(anchors, draft)
            current = packed_pass(
                target,
                tokens,
                pack(lengths, rows.positions(), inputs_at, keep_weights=weights),
                ragged_cache,
                position_offsets=None if offsets is None else offsets[..., rows.live],
                output_hidden_states=outputs.wanted["hidden_states"],
            )

        # 5. Accept drafts that the target would have chosen, and its own next token; commit them.
        counts = [count + 1 for count in draft.counts]
        starts = list(itertools.accumulate(counts, initial=0))[:-1]
        indices = rows.live[first:]
        committed, leaving = [0] * len(counts), []
        for new, scores in choice.rounds(current.logits, tokens, counts, starts, draft, rows, first):
            for row, index in enumerate(indices):
                kept = stopping.cut(index, new[row])
                rows.commit(index, kept)
                generator.commit(first + row, kept)
                row_scores = None if scores is None else scores[row]
                outputs.add(index, current, starts[row] + committed[row], len(kept), row_scores)
                committed[row] += len(kept)
            leaving = stopping.leaving(outputs.scores)
            stream.put(stopping.settled)
            if leaving:
                break
        # The clock stops here: on a GPU the pass is only known to be over once its result has been read.
        seconds = time.perf_counter() - clock
        if prefilling:
            statistics.prefill_seconds += seconds
        else:
            statistics.verify_seconds += seconds
            for row, index in enumerate(indices):
                statistics.add(index, committed[row], counts[row], draft.source(row))

            # 6. Hand what became of the drafts, and the features of committed tokens, to the drafter.
            bare = choice.bare and not (stopping.others or streamer or any(outputs.wanted.values()))
            generator.learn(
                draft,
                [max(0, n - 1) for n in committed],
                seconds if bare else None,
                sum(counts),
                sum(rows.positions()),
            )
            features, packed = current.features, current.packed
            read = kept_indices(counts, committed, features.device)
            read_rows, slots = (x.to(features.device)[read] for x in (packed.query_rows, packed.query_positions))
            bases = torch.tensor([rows.context_starts[i] for i in rows.live], device=features.device)
            generator.observe(features[read], read_rows, slots - bases[read_rows])

        # 7. Finished rows leave; the last live row takes the free place.
        for row in reversed(leaving):
            index, last_row = rows.live[row], len(rows.live) - 1
            if keep_cache:
                layers = (ragged_cache.row(i, row, rows.slots(index) - 1) for i in range(len(ragged_cache.keys)))
                finished_keys[index] = [None if pair is None else [t.clone() for t in pair] for pair in layers]
            ragged_cache.move_row(last_row, row)
            generator.move_row(last_row, row)
            rows.live[row] = rows.live[last_row]
            rows.live.pop()
            queue.finish(index, rows.tokens[index, rows.prompt_width : rows.lengths[index]])

    stream.end()
    statistics.trim([length - rows.prompt_width for length in rows.lengths])
    report(statistics)
    if generator.costs_were_wrong:
        forget_costs(describe(model, drafter))
    sequences = rows.tokens[:, : max(rows.lengths)].contiguous()
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
