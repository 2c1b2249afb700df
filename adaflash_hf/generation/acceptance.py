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

    def add(self, classes: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Outcomes of rows: proposals of these `classes` `[rows, K]`, in order, of which `verified` `[rows]` were
        verified and `accepted` `[rows]` accepted."""
        depth = np.arange(classes.shape[1])
        accepted, verified = accepted[:, None], verified[:, None]
        tried = (depth <= accepted) & (depth < verified)  # what follows the first rejection wasn't tried
        self.accepted += np.bincount(classes[depth < accepted], minlength=len(self.prior))
        self.tried += np.bincount(classes[tried], minlength=len(self.prior))


def lookup_classes(matches: np.ndarray, count: int) -> np.ndarray:
    """Classes `[rows, count]` of looked-up tokens after matches of `matches` `[rows]` tokens."""
    return np.minimum(matches[:, None] - 1 + np.arange(count), LONGEST_MATCH - 1)
