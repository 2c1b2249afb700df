"""What share of each source's proposals gets accepted, learnt within one call of `generate`.

Estimates rest on committed tokens of earlier steps only, so a length chosen with them leaves rejection sampling exact
(non-anticipation). They start from a prior, follow what is seen, and forget, so that a source that failed is tried
again later.
"""

import numpy as np

from .lookup import LONGEST_MATCH


# Share of looked-up tokens that greedy SmolLM2-135M-Instruct chose, by length of the match they continue (1 to 8 and
# more), over 260 k tokens of answers to the training prompts. A token k places further continues a match k longer,
# and was accepted, given that those before it were, as often as a first token of such a match, to within 0.05.
LOOKUP_PRIOR = (0.24, 0.54, 0.63, 0.68, 0.73, 0.75, 0.77, 0.92)
DRAFTER_PRIOR = 0.5
PRIOR_WEIGHT = 4.0
FORGET = 0.99


class RunningAcceptance:
    """Conditional acceptance by class: how often a proposal of that class is accepted, given that all before it were.

    Args:
        prior: the expected share for each class.
    """

    def __init__(self, prior):
        self.prior = np.asarray(prior, dtype=np.float64)
        self.accepted = np.zeros_like(self.prior)
        self.tried = np.zeros_like(self.prior)

    @property
    def rates(self) -> np.ndarray:
        """Estimated share per class."""
        return (self.prior * PRIOR_WEIGHT + self.accepted) / (PRIOR_WEIGHT + self.tried)

    def forget(self) -> None:
        """One step passes."""
        self.accepted *= FORGET
        self.tried *= FORGET

    def add(self, classes: np.ndarray, accepted: int) -> None:
        """One row's outcome: proposals of these `classes`, in order, of which the first `accepted` were accepted."""
        np.add.at(self.accepted, classes[:accepted], 1.0)
        np.add.at(self.tried, classes[: accepted + 1], 1.0)

    def add_expected(self, survival: np.ndarray, first: int) -> None:
        """Proposals that a length head judged but nobody verified: classes `first` and on, with the probabilities
        `survival` `[classes]` that each and all before it would have been accepted."""
        before = np.concatenate([[1.0], survival[:-1]])
        self.accepted[first:] += survival[first:]
        self.tried[first:] += before[first:]


def lookup_classes(match: int, count: int) -> np.ndarray:
    """Classes of `count` looked-up tokens after a match of `match` tokens."""
    return np.minimum(np.arange(match - 1, match - 1 + count), LONGEST_MATCH - 1)
