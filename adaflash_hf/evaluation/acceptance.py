"""Accepted lengths per domain and per position, measured by generating with the drafter, with 95 % intervals.

tau is the number of tokens that a verify step commits, its bonus token included. Intervals come from a bootstrap over
prompts, since the steps of one response are not independent.
"""

import copy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from ..errors import AdaFlashValueError
from ..generation.rows import left_padded
from ..generation.statistics import collect_statistics
from ..modeling_adaflash import AdaFlashDrafter
from ..training.rollouts import Sampling


@dataclass
class DomainAcceptance:
    """The verify steps of one domain.

    Attributes:
        accepted_lengths: per prompt and step, tokens committed, bonus included.
        candidate_lengths: per prompt and step, tokens put up for verification, anchor included.
    """

    accepted_lengths: list[list[int]] = field(default_factory=list)
    candidate_lengths: list[list[int]] = field(default_factory=list)

    def tau(self) -> float:
        """Committed tokens per verify step."""
        return _ratio(self._sums())

    def interval(self, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of tau, over prompts."""
        sums = self._sums()
        if not len(sums):
            return 0.0, 0.0
        generator = torch.Generator().manual_seed(seed)
        drawn = sums[torch.randint(len(sums), (resamples, len(sums)), generator=generator)].sum(dim=1)
        taus = drawn[:, 0] / drawn[:, 1]
        low, high = torch.quantile(taus, torch.tensor([0.025, 0.975], dtype=taus.dtype)).tolist()
        return low, high

    def verified(self) -> float:
        """Tokens verified per step, anchor included."""
        steps = [length for row in self.candidate_lengths for length in row]
        return sum(steps) / max(1, len(steps))

    def shares(self) -> list[float]:
        """Share of steps that accept drafted position 1, 2, ..., among those that verified it. A response's last step,
        which a stop condition may have cut, is left out."""
        offered: list[int] = []
        accepted: list[int] = []
        for committed, candidates in zip(self.accepted_lengths, self.candidate_lengths, strict=True):
            for tokens, length in zip(committed[:-1], candidates[:-1], strict=True):
                missing = length - 1 - len(offered)
                offered += [0] * missing
                accepted += [0] * missing
                for k in range(length - 1):
                    offered[k] += 1
                    accepted[k] += tokens - 1 > k
        return [a / o for a, o in zip(accepted, offered, strict=True)]

    def _sums(self) -> torch.Tensor:
        """Committed tokens and steps of each prompt that took a step, float64 `[prompts, 2]`."""
        rows = [[sum(row), len(row)] for row in self.accepted_lengths if row]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


@dataclass
class AcceptanceReport:
    """`domains`: name -> what was measured there."""

    domains: dict[str, DomainAcceptance]

    @classmethod
    def joined(cls, parts: list["AcceptanceReport"]) -> "AcceptanceReport":
        """The reports of several processes as one."""
        domains: dict[str, DomainAcceptance] = {}
        for part in parts:
            for name, found in part.domains.items():
                whole = domains.setdefault(name, DomainAcceptance())
                whole.accepted_lengths += found.accepted_lengths
                whole.candidate_lengths += found.candidate_lengths
        return cls(domains)

    def mean_tau(self) -> float:
        """The mean of the domains' tau."""
        return sum(found.tau() for found in self.domains.values()) / max(1, len(self.domains))

    def spread(self) -> float:
        """The highest domain's tau less the lowest's."""
        taus = [found.tau() for found in self.domains.values()]
        return max(taus) - min(taus)

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """For loggers: `PREFIX_tau`, `PREFIX_tau_DOMAIN`, `PREFIX_accepted_DOMAIN_K`, `PREFIX_tau_spread`."""
        metrics = {f"{prefix}_tau": self.mean_tau(), f"{prefix}_tau_spread": self.spread()}
        for name, found in self.domains.items():
            metrics[f"{prefix}_tau_{name}"] = found.tau()
            metrics |= {f"{prefix}_accepted_{name}_{k}": share for k, share in enumerate(found.shares(), start=1)}
        return {key: round(value, 4) for key, value in metrics.items()}

    def table(self) -> str:
        """A Markdown table, one row per domain."""
        lines = [
            "| domain | prompts | tau | 95 % interval | verified per step | accepted share by position |",
            "| --- | ---: | ---: | ---: | ---: | --- |",
        ]
        for name, found in self.domains.items():
            low, high = found.interval()
            shares = " ".join(f"{share:.2f}" for share in found.shares())
            lines.append(
                f"| {name} | {len(found.accepted_lengths)} | {found.tau():.2f} | {low:.2f} to {high:.2f} | "
                f"{found.verified():.2f} | {shares} |"
            )
        lines.append(f"| mean | | {self.mean_tau():.2f} | | | spread between domains {self.spread():.2f} |")
        return "\n".join(lines)


def _ratio(sums: torch.Tensor) -> float:
    committed, steps = sums.sum(dim=0).tolist()
    return committed / steps if steps else 0.0


def measure_acceptance(
    target: PreTrainedModel,
    drafter: AdaFlashDrafter,
    prompts: dict[str, list[list[int]]],
    max_new_tokens: int = 128,
    do_sample: bool = False,
    temperature: float = 1.0,
    batch_size: int = 16,
    seed: int = 0,
    length_policy: str = "fixed",
) -> AcceptanceReport:
    """Generates for each domain's prompts and collects what was accepted. The caller's random state and the drafter's
    own policy are kept.

    Args:
        prompts: domain -> prompts as token ids, without padding.
        do_sample: plain sampling at `temperature` (no top-k, no top-p); else greedy.
        length_policy: `fixed` measures the drafter alone; under `budget` looked-up tokens and this machine's costs
            count too.

    Raises:
        AdaFlashValueError: for an empty prompt.
    """
    own_policy = drafter.generation_config
    drafter.generation_config = copy.deepcopy(own_policy)
    drafter.generation_config.length_policy = length_policy
    try:
        return _measure(target, drafter, prompts, max_new_tokens, do_sample, temperature, batch_size, seed)
    finally:
        drafter.generation_config = own_policy


def _measure(target, drafter, prompts, max_new_tokens, do_sample, temperature, batch_size, seed) -> AcceptanceReport:
    options = Sampling(temperature if do_sample else 0.0).options()
    cuda = [target.device] if target.device.type == "cuda" else []
    report = AcceptanceReport({})
    for domain, rows in prompts.items():
        found = report.domains[domain] = DomainAcceptance()
        if not all(rows):
            raise AdaFlashValueError(f"A prompt of `{domain}` is empty: every prompt needs at least one token.")
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            with torch.random.fork_rng(devices=cuda), collect_statistics() as calls:
                torch.manual_seed(seed + start)
                target.generate(
                    **left_padded(part, target.device),
                    assistant_model=drafter,
                    max_new_tokens=max_new_tokens,
                    pad_token_id=0,
                    **options,
                )
            found.accepted_lengths += calls[0].accepted_lengths
            found.candidate_lengths += calls[0].candidate_lengths
    return report
