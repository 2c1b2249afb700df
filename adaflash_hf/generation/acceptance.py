"""What share of each source's proposals gets accepted, learnt within one call of `generate`.

Estimates rest on committed tokens of earlier steps only, so a length chosen with them leaves rejection sampling exact
(non-anticipation). They start from a prior, follow what is seen, and forget, so that a source that failed is tried
again later.
"""

import numpy as np

from .lookup import LONGEST_MATCH, ONCE, LookupDraft


# Share of looked-up tokens that greedy SmolLM2-135M-Instruct chose, over 54 k tokens of its answers: the first token
# of a continuation by history (`ONCE`, `MIXED`, `ALIKE`) and length of the match (1 to 8 and more). A token k places
# further, given that those before it were right, continues a match k longer, and did so as often as a first token of
# such a match that occurred once, whatever the history, to within 0.08.
LOOKUP_PRIOR = (
    (0.23, 0.51, 0.63, 0.72, 0.75, 0.78, 0.81, 0.91),
    (0.12, 0.23, 0.24, 0.23, 0.24, 0.25, 0.35, 0.49),
    (0.46, 0.78, 0.85, 0.93, 0.94, 0.96, 0.97, 0.99),
)
DRAFTER_PRIOR = 0.4
# Text sampled at temperature 0.9 follows a lookup so much less often than greedy text.
SAMPLED = 0.75
PRIOR_WEIGHT = 4.0
FORGET = 0.99


class RunningAcceptance:
    """Conditional acceptance by class: how often a proposal of that class is accepted, given that all before it were.

    Args:
        prior: the expected share for each class.
    """

    def __init__(self, prior):
        self.prior = np.asarray(prior, dtype=np.float64).ravel()
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


def lookup_classes(lookups: list[LookupDraft | None], count: int) -> np.ndarray:
    """Classes `[rows, count]` of looked-up tokens, as indices into the flattened `LOOKUP_PRIOR`; 0 where nothing was
    looked up."""
    matches = np.array([1 if lookup is None else lookup.match for lookup in lookups])
    histories = np.array([ONCE if lookup is None else lookup.history for lookup in lookups])
    classes = np.minimum(matches[:, None] - 1 + np.arange(count), LONGEST_MATCH - 1)
    classes[:, 0] += histories * LONGEST_MATCH
    return classes
