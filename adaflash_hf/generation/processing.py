"""The user's logits processors and warpers on the target's scores, applied as plain `generate` would.

Processors are taken at one of three speeds. Those that look at scores only run once on all packed positions. Those
of transformers that also read a row's tokens, and nothing else, run row by row as far as drafts are accepted. Any
other processor may keep state, so it is called exactly as in plain `generate`: once per committed token, with all
rows at the same length. There the rows of a batch accept as many drafts as the least fortunate of them.

Where no processor has to see them, the target's logits go to the verification kernels as they are: not copied, not
upcast, the temperature applied there.
"""

import copy

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from .. import kernels
from ..errors import AdaFlashError
from .candidate_generator import Draft
from .rows import Rows


_SCORES_ONLY = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.SuppressTokensLogitsProcessor,
    hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
)
# Functions of one row's tokens and scores, without memory.
_ROW_BY_ROW = (
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.RepetitionPenaltyLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.SuppressTokensAtBeginLogitsProcessor,
)


# Those of them that would find runs of tokens in padding.
_SEEKING_RUNS = (hf.NoRepeatNGramLogitsProcessor, hf.SequenceBiasLogitsProcessor)


class _WithoutPadding(hf.LogitsProcessor):
    """Shows a processor a row's tokens without the `padding` before them."""

    def __init__(self, processor: hf.LogitsProcessor, padding: int):
        self.processor, self.padding = processor, padding

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return self.processor(input_ids[:, self.padding :], scores)


class TargetChoice:
    """Turns the target's logits into committed tokens.

    Args:
        processors: as prepared by `generate`, warpers included.
        do_sample: sample, or take the argmax.
        keep_scores: also return processed scores of every committed token.
        hide_padding: rows are prompts of a queue, whose answers must not depend on each other's lengths; else padding
            is looked at as in plain `generate`.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        do_sample: bool,
        keep_scores: bool = False,
        hide_padding: bool = False,
    ):
        self.processors, self.do_sample, self.keep_scores = processors, do_sample, keep_scores
        self.hide_padding = hide_padding
        self.scores_only = all(type(processor) in _SCORES_ONLY for processor in processors)
        # The verification kernel applies a temperature that comes alone.
        kinds = [type(processor) for processor in processors]
        self.temperature_only = do_sample and kinds in ([], [hf.TemperatureLogitsWarper])
        self.bare = not processors or self.temperature_only
        self.row_by_row = all(type(processor) in _SCORES_ONLY + _ROW_BY_ROW for processor in processors)

    @property
    def temperature(self) -> float:
        """The temperature that drafts are best drawn at."""
        for processor in self.processors:
            if isinstance(processor, hf.TemperatureLogitsWarper):
                return float(processor.temperature)
        return 1.0

    def rounds(self, logits, tokens, counts: list[int], starts: list[int], draft: Draft, rows: Rows, first: int):
        """Accepts drafts, in one round or one token at a time; the caller commits a round before it asks for the
        next, and stops asking when a row has ended.

        Args:
            logits: `[T, V]` at the packed tokens.
            tokens: int64 `[T]`, anchor and drafts of each row.
            counts, starts: tokens per row, and the packed index of each row's first.
            draft: the drafts, with what they were drawn from when sampling.
            rows: the rows of the call; `counts` belongs to the live ones from place `first` on.

        Yields:
            per row the accepted drafts and the bonus token, or the next of these tokens, as lists, and the processed
            scores of each `[tokens, V]` (`None` unless `keep_scores`).

        Raises:
            AdaFlashError: when the next token of a row has no distribution, because scores hold NaN.
        """
        indices = rows.live[first:]
        if self.scores_only:
            yield self._all_at_once(logits, tokens, counts, starts, draft, indices)
        elif self.row_by_row:
            prefixes = [rows.prefix(place) for place in range(first, len(rows.live))]
            paddings = [rows.padding(index) if self.hide_padding else 0 for index in indices]
            yield self._row_by_row(logits, tokens, counts, starts, draft, indices, prefixes, paddings)
        else:
            yield from self._in_step(logits, tokens, counts, starts, draft, rows)

    def _all_at_once(self, logits, tokens, counts, starts, draft: Draft, indices: list[int]):
        scores = logits
        if self.processors and not self.temperature_only:
            scores = self.processors(tokens[:, None], logits.float())
        offsets = torch.tensor([*starts, len(tokens)], device=logits.device)
        temperature = self.temperature if self.temperature_only else 1.0
        if self.do_sample:
            accepted, bonus = kernels.sample_verify(
                scores,
                tokens,
                offsets,
                # From the host's generator: no device is waited for, and `torch.manual_seed` repeats it.
                int(torch.randint(2**62, ())),
                temperature,
                None if draft.scores is None else draft.scores.to(scores.device),
                draft.temperature,
                None if draft.columns is None else draft.columns.to(scores.device),
            )
        else:
            accepted, bonus = kernels.greedy_verify(scores, tokens, offsets)
        accepted, bonus = torch.stack([accepted, bonus]).tolist()
        if min(bonus) < 0:
            raise AdaFlashError(
                f"Row {indices[bonus.index(-1)]}: the scores of the next token hold NaN or infinity. Check the "
                "target's dtype and the processors; `remove_invalid_values=True` replaces such scores."
            )
        drafted = tokens.tolist()
        taken = list(zip(starts, accepted, strict=True))
        new = [[*drafted[s + 1 : s + 1 + a], b] for (s, a), b in zip(taken, bonus, strict=True)]
        return new, [scores[s : s + a + 1].float() / temperature for s, a in taken] if self.keep_scores else None

    def _row_by_row(
        self, logits, tokens, counts, starts, draft: Draft, indices: list[int], prefixes: list, paddings: list[int]
    ):
        new, kept = [], []
        for row, (start, index, prefix) in enumerate(zip(starts, indices, prefixes, strict=True)):
            row_new, row_scores, matched = [], [], True
            processors = self._of_row(index, paddings[row])
            while matched:
                scores = processors(prefix, logits[start + len(row_new)][None].float())[0]
                token, matched = self._at(scores, tokens, counts, draft, row, start, len(row_new))
                row_new.append(int(token))
                row_scores.append(scores)
                prefix = torch.cat([prefix, token[None].to(prefix)], dim=1)
            new.append(row_new)
            kept.append(torch.stack(row_scores) if self.keep_scores else None)
        return new, kept if self.keep_scores else None

    def _of_row(self, index: int, padding: int) -> LogitsProcessorList:
        """The processors for one row alone: a repetition penalty knows the rows' padding, others are not shown it."""
        alone = LogitsProcessorList(self.processors)
        for i, processor in enumerate(alone):
            if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
                alone[i] = copy.copy(processor)
                alone[i].prompt_ignore_length = processor.prompt_ignore_length[index : index + 1]
            elif padding and isinstance(processor, _SEEKING_RUNS):
                alone[i] = _WithoutPadding(processor, padding)
        return alone

    def _in_step(self, logits, tokens, counts, starts, draft: Draft, rows: Rows):
        step, all_matched = 0, True
        while all_matched:
            # Finished rows are shown as plain `generate` pads them; what is said about them is not used.
            whole = logits.new_zeros(len(rows.tokens), logits.shape[1], dtype=torch.float32)
            whole[rows.live] = logits[[start + step for start in starts]].float()
            length = rows.lengths[rows.live[0]]
            scores = self.processors(rows.tokens[:, :length].clone(), whole)[rows.live]
            new = []
            for row, start in enumerate(starts):
                token, matched = self._at(scores[row], tokens, counts, draft, row, start, step)
                new.append([int(token)])
                all_matched &= matched
            yield new, scores[:, None] if self.keep_scores else None
            step += 1

    def _at(self, scores, tokens, counts, draft: Draft, row: int, start: int, step: int):
        """The choice at the `step`-th packed token of a row that starts at `start`."""
        drafted, q = None, None
        if step + 1 < counts[row]:
            drafted = tokens[start + step + 1 : start + step + 2]
            # Drafts are packed without the anchors, so a row's drafts start one place earlier for each row before it.
            if draft.scores is not None:
                at = start - row + step
                q = draft.probabilities(at, at + 1)[0].to(scores.device)
        return _choose(scores, drafted, q, self.do_sample)


def _choose(scores, drafted, q, do_sample: bool) -> tuple[torch.Tensor, bool]:
    """The token `[1]` at one position, and whether it is the accepted draft: the rules of `kernels.greedy_verify` and
    `kernels.sample_verify`, one position at a time."""
    if not do_sample:
        token = scores.argmax(dim=-1, keepdim=True)
        return token, drafted is not None and bool(token == drafted)
    p = scores.softmax(dim=-1)
    if drafted is None:
        return torch.multinomial(p, 1), False
    if q is None:  # proposed with certainty
        q = torch.zeros_like(p).index_fill_(0, drafted, 1.0)
    if torch.rand((), device=p.device) * q[drafted] < p[drafted]:
        return drafted, True
    residual = (p - q).clamp(min=0)
    # p and q equal to rounding: a rejection that should not have been leaves p itself.
    return torch.multinomial(residual if residual.sum() > 0 else p, 1), False
