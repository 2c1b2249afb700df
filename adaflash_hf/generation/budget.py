"""The budget policy: which source each row drafts from, how wide a block the drafter drafts, and how many drafted
tokens the step verifies.

All are chosen per step, over all live rows together, to commit the most expected tokens per second:

    (rows + sum of survival over verified drafts) / seconds(rows + verified drafts)

each token weighed by what it is `worth` to the batch.

Survival of a row's position k is the probability that it and all before it are accepted, so it falls along a row, and
taking positions in order of survival never leaves a gap (the idea of D-Cut, and of DSpark, arXiv 2607.05147).
Everything that enters was known before a token of this step was drawn: hidden states, looked-up continuations,
outcomes of earlier steps, and costs measured before the call.
"""

import numpy as np
import torch

from .. import kernels
from .acceptance import (
    DRAFTER_PRIOR,
    FORGET,
    LOOKUP_PRIOR,
    PRIOR_WEIGHT,
    SAMPLED,
    RunningAcceptance,
    lookup_classes,
)
from .costs import WRONG, CostModel
from .lookup import LookupDraft


# Steps that a drafter's reading of a backlog is taken to serve, if the answer can last so long.
HORIZON = 32
# How sharply a row that has written less than the others is taken to be the last to finish. Replayed on batches of 4,
# 16 and 32 answers, 8 did best, 2 to 16 within 2 %.
LAST = 8


def allocate(survival: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Drafted tokens to verify per row, int64 `[rows]`: the best of all choices (`kernels.survival_lengths`).

    Args:
        survival: float64 `[rows, K]`, falling along each row; 0 where a row has nothing to offer.
        seconds: float64 `[rows * K + 1]`, duration of the step when n drafts are verified, rising with n.
    """
    by_tokens = np.concatenate([np.full(len(survival), seconds[0]), seconds])
    lengths = kernels.survival_lengths(torch.from_numpy(survival), torch.from_numpy(by_tokens)).numpy()
    # Where costs are flat, rounding can make a token that can't survive look free; there may be none to verify.
    return np.minimum(lengths, (survival > 0).sum(axis=1))


def best_rate(survival: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Expected tokens per second of that choice, `[...]`; arguments as in `allocate`, or many of them: survival
    `[..., rows, K]`, seconds `[..., rows * K + 1]`."""
    tokens = np.full(seconds.shape, float(survival.shape[-2]))
    tokens[..., 1:] -= np.sort(-survival.reshape(*survival.shape[:-2], -1), axis=-1).cumsum(axis=-1)
    return (tokens / seconds).max(axis=-1)


def numbers_to_weigh(most: int, each: int) -> list[int]:
    """Numbers from 1 to `most` among which the best is sought: all up to `each`, then powers of 2, and `most`."""
    return [n for n in range(1, most + 1) if n <= each or n & (n - 1) == 0 or n == most]


def _before(survival: np.ndarray) -> np.ndarray:
    """Survival `[n, k]` of the position before each one, 1 before the first."""
    return np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)


class Budget:
    """State of the policy during one call.

    Args:
        costs: what passes of this target and drafter cost on this machine.
        drafted: tokens that one block of the drafter proposes, capped by the user's settings.
        lookup_tokens: most looked-up tokens; 0 switches lookup off.
        sampled: whether tokens are drawn, not the target's argmax.
        blocks: the blocks that the drafter may draft, as (tokens, slots), the whole one first; by default that alone.
    """

    def __init__(
        self,
        costs: CostModel,
        drafted: int,
        lookup_tokens: int,
        sampled: bool = False,
        blocks: list[tuple[int, int]] | None = None,
    ):
        self.costs, self.drafted, self.lookup_tokens = costs, drafted, lookup_tokens
        self.blocks = blocks or [(drafted, drafted + 1)]
        share = SAMPLED if sampled else 1.0
        self.lookup = RunningAcceptance(share * np.array(LOOKUP_PRIOR))
        self.drafter = RunningAcceptance([share * DRAFTER_PRIOR] * drafted)
        self._ratios: list[float] = []
        self._promised = self._kept = 0.0

    @property
    def width(self) -> int:
        return max(self.drafted, self.lookup_tokens)

    def lookup_survival(self, lookups: list[LookupDraft | None], room: list[int]) -> np.ndarray:
        """`[rows, width]` for the looked-up continuations, 0 past the room that a row has."""
        counts = np.array([0 if lookup is None else len(lookup.tokens) for lookup in lookups])
        survival = self.lookup.rates[lookup_classes(lookups, self.width)].cumprod(axis=1)
        return survival * (np.arange(self.width) < np.minimum(counts, room)[:, None])

    def drafter_survival(self, room: list[int]) -> np.ndarray:
        """`[rows, width]` that the drafter is expected to reach, before it has run."""
        curve = np.zeros(self.width)
        curve[: self.drafted] = self.drafter.rates.cumprod()
        return curve * (np.arange(self.width) < np.asarray(room)[:, None])

    @staticmethod
    def spread(late: int, room: list[int]) -> int:
        """The drafter's backlog of `late` committed tokens, per step that it serves. It is read once for the rest of
        an answer; charged to one step, a prompt would keep the drafter from ever starting."""
        return late // max(1, min(HORIZON, max(room)))

    @property
    def trust(self) -> float:
        """Accepted drafts over what the length head promised in this call: a factor on its conditional probabilities.
        Texts differ from those it was calibrated on."""
        return min(1.5, (PRIOR_WEIGHT + self._kept) / (PRIOR_WEIGHT + self._promised))

    def judged(self, survival: np.ndarray) -> np.ndarray:
        """The length head's survival `[n, drafted]`, each step of it corrected by what it was worth in this call."""
        before = _before(survival)
        steps = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
        return np.minimum(steps * self.trust, 1.0).cumprod(axis=1)

    def promise(self, survival: np.ndarray, lengths: np.ndarray) -> None:
        """Notes what the length head says of the rows whose drafts it judged: `survival` `[n, k]` of the k tokens of
        their blocks, 0 past a row's room, and the number of positions `[n]` that are verified. The others, where there
        was room, count as tried with the outcome it names."""
        depth = survival.shape[1]
        chosen = np.arange(depth) < lengths[:, None]
        self._promised += float((survival * chosen).sum())
        before = _before(survival)
        self.drafter.accepted[:depth] += np.where(chosen, 0.0, survival).sum(axis=0)
        self.drafter.tried[:depth] += np.where(chosen | (survival == 0), 0.0, before).sum(axis=0)

    def worth(self, room: list[int]) -> np.ndarray:
        """What a committed token of each row is worth, float64 `[rows]` of mean 1, where no further rows wait.

        A step that a row doesn't need saves its own share of a pass, but passes go on, at the price of a pass for one
        row, until the last row is done. That price is shared out by how likely a row is the last: the more it may
        still write, the likelier.
        """
        rows, left = len(room), np.asarray(room) + 1.0
        one, all_rows = self.costs.verify_seconds(1, rows, 0)[[0, -1]]
        share = 0.0 if rows == 1 else min((all_rows - one) / (rows - 1), all_rows / rows)
        last = (left / left.max()) ** LAST
        return rows * (share + (all_rows - rows * share) * last / last.sum()) / all_rows

    def route(
        self, lookup: np.ndarray, drafter: np.ndarray, slots: int, catching_up: int
    ) -> tuple[np.ndarray, tuple[int, int]]:
        """Rows that the drafter is to serve, bool `[rows]`, and the block of `blocks` that it is to draft for each.

        One drafter pass costs about the same for one row as for a few, so the number of rows is chosen: those that
        gain most over their own lookup. All numbers of rows up to 8 are weighed, then powers of 2. A narrower block is
        weighed where it costs less: a drafter predicts the first tokens of a block nearly as well with fewer masks
        behind them.

        Args:
            lookup, drafter: survival by source `[rows, K]`, times `worth`.
            slots: cached positions over all rows.
            catching_up: committed tokens that the drafter has yet to read, `spread` over steps.
        """
        rows, whole = len(lookup), self.blocks[0]
        verify = self.costs.verify_seconds(rows, rows + lookup.size, slots)
        best, chosen, highest = np.zeros(rows, dtype=bool), whole, best_rate(lookup, verify)
        for block in self.blocks:
            survival = np.where(np.arange(drafter.shape[1]) < block[0], drafter, 0.0)
            gain = survival.sum(axis=1) - lookup.sum(axis=1)
            numbers = np.array(numbers_to_weigh(int((gain > 0).sum()), each=8), dtype=int)
            draft = self._draft_seconds(numbers, block, slots, catching_up)
            if block is not whole:
                cheaper = draft < self._draft_seconds(numbers, whole, slots, catching_up)
                numbers, draft = numbers[cheaper], draft[cheaper]
            if not len(numbers):
                continue
            rank = np.argsort(np.argsort(-gain, kind="stable"))
            served = rank < numbers[:, None]
            rates = best_rate(np.where(served[..., None], survival, lookup), verify + draft[:, None])
            if rates.max() > highest:
                best, chosen, highest = served[rates.argmax()], block, rates.max()
        return best, chosen

    def _draft_seconds(self, rows: int | np.ndarray, block: tuple[int, int], slots: int, late: int) -> np.ndarray:
        return self.costs.draft_seconds(rows, late, slots, block[1] / self.blocks[0][1])

    def lengths(
        self, survival: np.ndarray, served: int, slots: int, caught_up: int, block: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Drafted tokens to verify per row, int64 `[rows]`, once the drafter has run for `served` rows; `survival`
        `[rows, K]` times `worth`."""
        rows = len(survival)
        seconds = self.costs.verify_seconds(rows, rows + survival.size, slots)
        if served:
            seconds = seconds + self._draft_seconds(served, block or self.blocks[0], slots, caught_up)
        return allocate(survival, seconds)

    def learn(self, verified: list[int], accepted: list[int], lookups: list[LookupDraft | None]) -> None:
        """A step's outcome per row: drafts verified, drafts accepted, and the lookup, or `None` for the drafter's."""
        self.lookup.forget()
        self.drafter.forget()
        self._promised, self._kept = self._promised * FORGET, self._kept * FORGET
        if not any(verified):
            return
        looked_up = np.array([lookup is not None for lookup in lookups])
        counts, numbers, width = np.array(verified), np.array(accepted), max(verified)
        for source, rows, classes in (
            (self.lookup, looked_up, lookup_classes(lookups, width)),
            (self.drafter, ~looked_up, np.tile(np.arange(width), (len(counts), 1))),
        ):
            source.add(classes[rows], counts[rows], numbers[rows])
        self._kept += float(numbers[~looked_up].sum())

    def time(self, seconds: float, tokens: int, slots: int) -> None:
        """Compares a verify pass with what it was expected to take."""
        self._ratios.append(seconds / float(self.costs.verify_seconds(tokens, tokens, slots)[0]))

    @property
    def costs_were_wrong(self) -> bool:
        """Whether the passes of this call, at least 16, took far more or less time than the costs say."""
        return len(self._ratios) >= 16 and not 1 / WRONG < float(np.median(self._ratios)) < WRONG
