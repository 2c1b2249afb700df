"""The user's logits processors and warpers on the target's scores, applied as plain `generate` would.

Processors that look at scores only run once on all packed positions. Any other processor is called position by
position with that row's committed tokens and accepted drafts, and only as far as drafts are accepted, so that at
batch size 1 a processor with memory advances once per committed token. In a batch it is called once per row and
position, with that row's tokens at every index.

Where no processor has to see them, the target's logits go to the verification kernels as they are: not copied, not
upcast, the temperature applied there.
"""

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from .. import kernels
from ..errors import AdaFlashError, AdaFlashValueError
from .candidate_generator import Draft


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
_ONE_ROW_ONLY = {
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    hf.SynthIDTextWatermarkLogitsProcessor: "watermarking_config",
}


class TargetChoice:
    """Turns the target's logits into accepted drafts and bonus tokens.

    Args:
        processors: as prepared by `generate`, warpers included.
        do_sample: sample, or take the argmax.
        batch_size: rows of the call; a processor may index its state by row.
        keep_scores: also return processed scores of every committed token.

    Raises:
        AdaFlashValueError: for a processor that keeps its own model state, with more than one row.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, batch_size: int, keep_scores: bool = False):
        self.processors, self.do_sample = processors, do_sample
        self.batch_size, self.keep_scores = batch_size, keep_scores
        self.scores_only = all(type(processor) in _SCORES_ONLY for processor in processors)
        # The verification kernel applies a temperature that comes alone.
        kinds = [type(processor) for processor in processors]
        self.temperature_only = do_sample and kinds in ([], [hf.TemperatureLogitsWarper])
        for kind, option in _ONE_ROW_ONLY.items():
            if batch_size > 1 and any(isinstance(processor, kind) for processor in processors):
                raise AdaFlashValueError(
                    f"`{option}` keeps the state of its rows: with a drafter, generate one prompt at a time."
                )

    @property
    def temperature(self) -> float:
        """The temperature that drafts are best drawn at."""
        for processor in self.processors:
            if isinstance(processor, hf.TemperatureLogitsWarper):
                return float(processor.temperature)
        return 1.0

    def __call__(self, logits, tokens, counts: list[int], draft: Draft, prefixes, row_indices):
        """Args:
            logits: `[T, V]` at the packed tokens.
            tokens: int64 `[T]`, anchor and drafts of each row.
            counts: tokens per row.
            draft: the drafts, with what they were drawn from when sampling.
            prefixes: function from a row to its committed tokens int64 `[1, L]`, padding included.
            row_indices: each row's index in the call's batch.

        Returns:
            accepted drafts and bonus token per row, as lists, and per row the processed scores `[accepted + 1, V]`
            (`None` unless `keep_scores`).

        Raises:
            AdaFlashError: when the next token of a row has no distribution, because scores hold NaN.
        """
        if not self.scores_only:
            return self._position_by_position(logits, tokens, counts, draft, prefixes, row_indices)
        scores = logits
        if self.processors and not self.temperature_only:
            scores = self.processors(tokens[:, None], logits.float())
        starts = torch.tensor([0, *counts]).cumsum(0)
        offsets = starts.to(logits.device)
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
                f"Row {row_indices[bonus.index(-1)]}: the scores of the next token hold NaN or infinity. Check the "
                "target's dtype and the processors; `remove_invalid_values=True` replaces such scores."
            )
        kept = None
        if self.keep_scores:
            ends = zip(starts.tolist(), accepted, strict=False)
            kept = [scores[start : start + count + 1].float() / temperature for start, count in ends]
        return accepted, bonus, kept

    def _position_by_position(self, logits, tokens, counts, draft, prefixes, row_indices):
        accepted, bonus, kept, start = [], [], [], 0
        for row, count in enumerate(counts):
            prefix, row_scores = prefixes(row), []
            for k in range(count):
                scores = self._process(prefix, logits[start + k].float(), row_indices[row])
                row_scores.append(scores)
                drafted, q, at = None, None, start - row + k
                if k + 1 < count:
                    drafted = tokens[start + k + 1 : start + k + 2]
                    if draft.scores is not None:
                        q = draft.probabilities(at, at + 1)[0].to(scores.device)
                token, matched = _choose(scores, drafted, q, self.do_sample)
                if not matched:
                    break
                prefix = torch.cat([prefix, token[None].to(prefix)], dim=1)
            accepted.append(len(row_scores) - 1)
            bonus.append(int(token))
            kept.append(torch.stack(row_scores) if self.keep_scores else None)
            start += count
        return accepted, bonus, kept if self.keep_scores else None

    def _process(self, prefix: torch.Tensor, logits: torch.Tensor, index: int) -> torch.Tensor:
        """Processed scores `[V]` of one position. Some processors hold per-row settings or use the row's index
        (`prefix_allowed_tokens_fn`), so they see a whole batch of copies, of which this row's result is kept."""
        rows = self.batch_size
        return self.processors(prefix.expand(rows, -1).contiguous(), logits.expand(rows, -1).clone())[index]


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
