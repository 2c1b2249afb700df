"""Drafting: from committed tokens and the target's tapped features to candidates for verification.

`DiffusionCandidateGenerator` drafts for all rows of a batch in one drafter forward. It is also a transformers
`CandidateGenerator`, so transformers' own assisted loop can drive it at batch size 1.
"""

from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .attention import PackedBatch
from .cache import RaggedCache
from .logits_process import AdaptiveLengthLogitsProcessor, is_masked


@dataclass
class Draft:
    """Drafts of one step.

    Attributes:
        counts: drafted tokens per row.
        tokens: int64 `[sum(counts)]`, packed by row.
        probabilities: float32 `[sum(counts), V]`, the distribution each token was drawn from; `None` when greedy.
    """

    counts: list[int]
    tokens: torch.Tensor
    probabilities: torch.Tensor | None = None


class DiffusionCandidateGenerator(CandidateGenerator):
    """Block-diffusion drafting with adaptive length.

    Args:
        drafter: the drafter; it is only read, so one drafter can serve several generators.
        target: the target that it drafts for.
        do_sample: draw drafts from the drafter's distribution at `temperature`, or take the argmax.
        temperature: softmax temperature of the draft.
        draft_processors: the user's processors of draft scores. They see one drafted position at a time and may
            shorten a draft by leaving only the mask token possible.
        most: a further cap on drafted tokens per step, beside the drafter's own `num_assistant_tokens`.
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
        self.draft_processors = LogitsProcessorList(draft_processors or [])
        self.token_ids = drafter.draft_token_ids if config.draft_vocab_size is not None else None
        self._logits = target.head_rows(self.token_ids)
        self.window = drafter.generation_config.context_window
        self._cache = RaggedCache()
        self._pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.model_kwargs_overrides = {"output_hidden_states": [i + 1 for i in config.target_layer_ids]}

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

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of the finished row `destination`, whose state is dropped."""
        self._cache.move_row(source, destination)
        moved = []
        for features, rows, positions in self._pending:
            kept = rows != destination
            features, rows, positions = features[kept], rows[kept], positions[kept]
            moved.append((features, torch.where(rows == source, destination, rows), positions))
        self._pending = moved

    def draft(self, anchors: torch.Tensor, positions: torch.Tensor, room: torch.Tensor, prefixes=None) -> Draft:
        """Drafts one block for each row.

        Args:
            anchors: int64 `[rows]`, the last committed token of each row.
            positions: int64 `[rows]`, its position in the row.
            room: int64 `[rows]`, most drafted tokens that the row can use.
            prefixes: per row, int64 `[1, L]` committed tokens, needed by `draft_processors` only.
        """
        hidden = self._block_hidden(anchors, positions)
        lengths = self.length_processor.choose(hidden, room.to(hidden.device))
        drafted = self.drafter.drafted(hidden)
        kept = torch.arange(drafted.shape[1], device=hidden.device) < lengths[:, None]
        logits = self._logits(drafted[kept])
        if self.draft_processors:
            return self._draft_processed(logits, lengths.tolist(), prefixes)
        tokens, probabilities = self._pick(logits)
        return Draft(lengths.tolist(), tokens.to(anchors.device), probabilities)

    def _block_hidden(self, anchors, positions) -> torch.Tensor:
        """Runs the drafter on the blocks and on the context that it hasn't seen; hidden states `[rows, B, d]`."""
        size, rows, device = self.config.block_size, len(anchors), self.drafter.device
        noise_ids = anchors.new_full((rows, size), self.config.mask_token_id)
        noise_ids[:, 0] = anchors
        noise = self.target.embed(noise_ids).reshape(1, rows * size, -1)
        features, context_rows, context_positions = (torch.cat(parts) for parts in zip(*self._pending, strict=True))
        self._pending = []
        slots = (positions[:, None] + torch.arange(size, device=positions.device)).flatten().to(device)
        block_rows = torch.arange(rows, device=device).repeat_interleave(size)
        key_positions = torch.cat([context_positions.to(device), slots])
        batch = PackedBatch(
            query_rows=block_rows,
            query_positions=slots,
            num_rows=rows,
            longest=int(slots.max()) + 1,
            counts=[size] * rows,
            key_rows=torch.cat([context_rows.to(device), block_rows]),
            key_positions=key_positions,
            block_ends=slots[size - 1 :: size],
            ring=None if self.window is None else self.window + size,
        )
        self._cache.begin(batch)
        output = self.drafter(
            noise_embeds=noise.to(device),
            context_hidden_states=features[None].to(device),
            position_ids=key_positions[None],
            cache=self._cache,
            ragged=batch,
        )
        return output.last_hidden_state.reshape(rows, size, -1)

    def _pick(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `[n]` and, when sampling, their distribution over the target's vocabulary `[n, V]`."""
        if not self.do_sample:
            choice = logits.argmax(dim=-1)
            return (choice if self.token_ids is None else self.token_ids.to(choice.device)[choice]), None
        probabilities = (logits.float() / self.temperature).softmax(dim=-1)
        if self.token_ids is not None:
            whole = probabilities.new_zeros(len(logits), self.config.vocab_size)
            probabilities = whole.index_copy_(1, self.token_ids.to(logits.device), probabilities)
        if not len(logits):
            return logits.new_zeros(0, dtype=torch.long), probabilities
        return torch.multinomial(probabilities, 1).squeeze(-1), probabilities

    def _draft_processed(self, logits: torch.Tensor, lengths: list[int], prefixes) -> Draft:
        """Position by position through the user's draft-side processors, over the whole vocabulary."""
        whole = logits.new_full((len(logits), self.config.vocab_size), float("-inf"), dtype=torch.float32)
        columns = slice(None) if self.token_ids is None else self.token_ids.to(logits.device)
        whole[:, columns] = logits.float() / (self.temperature if self.do_sample else 1.0)
        tokens, probabilities, counts, start = [], [], [], 0
        for length, prefix in zip(lengths, prefixes, strict=True):
            count = 0
            for scores in whole[start : start + length]:
                scores = self.draft_processors(prefix, scores[None])
                if is_masked(scores, self.config.mask_token_id)[0]:
                    break
                q = scores.softmax(dim=-1)
                token = torch.multinomial(q, 1) if self.do_sample else scores.argmax(dim=-1, keepdim=True)
                tokens.append(token[0])
                probabilities.append(q)
                prefix = torch.cat([prefix, token.to(prefix)], dim=1)
                count += 1
            counts.append(count)
            start += length
        packed = torch.cat(tokens) if tokens else logits.new_zeros(0, dtype=torch.long)
        if not self.do_sample:
            return Draft(counts, packed)
        return Draft(counts, packed, torch.cat(probabilities) if probabilities else whole[:0])

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
        if draft.probabilities is None:
            return ids, None
        return ids, draft.probabilities.log()[None]

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing to learn within a call: lengths come from the length head."""
