"""What a call to `generate` did, per row: how much was drafted, verified and accepted, and where the time went."""

import contextlib
import contextvars
from dataclasses import dataclass, field

from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class AdaFlashStatistics:
    """Statistics of one call. Row i belongs to row i of the output.

    Attributes:
        accepted_lengths: per row and verify step, tokens committed by it, bonus token included (tau). Tokens that a
            stop condition cut off are not counted.
        candidate_lengths: per row and verify step, tokens put up for verification, anchor included.
        draft_sources: per row and verify step, who proposed the candidate: `drafter`, `lookup` (the row's own text) or
            `none` where only the anchor was verified.
        prefill_seconds, draft_seconds, verify_seconds: wall-clock time of the whole call, in seconds.
    """

    accepted_lengths: list[list[int]] = field(default_factory=list)
    candidate_lengths: list[list[int]] = field(default_factory=list)
    draft_sources: list[list[str]] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @classmethod
    def of(cls, rows: int) -> "AdaFlashStatistics":
        """Empty statistics of so many rows."""
        return cls(*([[] for _ in range(rows)] for _ in range(3)))

    def add(self, row: int, accepted: int, candidate: int, source: str) -> None:
        """One verify step of a row."""
        self.accepted_lengths[row].append(accepted)
        self.candidate_lengths[row].append(candidate)
        self.draft_sources[row].append(source)

    @property
    def accepted_by_source(self) -> dict[str, int]:
        """Committed tokens beside the bonus tokens, by who proposed them."""
        counts: dict[str, int] = {}
        for lengths, sources in zip(self.accepted_lengths, self.draft_sources, strict=True):
            for length, source in zip(lengths, sources, strict=True):
                counts[source] = counts.get(source, 0) + length - 1
        return counts

    @property
    def mean_accepted_length(self) -> float:
        """tau: committed tokens per verify step and row, over the call; 0 when no step was taken."""
        steps = sum(len(row) for row in self.accepted_lengths)
        return sum(map(sum, self.accepted_lengths)) / steps if steps else 0.0

    @property
    def mean_candidate_length(self) -> float:
        """Tokens verified per step and row, anchor included; 0 when no step was taken."""
        steps = sum(len(row) for row in self.candidate_lengths)
        return sum(map(sum, self.candidate_lengths)) / steps if steps else 0.0

    def trim(self, generated: list[int]) -> None:
        """Takes back the latest tokens of rows that were cut to `generated` new tokens, the prompt's own included."""
        lists = zip(self.accepted_lengths, self.candidate_lengths, self.draft_sources, generated, strict=True)
        for accepted, candidates, sources, tokens in lists:
            excess = 1 + sum(accepted) - tokens
            while accepted and excess >= accepted[-1]:
                excess -= accepted.pop()
                candidates.pop()
                sources.pop()
            if accepted:
                accepted[-1] -= excess


@dataclass
class GenerateAdaFlashOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` and the call's statistics."""

    statistics: AdaFlashStatistics | None = None


_collector: contextvars.ContextVar[list[AdaFlashStatistics] | None] = contextvars.ContextVar("adaflash", default=None)


@contextlib.contextmanager
def collect_statistics():
    """Yields a list to which every AdaFlash `generate` call of this thread inside the block adds its statistics."""
    calls: list[AdaFlashStatistics] = []
    token = _collector.set(calls)
    try:
        yield calls
    finally:
        _collector.reset(token)


def report(statistics: AdaFlashStatistics) -> None:
    """Hands a finished call's statistics to the collector, if one is open."""
    calls = _collector.get()
    if calls is not None:
        calls.append(statistics)
