"""The user's logits processors and warpers on the target's scores, applied as plain `generate` would.

Processors that look at scores only run once on all packed positions. Any other processor is called position by
position with that row's committed tokens and accepted drafts, and only as far as drafts are accepted, so that at
batch size 1 a processor with memory advances once per committed token. In a batch it is called once per row and
position, with that row's tokens at every index.
"""

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from ..errors import AdaFlashValueError
from .verification import greedy_verify, residual_distribution, row_starts, sample_verify


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

    def __call__(self, logits, tokens, counts: list[int], probabilities, prefixes, row_indices):
        """Args:
            logits: `[T, V]` at the packed tokens.
            tokens: int64 `[T]`, anchor and drafts of each row.
            counts: tokens per row.
            probabilities: `[T - rows, V]`, q of the drafts, or `None` when greedy.
            prefixes: function from a row to its committed tokens int64 `[1, L]`, padding included.
            row_indices: each row's index in the call's batch.

        Returns:
            accepted drafts and bonus token per row, as lists, and per row the processed scores `[accepted + 1, V]`
            (`None` unless `keep_scores`).
        """
        if not self.scores_only:
            return self._position_by_position(logits, tokens, counts, probabilities, prefixes, row_indices)
        scores = logits.float() if self.processors else logits
        if self.processors:
            scores = self.processors(tokens[:, None], scores)
        count_tensor = torch.tensor(counts, device=logits.device)
        if self.do_sample:
            if probabilities is None:
                probabilities = scores.new_zeros(0, scores.shape[1])
            accepted, bonus = sample_verify(scores, probabilities.to(scores.device), tokens, count_tensor)
        else:
            accepted, bonus = greedy_verify(scores, tokens, count_tensor)
        accepted, bonus = torch.stack([accepted, bonus]).tolist()
        kept = None
        if self.keep_scores:
            starts = row_starts(torch.tensor(counts)).tolist()
            kept = [scores[start : start + a + 1].float() for start, a in zip(starts, accepted, strict=True)]
        return accepted, bonus, kept

    def _position_by_position(self, logits, tokens, counts, probabilities, prefixes, row_indices):
        accepted, bonus, kept, start = [], [], [], 0
        if probabilities is not None:
            probabilities = probabilities.to(logits.device)
        for row, count in enumerate(counts):
            prefix, row_scores = prefixes(row), []
            for k in range(count):
                scores = self._process(prefix, logits[start + k].float(), row_indices[row])
                row_scores.append(scores)
                draft = tokens[start + k + 1 : start + k + 2] if k + 1 < count else None
                q = probabilities[start - row + k] if draft is not None and probabilities is not None else None
                token, matched = self._choose(scores, draft, q)
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

    def _choose(self, scores, draft, q) -> tuple[torch.Tensor, bool]:
        """The token `[1]` at one position, and whether it is the accepted draft."""
        if not self.do_sample:
            token = scores.argmax(dim=-1, keepdim=True)
            return token, draft is not None and bool(token == draft)
        p = scores.softmax(dim=-1)
        if draft is None:
            return torch.multinomial(p, 1), False
        if torch.rand((), device=p.device) * q[draft] < p[draft]:
            return draft, True
        return torch.multinomial(residual_distribution(p, q.to(p)), 1), False
