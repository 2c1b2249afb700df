"""The decoding loop: draft a block per row, choose lengths, verify in one packed pass, commit what is accepted.

One loop serves every batch size. Rows are left-padded on entry and on return only; inside, slot j of a row is its
position j. A row that has finished leaves the batch, and is padded where plain `generate` without an end token would
go on. Stopping criteria see one row at a time, and no scores.
"""

import time

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria as hf

from ..errors import AdaFlashError
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .attention import PackedBatch
from .cache import RaggedCache
from .candidate_generator import DiffusionCandidateGenerator, Draft
from .integration import packed_attention
from .processing import TargetChoice
from .statistics import AdaFlashStatistics, GenerateAdaFlashOutput, report


class _Rows:
    """Committed tokens of all rows of a call, and which of them are live.

    `tokens` is `[batch, capacity]` with the caller's left padding; `lengths[i]` counts row i's tokens, padding
    included; `live` lists the batch indices of the rows still generating, in the order of the cache's rows.
    """

    def __init__(self, input_ids: torch.Tensor, attention_mask, max_length: int, pad_token_id: int):
        batch, width = input_ids.shape
        self.prompt_width, self.max_length = width, max_length
        self.tokens = input_ids.new_full((batch, max(max_length, width)), pad_token_id)
        self.tokens[:, :width] = input_ids
        if attention_mask is None:
            self.padding = [0] * batch
        else:
            self.padding = (width - attention_mask[:, :width].long().sum(dim=1)).tolist()
        self.lengths = [width] * batch
        self.live = list(range(batch))

    def prefix(self, row: int) -> torch.Tensor:
        index = self.live[row]
        return self.tokens[index : index + 1, : self.lengths[index]]

    def anchors(self) -> torch.Tensor:
        return torch.stack([self.tokens[i, self.lengths[i] - 1] for i in self.live])

    def positions(self) -> list[int]:
        """Position of each live row's last committed token, padding not counted."""
        return [self.lengths[i] - 1 - self.padding[i] for i in self.live]

    def room(self) -> list[int]:
        """Drafted tokens that each live row can use: what is left, less the bonus token."""
        return [self.max_length - self.lengths[i] - 1 for i in self.live]


class _Stopping:
    """Applies stopping criteria token by token, so that a row ends at the first token that any of them names."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.eos: set[int] = set()
        self.others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is hf.EosTokenCriteria:
                self.eos.update(criterion.eos_token_id.tolist())
            elif type(criterion) is not hf.MaxLengthCriteria:
                self.others.append(criterion)

    def cut(self, new_tokens: list[int], prefix: torch.Tensor, room: int) -> tuple[list[int], bool]:
        """The new tokens that are kept, and whether the row is finished."""
        new_tokens = new_tokens[:room]
        for k, token in enumerate(new_tokens):
            finished = token in self.eos or k + 1 == room
            if self.others:
                tail = torch.tensor([new_tokens[: k + 1]], device=prefix.device)
                finished |= bool(self.others(torch.cat([prefix, tail], dim=1), None).all())
            if finished:
                return new_tokens[: k + 1], True
        return new_tokens, False


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
    keep = generation_config.return_dict_in_generate
    keep_cache = cache is not None and (keep or cache_is_callers)
    choice = TargetChoice(
        logits_processor, generation_config.do_sample, batch_size, keep and generation_config.output_scores
    )
    generator = DiffusionCandidateGenerator(
        drafter,
        target,
        generation_config.do_sample,
        choice.temperature,
        drafter.draft_processors,
        generation_config.num_assistant_tokens,
    )
    stopping = _Stopping(stopping_criteria)
    pad = generation_config._pad_token_tensor
    max_length = min(generation_config.max_length, stopping_criteria.max_length or generation_config.max_length)
    rows = _Rows(input_ids, attention_mask, max_length, int(pad) if pad is not None else 0)
    statistics = AdaFlashStatistics([[] for _ in range(batch_size)], [[] for _ in range(batch_size)])
    ragged_cache = RaggedCache()
    device = input_ids.device
    outputs = _Outputs(batch_size, generation_config) if keep else None
    finished_keys: dict[int, list] = {}

    # 2. Prefill: every prompt in one packed pass, scores at each row's last token only.
    clock = time.perf_counter()
    lengths = [rows.prompt_width - padding for padding in rows.padding]
    prompts = torch.cat([rows.tokens[i, rows.padding[i] : rows.prompt_width] for i in rows.live])
    packed = _pack(lengths, [0] * batch_size, model.device, starts_at_zero=True)
    last = torch.tensor(lengths, device=model.device).cumsum(0) - 1
    logits, features = _target_pass(target, prompts, packed, ragged_cache, last)
    draft = Draft([0] * batch_size, prompts[:0])
    kept_features = torch.arange(len(prompts), device=features.device)
    first = True

    while True:
        # 3. Accept: drafts that the target would have chosen, and its own next token.
        counts = [count + 1 for count in draft.counts]
        tokens = _interleave(rows.anchors(), draft)
        accepted, bonus, scores = choice(logits, tokens, counts, draft, rows.prefix, rows.live)
        # The clock stops here: on a GPU the pass is only known to be over once its result has been read.
        if first:
            statistics.prefill_seconds = time.perf_counter() - clock
        else:
            statistics.verify_seconds += time.perf_counter() - clock

        # 4. Commit, and hand the features of committed tokens to the drafter.
        if not first:
            kept_features = _kept(counts, accepted, features.device)
        where = packed.query_rows, packed.query_positions
        generator.observe(features[kept_features], *(x.to(features.device)[kept_features] for x in where))
        drafted = draft.tokens.tolist()
        finished, start, packed_start = [], 0, 0
        for row, index in enumerate(rows.live):
            new = [*drafted[start : start + accepted[row]], bonus[row]]
            new, done = stopping.cut(new, rows.prefix(row), rows.max_length - rows.lengths[index])
            length = rows.lengths[index]
            rows.tokens[index, length : length + len(new)] = torch.tensor(new, device=device)
            rows.lengths[index] += len(new)
            if not first:
                statistics.accepted_lengths[index].append(len(new))
                statistics.candidate_lengths[index].append(counts[row])
            if streamer is not None:
                for token in new:
                    streamer.put(torch.tensor([token]))
            if outputs is not None:
                row_logits = logits[packed_start : packed_start + len(new)]
                outputs.add(index, row_logits, None if scores is None else scores[row][: len(new)])
            if done:
                finished.append(row)
            start += draft.counts[row]
            packed_start += counts[row]
        first = False

        # 5. Finished rows leave; the last live row takes the free place.
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
        if not rows.live:
            break

        # 6. Draft one block per live row, unless none has room for a draft.
        clock = time.perf_counter()
        anchors = rows.anchors()
        positions = torch.tensor(rows.positions(), device=device)
        room = rows.room()
        if max(room) > 0 and generator.length_processor.most > 0:
            prefixes = [rows.prefix(row) for row in range(len(room))] if drafter.draft_processors else None
            draft = generator.draft(anchors, positions, torch.tensor(room, device=device), prefixes)
        else:
            draft = Draft([0] * len(room), anchors[:0])
        statistics.draft_seconds += time.perf_counter() - clock

        # 7. Verify: anchors and drafts of all rows in one packed pass.
        clock = time.perf_counter()
        tokens = _interleave(anchors, draft)
        packed = _pack([count + 1 for count in draft.counts], rows.positions(), model.device)
        logits, features = _target_pass(target, tokens, packed, ragged_cache, None)

    if streamer is not None:
        streamer.end()
    report(statistics)
    sequences = rows.tokens[:, : max(rows.lengths)]
    if keep_cache:
        _fill_cache(cache, finished_keys, rows)
    if outputs is None:
        return sequences
    return GenerateAdaFlashOutput(
        sequences=sequences, scores=outputs.scores(), logits=outputs.logits(), cache=cache, statistics=statistics
    )


def _target_pass(target: Target, tokens, packed: PackedBatch, cache: RaggedCache, last: torch.Tensor | None):
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


def _pack(counts: list[int], first_positions: list[int], device, starts_at_zero: bool = False) -> PackedBatch:
    """The packed batch of `counts[r]` tokens of row r that start at `first_positions[r]`."""
    lengths = torch.tensor(counts, device=device)
    query_rows = torch.arange(len(counts), device=device).repeat_interleave(lengths)
    offsets = torch.arange(sum(counts), device=device) - (lengths.cumsum(0) - lengths)[query_rows]
    positions = torch.tensor(first_positions, device=device)[query_rows] + offsets
    longest = max(first + count for first, count in zip(first_positions, counts, strict=True))
    return PackedBatch(query_rows, positions, len(counts), longest, counts, starts_at_zero=starts_at_zero)


def _interleave(anchors: torch.Tensor, draft: Draft) -> torch.Tensor:
    """Packed tokens: each row's anchor, then its drafts."""
    counts = torch.tensor(draft.counts, device=anchors.device) + 1
    starts = counts.cumsum(0) - counts
    tokens = anchors.new_empty(int(counts.sum()))
    is_anchor = torch.zeros(len(tokens), dtype=torch.bool, device=anchors.device)
    is_anchor[starts] = True
    tokens[is_anchor], tokens[~is_anchor] = anchors, draft.tokens.to(anchors)
    return tokens


def _kept(counts: list[int], accepted: list[int], device) -> torch.Tensor:
    """Packed indices of the verified tokens that are now committed: each row's anchor and accepted drafts."""
    kept, start = [], 0
    for count, number in zip(counts, accepted, strict=True):
        kept.extend(range(start, start + number + 1))
        start += count
    return torch.tensor(kept, device=device)


def _fill_cache(cache, finished_keys: dict[int, list], rows: _Rows) -> None:
    """Writes every row's keys and values into the caller's cache, left-padded as plain `generate` leaves it."""
    longest = max(rows.lengths) - 1
    for layer in range(len(finished_keys[0])):
        keys, values = [], []
        for index in range(len(rows.lengths)):
            for store, states in zip((keys, values), finished_keys[index][layer], strict=True):
                whole = states.new_zeros(states.shape[0], longest, states.shape[2])
                whole[:, rows.padding[index] : rows.padding[index] + states.shape[1]] = states
                store.append(whole)
        cache.update(torch.stack(keys), torch.stack(values), layer)


class _Outputs:
    """Scores and raw logits per generated token, in the shape of plain `generate`: one `[b, V]` tensor per step.
    Where a row had already finished, the entry is 0."""

    def __init__(self, batch_size: int, config: GenerationConfig):
        self.wanted = {"logits": config.output_logits, "scores": config.output_scores}
        self.rows = {name: [[] for _ in range(batch_size)] for name in self.wanted}

    def add(self, index: int, logits: torch.Tensor, scores: torch.Tensor | None) -> None:
        for name, values in (("logits", logits), ("scores", scores)):
            if self.wanted[name]:
                self.rows[name][index].extend(values.float())

    def _steps(self, name: str):
        if not self.wanted[name]:
            return None
        rows = self.rows[name]
        blank = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([row[step] if step < len(row) else blank for row in rows])
            for step in range(max(len(row) for row in rows))
        )

    def logits(self):
        return self._steps("logits")

    def scores(self):
        return self._steps("scores")
