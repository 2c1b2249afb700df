"""Drafting: from committed tokens and the target's tapped features to candidates for verification.

`DiffusionCandidateGenerator` drafts for all rows of a batch in one drafter forward, and, under the budget policy,
looks continuations up in the rows' own text instead where that promises more. It is also a transformers
`CandidateGenerator`, so transformers' own assisted loop can drive it at batch size 1.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from ..kernels import draft_columns_of
from ..kernels.greedy_verify import argmax
from ..kernels.noise import draw
from ..kernels.packed_linear import HalfPackedLinear
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .attention import PackedBatch
from .budget import Budget, numbers_to_weigh
from .cache import RaggedCache
from .costs import CostModel
from .logits_process import AdaptiveLengthLogitsProcessor, is_masked
from .lookup import LookupDraft, NgramIndex


@dataclass
class Draft:
    """Drafts of one step.

    Attributes:
        counts: drafted tokens per row.
        tokens: int64 `[sum(counts)]`, packed by row.
        scores: `[sum(counts), W]`: each token was drawn from q = softmax(scores / temperature); `None` when greedy,
            and where no token was drawn but all looked up (q is then one-hot).
        temperature: of q.
        columns: int32 `[V]`, the column of `scores` for each token of the target, -1 for none; `None` where W = V.
        lookups: per row, what a looked-up draft was taken from, `None` where the drafter proposed it.
    """

    counts: list[int]
    tokens: torch.Tensor
    scores: torch.Tensor | None = None
    temperature: float = 1.0
    columns: torch.Tensor | None = None
    lookups: list[LookupDraft | None] = field(default_factory=list)

    def __post_init__(self):
        if not self.lookups:
            self.lookups = [None] * len(self.counts)

    def source(self, row: int) -> str:
        """Who proposed a row's draft."""
        if not self.counts[row]:
            return "none"
        return "drafter" if self.lookups[row] is None else "lookup"

    def probabilities(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """q of the packed drafts `first` to `last` over the target's vocabulary, float32 `[n, V]`."""
        q = (self.scores[first:last].float() / self.temperature).softmax(dim=-1)
        if self.columns is None:
            return q
        columns = self.columns.to(q.device).long()
        return torch.where(columns < 0, 0.0, q[:, columns.clamp(min=0)])


class DiffusionCandidateGenerator(CandidateGenerator):
    """Block-diffusion drafting with adaptive length.

    Args:
        drafter: the drafter; it is only read, so one drafter can serve several generators.
        target: the target that it drafts for.
        do_sample: draw drafts from the drafter's distribution at `temperature`, or take the argmax.
        temperature: softmax temperature of the draft.
        draft_processors: the user's processors of draft scores. They see one drafted position at a time and may
            shorten a draft by leaving only the mask token possible. Lengths then follow the length head and them, not
            the budget, which would have to know them beforehand.
        most: a further cap on drafted tokens per step, beside the drafter's own `num_assistant_tokens`.
        costs: what passes cost on this machine; needed by the `budget` policy.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: AdaFlashDrafter,
        target: Target,
        do_sample: bool = False,
        temperature: float = 1.0,
        draft_processors: LogitsProcessorList | None = None,
        most: int | None = None,
        costs: CostModel | None = None,
    ):
        config = drafter.config
        self.drafter, self.target, self.config = drafter, target, config
        self.do_sample, self.temperature = do_sample, temperature
        self.length_processor = AdaptiveLengthLogitsProcessor(
            drafter.generation_config,
            config.num_drafted_tokens if most is None else min(most, config.num_drafted_tokens),
            config.mask_token_id,
            drafter.length_head,
        )
        self.window = drafter.generation_config.context_window
        self.budget = None
        if self.length_processor.policy == "budget" and costs is not None and not draft_processors:
            policy = drafter.generation_config
            caps = [n for n in (most, policy.num_assistant_tokens) if n is not None]
            lookup_tokens = min([policy.lookup_tokens, *caps])
            drafted = self.length_processor.most
            self.budget = Budget(costs, drafted, lookup_tokens, do_sample, self._blocks(drafted))
        self._texts: list[NgramIndex] = []
        self.draft_processors = LogitsProcessorList(draft_processors or [])
        self.token_ids = drafter.draft_token_ids if config.draft_vocab_size is not None else None
        self._columns = None if self.token_ids is None else draft_columns_of(self.token_ids, config.vocab_size)
        half = any(isinstance(module, HalfPackedLinear) for module in drafter.modules())
        self._logits = target.head_rows(self.token_ids, half)
        self._cache = RaggedCache()
        self._pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.model_kwargs_overrides = {"output_hidden_states": [i + 1 for i in config.target_layer_ids]}

    def _blocks(self, most: int) -> list[tuple[int, int]]:
        """The blocks that may be drafted, as (tokens, slots): the whole one, and narrower ones, of which not every
        size is worth weighing. Only the whole one where a `length` head reads it, and with a `context_window`, whose
        slots are laid out for it: what a wider block left behind would pass for context."""
        whole, head = self.config.num_drafted_tokens, self.drafter.length_head
        blocks = [(most, self.config.block_size)]
        if self.window is None and (head is None or head.config.kind == "survival"):
            spare = self.config.block_size - whole
            blocks += [(n, n + spare) for n in numbers_to_weigh(most, each=4) if n < whole]
        return blocks

    def admit(self, tokens: list[int]) -> None:
        """Adds a row with its prompt's token ids, padding left out."""
        if self.budget is not None:
            self._texts.append(NgramIndex(tokens))

    def commit(self, row: int, tokens: list[int]) -> None:
        """Adds committed tokens to a row's text."""
        if self.budget is not None:
            self._texts[row].extend(tokens)

    def learn(self, draft: Draft, accepted: list[int], seconds: float | None, tokens: int, slots: int) -> None:
        """What became of a draft: drafts accepted per row, and how long the pass took over `tokens` packed tokens with
        `slots` cached positions; `None` where the caller's own processors and the like took part of that time."""
        if self.budget is not None:
            self.budget.learn(draft.counts, accepted, draft.lookups)
            if seconds is not None:
                self.budget.time(seconds, tokens, slots)

    @property
    def costs_were_wrong(self) -> bool:
        return self.budget is not None and self.budget.costs_were_wrong

    def observe(self, features: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Adds tapped features `[n, T*d]` of committed tokens at `rows`, `positions` (int64 `[n]`). They are
        projected with the next block, however many steps later that is."""
        if self.length_processor.most == 0:
            return
        self._pending.append((features, rows, positions))
        if self.window is not None:
            features, rows, positions = (torch.cat(parts) for parts in zip(*self._pending, strict=True))
            newest = positions.new_zeros(int(rows.max()) + 1).scatter_reduce(0, rows, positions, "amax")
            recent = positions > newest[rows] - self.window
            self._pending = [(features[recent], rows[recent], positions[recent])]

    def copy_beginning(self, source: int, destination: int, length: int) -> None:
        """Gives a new row the context that another has of its first `length` tokens, which both begin with."""
        self._cache.copy_beginning(source, destination, length)
        for features, rows, positions in list(self._pending):
            shared = (rows == source) & (positions < length)
            if shared.any():
                copies = torch.full_like(positions[shared], destination)
                self._pending.append((features[shared], copies, positions[shared]))

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of the finished row `destination`, whose state is dropped."""
        self._cache.move_row(source, destination)
        if self.budget is not None:
            self._texts[destination] = self._texts[source]
            self._texts.pop()
        moved = []
        for features, rows, positions in self._pending:
            kept = rows != destination
            features, rows, positions = features[kept], rows[kept], positions[kept]
            moved.append((features, torch.where(rows == source, destination, rows), positions))
        self._pending = moved

    def draft(
        self, anchors: torch.Tensor, positions: torch.Tensor, room: torch.Tensor, prefixes=None, waiting: bool = False
    ) -> Draft:
        """Drafts at most one block for each row.

        Args:
            anchors: int64 `[rows]`, the last committed token of each row.
            positions: int64 `[rows]`, its position in the row.
            room: int64 `[rows]`, most drafted tokens that the row can use.
            prefixes: per row, int64 `[1, L]` committed tokens, needed by `draft_processors` only.
            waiting: whether other rows take the places of those that finish.
        """
        if self.budget is not None:
            return self._draft_within_budget(anchors, positions, room, waiting)
        hidden = self._block_hidden(anchors, positions, list(range(len(anchors))))
        lengths = self.length_processor.choose(hidden, room.to(hidden.device))
        logits = self._kept_logits(hidden, lengths)
        if self.draft_processors:
            return self._draft_processed(logits, lengths.tolist(), prefixes)
        tokens = self._pick(logits).to(anchors.device)
        if not self.do_sample:
            return Draft(lengths.tolist(), tokens)
        return Draft(lengths.tolist(), tokens, logits, self.temperature, self._columns)

    def _draft_within_budget(self, anchors, positions, room, waiting: bool) -> Draft:
        """Routes each row to lookup, drafter or nothing, then divides the step's budget over all of them."""
        budget, room, rows = self.budget, room.tolist(), len(anchors)
        worth = np.ones((rows, 1)) if waiting else budget.worth(room)[:, None]
        slots, late = int(positions.sum()), budget.spread(sum(len(part[1]) for part in self._pending), room)
        # 1. Look up, and decide which rows the drafter serves.
        most = [min(n, budget.lookup_tokens) for n in room]
        lookups = [text.lookup(n) if n > 0 else None for text, n in zip(self._texts, most, strict=True)]
        survival = budget.lookup_survival(lookups, room)
        expected = budget.drafter_survival(room)
        chosen, block = budget.route(survival * worth, expected * worth, slots, late)
        served = chosen.nonzero()[0].tolist()
        # 2. Draft for them, and keep the lookup where it still promises more.
        if served:
            hidden = self._block_hidden(anchors, positions, served, block[1])
            curves = self.length_processor.survival(hidden)
            if curves is not None:
                expected[served, : block[0]] = budget.judged(curves.double().cpu().numpy())
            expected *= np.arange(budget.width) < np.minimum(room, block[0])[:, None]
        drafting = [row for row in served if expected[row].sum() >= survival[row].sum()]
        survival[drafting] = expected[drafting]
        # 3. Lengths for all rows together.
        lengths = budget.lengths(survival * worth, len(served), slots, late, block).tolist()
        by_drafter = [lengths[row] if row in drafting else 0 for row in served]
        if served and curves is not None:
            budget.promise(expected[served, : block[0]], np.array(by_drafter))
        lookups = [None if row in drafting else lookup for row, lookup in enumerate(lookups)]
        looked_up = [t for row, n in enumerate(lengths) if n and row not in drafting for t in lookups[row].tokens[:n]]
        looked_up = torch.tensor(looked_up, dtype=torch.long, device=anchors.device)
        if not any(by_drafter):
            return Draft(lengths, looked_up, lookups=lookups)
        owners = torch.tensor([row in drafting for row in range(rows)]).repeat_interleave(torch.tensor(lengths))
        owners = owners.to(anchors.device)
        logits = self._kept_logits(hidden, torch.tensor(by_drafter, device=hidden.device))
        tokens = anchors.new_empty(len(owners))
        tokens[owners], tokens[~owners] = self._pick(logits).to(anchors.device), looked_up
        if not self.do_sample:
            return Draft(lengths, tokens, lookups=lookups)
        if not len(looked_up):
            return Draft(lengths, tokens, logits, self.temperature, self._columns, lookups)
        # Over the whole vocabulary: a looked-up token was certain to be proposed, and the drafter may not know it.
        scores = torch.full((len(owners), self.config.vocab_size), float("-inf"), device=anchors.device)
        scores.scatter_(1, tokens[:, None], 0.0)
        scores[owners] = self._whole(logits).to(anchors.device)
        return Draft(lengths, tokens, scores, self.temperature, lookups=lookups)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Draft logits `[n, W]` over the target's vocabulary, float32 `[n, V]`."""
        if self.token_ids is None:
            return logits.float()
        whole = logits.new_full((len(logits), self.config.vocab_size), float("-inf"), dtype=torch.float32)
        return whole.index_copy_(1, self.token_ids.to(logits.device), logits.float())

    def _kept_logits(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Draft logits `[sum(lengths), v]` of the first `lengths` `[n]` drafted slots of blocks `[n, size, d]`."""
        drafted = self.drafter.drafted(hidden)
        return self._logits(drafted[torch.arange(drafted.shape[1], device=hidden.device) < lengths[:, None]])

    def _block_hidden(self, anchors, positions, served: list[int], size: int | None = None) -> torch.Tensor:
        """Runs the drafter on blocks of `size` slots, whole ones by default, of the rows `served` and on all context
        that it hasn't seen; hidden states `[len(served), size, d]`."""
        size = self.config.block_size if size is None else size
        rows, device = len(anchors), self.drafter.device
        chosen = torch.tensor(served, device=anchors.device)
        noise_ids = anchors.new_full((len(served), size), self.config.mask_token_id)
        noise_ids[:, 0] = anchors[chosen]
        noise = self.target.embed(noise_ids).reshape(1, len(served) * size, -1)
        features, context_rows, context_positions = (torch.cat(parts) for parts in zip(*self._pending, strict=True))
        self._pending = []
        positions = positions.to(device)
        slots = (positions[chosen.to(device), None] + torch.arange(size, device=device)).flatten()
        block_rows = chosen.to(device).repeat_interleave(size)
        key_positions = torch.cat([context_positions.to(device), slots])
        counts = [0] * rows
        for row in served:
            counts[row] = size
        longest, span = int(positions.max()) + size, None
        if rows == 1 and self.window is None:  # what was committed since the last block, and this block
            span = longest - len(key_positions), longest
        batch = PackedBatch(
            query_rows=block_rows,
            query_positions=slots,
            num_rows=rows,
            longest=longest,
            counts=counts,
            key_rows=torch.cat([context_rows.to(device), block_rows]),
            key_positions=key_positions,
            block_ends=positions + size - 1,
            ring=None if self.window is None else self.window + self.config.block_size,
            span=span,
        )
        self._cache.begin(batch)
        output = self.drafter(
            noise_embeds=noise.to(device),
            context_hidden_states=features[None].to(device),
            position_ids=key_positions[None],
            cache=self._cache,
            ragged=batch,
        )
        return output.last_hidden_state.reshape(len(served), size, -1)

    def _pick(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens `[n]`: the argmax of the draft's logits `[n, W]`, or drawn at the draft's temperature."""
        if not len(logits):
            return torch.zeros(0, dtype=torch.long, device=logits.device)
        if self.do_sample:
            choice = draw((logits.float() / self.temperature).softmax(dim=-1))
        else:
            choice = argmax(logits)
        return choice if self.token_ids is None else self.token_ids.to(choice.device)[choice]

    def _draft_processed(self, logits: torch.Tensor, lengths: list[int], prefixes) -> Draft:
        """Position by position through the user's draft-side processors, over the whole vocabulary."""
        whole = self._whole(logits) / (self.temperature if self.do_sample else 1.0)
        tokens, kept_scores, counts, start = [], [], [], 0
        for length, prefix in zip(lengths, prefixes, strict=True):
            count = 0
            for scores in whole[start : start + length]:
                scores = self.draft_processors(prefix, scores[None])
                if is_masked(scores, self.config.mask_token_id)[0]:
                    break
                if self.do_sample:
                    token = torch.multinomial(scores.softmax(dim=-1), 1)
                else:
                    token = scores.argmax(dim=-1, keepdim=True)
                tokens.append(token[0])
                kept_scores.append(scores)
                prefix = torch.cat([prefix, token.to(prefix)], dim=1)
                count += 1
            counts.append(count)
            start += length
        packed = torch.cat(tokens) if tokens else logits.new_zeros(0, dtype=torch.long)
        if not self.do_sample:
            return Draft(counts, packed)
        return Draft(counts, packed, torch.cat(kept_scores) if kept_scores else whole[:0])

    def get_candidates(
        self, input_ids, model_kwargs=None, model_outputs=None, is_first_iteration=False, n_last_matches=0, **kwargs
    ):
        """transformers' own contract, at batch size 1 without padding: `(ids [1, L + drafted], scores or None)`."""
        if is_first_iteration:
            return input_ids, None
        length = input_ids.shape[1]
        first = 0 if not self._cache.keys else length - 2 - int(n_last_matches)
        positions = torch.arange(first, length - 1, device=input_ids.device)
        hidden = [model_outputs.hidden_states[i + 1][0, : len(positions)] for i in self.config.target_layer_ids]
        self.observe(torch.cat(hidden, dim=-1), torch.zeros_like(positions), positions)
        position = torch.tensor([length - 1], device=input_ids.device)
        room = torch.full_like(position, self.config.num_drafted_tokens)
        draft = self.draft(input_ids[:, -1], position, room, prefixes=[input_ids])
        ids = torch.cat([input_ids, draft.tokens[None]], dim=1)
        if draft.scores is None:
            return ids, None
        return ids, draft.probabilities().log()[None]

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing to learn within a call: lengths come from the length head."""
