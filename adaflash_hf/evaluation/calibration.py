"""Whether the length head means what it says: expected against realised accepted length, Brier scores, reliability.

A `survival` head gives, per position, the probability of acceptance given that all before were accepted; a `length`
head gives the share of the block worth verifying. Both are measured on text of the target, teacher-forced, which is
what decoding sees when the text is greedy; blocks whose outcome the text doesn't show are left out. `calibrate` fits
one temperature and one bias per position, and puts them into the head.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from ..errors import AdaFlashValueError
from ..training.distillation import DistillationModel
from ..training.length_head import HeadLabels
from ..training.losses import distillation_loss


_BINS = 10


@dataclass
class HeadExamples:
    """Blocks with the head's answers and what happened to them.

    Attributes:
        kind: the head's kind.
        logits: float32 `[m, k]` for `survival`, `[m, 1]` for `length`.
        targets: float32, like `logits`: probability of acceptance given all before, or (accepted + 1) / block_size.
        weights: float32, like `logits`: how often the position is reached; 0 where the outcome is unknown.
        accepted: float32 `[m]`, accepted drafted tokens.
        known: bool `[m]`, whether `accepted` is known.
        block_size: slots of a block.
    """

    kind: str
    logits: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    accepted: torch.Tensor
    known: torch.Tensor
    block_size: int

    def expected(self, logits: torch.Tensor | None = None) -> torch.Tensor:
        """The head's expected accepted length `[m]`, bonus token included."""
        probabilities = (self.logits if logits is None else logits).sigmoid()
        if self.kind == "survival":
            return 1 + probabilities.cumprod(dim=1).sum(dim=1)
        return probabilities[:, 0] * self.block_size

    def part(self, rows) -> "HeadExamples":
        chosen = {key: getattr(self, key)[rows] for key in ("logits", "targets", "weights", "accepted", "known")}
        return HeadExamples(self.kind, block_size=self.block_size, **chosen)


@torch.no_grad()
def head_examples(model: DistillationModel, batches) -> HeadExamples:
    """Drafts blocks on `batches`, as `data.collate` makes them, and asks the head about them.

    Raises:
        AdaFlashValueError: when the drafter has no length head, or there is no block.
    """
    head = model.drafter.length_head
    if head is None:
        raise AdaFlashValueError("The drafter has no length head to calibrate: attach and train one first.")
    model.eval()
    parts = []
    for batch in batches:
        blocks = model.blocks(**batch)
        result = distillation_loss(
            model.drafter.drafted(blocks.hidden),
            blocks.teacher,
            model._head[0],
            blocks.labels,
            blocks.supervised.float(),
            alpha=1.0,
            with_acceptance=model.settings.length_head_labels == "sampling",
            whole_head=model._whole_head[0],
        )
        labels = HeadLabels.of(blocks, result)
        logits = head(blocks.hidden).float()
        accepted, known = labels.accepted()
        if head.config.kind == "survival":
            targets, weights = labels.targets()
        else:
            logits, weights = logits[:, None], known.float()[:, None]
            targets = ((accepted + 1) / head.config.block_size).clamp(max=1)[:, None]
        keep = weights.any(dim=1)
        parts.append([x[keep].cpu() for x in (logits, targets, weights, accepted, known)])
    if not sum(len(part[0]) for part in parts):
        raise AdaFlashValueError("There is no block to calibrate on: give sequences with longer responses.")
    joined = [torch.cat(columns) for columns in zip(*parts, strict=True)]
    return HeadExamples(head.config.kind, *joined, block_size=head.config.block_size)


def fit_calibration(examples: HeadExamples) -> tuple[torch.Tensor, torch.Tensor]:
    """The temperature and bias `[k]` that minimise cross-entropy of logits / temperature + bias, per position.

    A weak pull to temperature 1 and bias 0 decides where a position has few examples; temperatures stay positive.
    """
    logits, targets, weights = (x.double() for x in (examples.logits, examples.targets, examples.weights))
    parameters = torch.zeros(2, logits.shape[1], dtype=torch.double, requires_grad=True)  # log scale, bias
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        losses = F.binary_cross_entropy_with_logits(
            logits * parameters[0].exp() + parameters[1], targets, weight=weights, reduction="sum"
        )
        loss = losses / weights.sum() + (parameters**2).sum() / weights.sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    scale, bias = parameters.detach().float()
    return (-scale).exp(), bias


@dataclass
class CalibrationReport:
    """Numbers before and after calibration, on blocks that it was not fitted to.

    Attributes:
        blocks: blocks with a known accepted length.
        realised: their mean accepted length, bonus included.
        expected: the head's mean for the same blocks, (before, after).
        brier: mean squared error of the probabilities where reached, (before, after).
        brier_by_position: the same per position, (before, after) lists.
        temperature, bias: what was fitted, per position.
        reliability: (before, after), per bin of the head's probability: (mean probability, share accepted, weight).
    """

    blocks: int
    realised: float
    expected: tuple[float, float]
    brier: tuple[float, float]
    brier_by_position: tuple[list[float], list[float]]
    temperature: list[float]
    bias: list[float]
    reliability: tuple[list[tuple[float, float, float]], list[tuple[float, float, float]]]

    def table(self) -> str:
        """Markdown: one row before, one after."""
        lines = [
            "| length head | expected accepted length | realised | Brier score | by position |",
            "| --- | ---: | ---: | ---: | --- |",
        ]
        for i, name in enumerate(("before calibration", "after")):
            positions = " ".join(f"{value:.3f}" for value in self.brier_by_position[i])
            lines.append(
                f"| {name} | {self.expected[i]:.3f} | {self.realised:.3f} | {self.brier[i]:.4f} | {positions} |"
            )
        return "\n".join(lines)

    def plot(self, path: str | Path) -> None:
        """Draws the reliability diagram: what the head says against what happens, area by number of examples."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.5, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
        for bins, label in zip(self.reliability, ("before", "after"), strict=True):
            total = sum(weight for *_, weight in bins)
            axes.scatter(
                *zip(*[(said, happened) for said, happened, _ in bins], strict=True),
                s=[20 + 400 * weight / total for *_, weight in bins],
                alpha=0.6,
                label=f"{label} calibration",
            )
        axes.set(xlabel="probability the head gives", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1), aspect=1)
        axes.legend()
        figure.savefig(path, dpi=150)


def calibrate(model: DistillationModel, batches, seed: int = 0) -> CalibrationReport:
    """Fits the calibration on a random half of the blocks, reports on the other, and puts it into the head."""
    examples = head_examples(model, batches)
    order = torch.randperm(len(examples.logits), generator=torch.Generator().manual_seed(seed))
    half = len(order) // 2
    temperature, bias = fit_calibration(examples.part(order[:half]))
    held_out = examples.part(order[half:])
    after = held_out.logits / temperature + bias
    model.drafter.length_head.recalibrate(temperature, bias)

    known, both = held_out.known, (held_out.logits, after)
    brier = [_brier(held_out, logits) for logits in both]
    return CalibrationReport(
        blocks=int(known.sum()),
        realised=float(1 + held_out.accepted[known].mean()),
        expected=tuple(float(held_out.expected(logits)[known].mean()) for logits in both),
        brier=tuple(float(sums.sum() / held_out.weights.sum()) for sums in brier),
        brier_by_position=tuple((sums / held_out.weights.sum(0).clamp(min=1e-9)).tolist() for sums in brier),
        temperature=temperature.tolist(),
        bias=bias.tolist(),
        reliability=tuple(_reliability(held_out, logits) for logits in both),
    )


def _brier(examples: HeadExamples, logits: torch.Tensor) -> torch.Tensor:
    """Weighted sums of squared errors `[k]`."""
    return ((logits.sigmoid() - examples.targets) ** 2 * examples.weights).sum(dim=0)


def _reliability(examples: HeadExamples, logits: torch.Tensor) -> list[tuple[float, float, float]]:
    said, happened, weights = (x.flatten() for x in (logits.sigmoid(), examples.targets, examples.weights))
    bins = (said * _BINS).long().clamp(max=_BINS - 1)
    found = []
    for i in range(_BINS):
        weight = weights * (bins == i)
        total = float(weight.sum())
        if total > 0:
            found.append((float((said * weight).sum()) / total, float((happened * weight).sum()) / total, total))
    return found
