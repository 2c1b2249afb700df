"""Metrics of speculative decoding as `evaluate.Metric` classes, usable offline.

    AcceptedLength().compute(accepted_lengths=statistics.accepted_lengths)

Each takes plain lists, so results of any engine can be measured with them.
"""

import datasets
import evaluate

from .acceptance import DomainAcceptance


_CITATION = "AdaFlash, arXiv 2607.19223; Leviathan et al., arXiv 2211.17192"
_STEPS = datasets.Sequence(datasets.Value("int64"))


class AcceptedLength(evaluate.Metric):
    """tau: committed tokens per verify step, bonus token included, over all steps, with a 95 % interval.

    Inputs: `accepted_lengths`, per sequence the tokens that each verify step committed. The interval resamples
    sequences (percentile bootstrap), since steps of one sequence are alike.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation=_CITATION,
            inputs_description="accepted_lengths: list of lists of int",
            features=datasets.Features({"accepted_lengths": _STEPS}),
        )

    def _compute(self, accepted_lengths):
        found = DomainAcceptance(accepted_lengths)
        low, high = found.interval()
        return {
            "accepted_length": found.tau(),
            "low": low,
            "high": high,
            "steps": sum(len(row) for row in accepted_lengths),
        }


class VerifiedTokenEfficiency(evaluate.Metric):
    """Share of verified tokens that were committed: 1 when nothing was verified in vain.

    Inputs: `accepted_lengths` as in `AcceptedLength`, and `candidate_lengths`, tokens verified per step, anchor
    included (the anchor's own verification yields the bonus token, so a step without drafts counts 1 of 1).
    """

    def _info(self):
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation=_CITATION,
            inputs_description="accepted_lengths, candidate_lengths: lists of lists of int",
            features=datasets.Features({"accepted_lengths": _STEPS, "candidate_lengths": _STEPS}),
        )

    def _compute(self, accepted_lengths, candidate_lengths):
        accepted, verified = (sum(map(sum, lists)) for lists in (accepted_lengths, candidate_lengths))
        return {"efficiency": accepted / verified if verified else 0.0, "verified": verified, "committed": accepted}


class Losslessness(evaluate.Metric):
    """Share of outputs that equal the reference token for token, and where the others part.

    Inputs: `predictions` and `references`, new token ids per sequence. `parted_at` lists, for each sequence that
    differs, the first position where it does.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation=_CITATION,
            inputs_description="predictions, references: lists of lists of int",
            features=datasets.Features({"predictions": _STEPS, "references": _STEPS}),
        )

    def _compute(self, predictions, references):
        parted = []
        for ours, theirs in zip(predictions, references, strict=True):
            if list(ours) != list(theirs):
                same = [a == b for a, b in zip(ours, theirs, strict=False)]
                parted.append(same.index(False) if False in same else len(same))
        return {"identical": 1 - len(parted) / max(len(predictions), 1), "parted_at": parted}
