"""The decoding loop: draft a block per row, choose lengths, verify in one packed pass, commit what is accepted.

One loop serves every batch size, and a queue of more rows than are live at a time. Rows are left-padded on entry and
on return only; inside, slot j of a row is its position j. A row that has finished leaves the batch, and is padded
where plain `generate` without an end token would go on. Stopping criteria see one row at a time, and no scores.

Each turn of the loop is one target pass: prompts of rows that are let in, or anchors and drafts of all live rows.
"""

import time

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .cache import RaggedCache
from .candidate_generator import DiffusionCandidateGenerator, Draft
from .costs import describe, forget_costs
from .outputs import Outputs, fill_cache
from .passes import interleave, kept, pack, target_costs, target_pass
from .processing import TargetChoice
from .queue import take_queue
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
    attention_mask: torch.Tensor | None = None,
    streamer=None,
    cache=None,
    cache_is_callers: bool = False,
):
    """Generates as plain `generate` would, faster.

    Args:
        model: the target.
        input_ids: int64 `[b, L]`, left-padded where `attention_mask` `[b, L]` is 0.
        cache: the empty cache that `generate` prepared, or the caller's own (`cache_is_callers`); filled at the end
            where somebody can see it.

    Returns:
        int64 `[b, L + generated]`, rows that ended early right-padded, or a `GenerateAdaFlashOutput`.
    """
    # 1. Set up.
    target = Target(model, drafter.config)
    batch_size = input_ids.shape[0]
    queue = take_queue()
    keep = generation_config.return_dict_in_generate
    keep_cache = cache is not None and (keep or cache_is_callers)
    choice = TargetChoice(
        logits_processor, generation_config.do_sample, batch_size, keep and generation_config.output_scores
    )
    weighs_costs = drafter.generation_config.length_policy == "budget"
    generator = DiffusionCandidateGenerator(
        drafter,
        target,
        generation_config.do_sample,
        choice.temperature,
        drafter.draft_processors,
        generation_config.num_assistant_tokens,
        target_costs(target, drafter) if weighs_costs else None,
    )
    stopping = Stopping(stopping_criteria)
    pad = generation_config._pad_token_tensor
    max_length = min(generation_config.max_length, stopping_criteria.max_length or generation_config.max_length)
    rows = Rows(input_ids, attention_mask, max_length, int(pad) if pad is not None else 0)
    most_live = batch_size if queue is None else queue.max_live_rows
    statistics = AdaFlashStatistics.of(batch_size)
    ragged_cache = RaggedCache()
    device = input_ids.device
    outputs = Outputs(batch_size, generation_config) if keep else None
    finished_keys: dict[int, list] = {}

    while rows.live or rows.waiting:
        old, prefilling = len(rows.live), bool(rows.waiting) and len(rows.live) < most_live
        if prefilling:
            # 2. Let waiting rows in: their prompts in one packed pass, scores at each row's last token only.
            clock = time.perf_counter()
            prompts = rows.admit(most_live - old)
            for prompt in prompts:
                generator.admit(prompt.tolist())
            lengths = [len(prompt) for prompt in prompts]
            packed = pack([0] * old + lengths, [0] * len(rows.live), model.device, starts_at_zero=True)
            last = torch.tensor(lengths, device=model.device).cumsum(0) - 1
            logits, features = target_pass(target, torch.cat(prompts), packed, ragged_cache, last)
            draft = Draft([0] * len(prompts), input_ids.new_empty(0))
            places = list(range(old, len(rows.live)))
        else:
            # 3. Draft at most one block per live row, unless none has room for a draft.
            clock = time.perf_counter()
            anchors, room, places = rows.anchors(), rows.room(), list(range(old))
            if max(room) > 0 and generator.length_processor.most > 0:
                positions = torch.tensor(rows.positions(), device=device)
                prefixes = [rows.prefix(row) for row in places] if drafter.draft_processors else None
                draft = generator.draft(anchors, positions, torch.tensor(room, device=device), prefixes)
            else:
                draft = Draft([0] * old, anchors[:0])
            statistics.draft_seconds += time.perf_counter() - clock

            # 4. Verify: anchors and drafts of all rows in one packed pass.
            clock = time.perf_counter()
            packed = pack([count + 1 for count in draft.counts], rows.positions(), model.device)
            logits, features = target_pass(target, interleave(anchors, draft), packed, ragged_cache, None)

        # 5. Accept: drafts that the target would have chosen, and its own next token.
        counts = [count + 1 for count in draft.counts]
        tokens = interleave(rows.anchors()[places[0] :], draft)
        indices = [rows.live[place] for place in places]
        accepted, bonus, scores = choice(
            logits, tokens, counts, draft, lambda i, first=places[0]: rows.prefix(first + i), indices
        )
        # The clock stops here: on a GPU the pass is only known to be over once its result has been read.
        seconds = time.perf_counter() - clock
        if prefilling:
            statistics.prefill_seconds += seconds
        else:
            statistics.verify_seconds += seconds
            generator.learn(draft, accepted, seconds, sum(counts), sum(rows.positions()))

        # 6. Commit, and hand the features of committed tokens to the drafter.
        where = packed.query_rows.to(features.device), packed.query_positions.to(features.device)
        if not prefilling:
            committed = kept(counts, accepted, features.device)
            features, where = features[committed], tuple(x[committed] for x in where)
        generator.observe(features, *where)
        drafted = draft.tokens.tolist()
        finished, start, packed_start = [], 0, 0
        for i, (row, index) in enumerate(zip(places, indices, strict=True)):
            new = [*drafted[start : start + accepted[i]], bonus[i]]
            new, done = stopping.cut(new, rows.prefix(row), rows.max_length - rows.lengths[index])
            rows.commit(index, new)
            generator.commit(row, new)
            if not prefilling:
                statistics.add(index, len(new), counts[i], draft.source(i))
            if streamer is not None:
                for token in new:
                    streamer.put(torch.tensor([token]))
            if outputs is not None:
                row_logits = logits[packed_start : packed_start + len(new)]
                outputs.add(index, row_logits, None if scores is None else scores[i][: len(new)])
            if done:
                finished.append(row)
            start += draft.counts[i]
            packed_start += counts[i]

        # 7. Finished rows leave; the last live row takes the free place.
        for row in reversed(finished):
            index, last_row = rows.live[row], len(rows.live) - 1
            if keep_cache:
                length = rows.lengths[index] - rows.padding[index] - 1
                layers = range(len(ragged_cache.keys))
                finished_keys[index] = [[t.clone() for t in ragged_cache.row(i, row, length)] for i in layers]
            ragged_cache.move_row(last_row, row)
            generator.move_row(last_row, row)
            rows.live[row] = rows.live[last_row]
            rows.live.pop()
            if queue is not None:
                queue.finish(index, rows.tokens[index, rows.prompt_width : rows.lengths[index]].tolist())

    if streamer is not None:
        streamer.end()
    report(statistics)
    if generator.costs_were_wrong:
        forget_costs(describe(model, drafter))
    sequences = rows.tokens[:, : max(rows.lengths)]
    if keep_cache:
        fill_cache(cache, finished_keys, rows)
    if outputs is None:
        return sequences
    return GenerateAdaFlashOutput(
        sequences=sequences, scores=outputs.scores(), logits=outputs.logits(), cache=cache, statistics=statistics
    )
