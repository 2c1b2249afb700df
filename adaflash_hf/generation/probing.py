"""Measures what passes of a target and a drafter cost here, on made-up tokens."""

import collections

import torch

from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .cache import RaggedCache
from .candidate_generator import DiffusionCandidateGenerator
from .costs import SECONDS, CostModel, describe, load_costs, measure
from .passes import pack, packed_pass


def target_costs(
    target: Target, drafter: AdaFlashDrafter, device: torch.device, most: float | None = None
) -> CostModel:
    """The costs of this pair (`costs.py`).

    Args:
        device: where the target takes its inputs.
        most: seconds, about, to measure them anew; `None` for those known from before, if any.
    """

    def measure_here() -> CostModel:
        caches = collections.defaultdict(RaggedCache)  # by position: many rows never meet many slots
        generator = DiffusionCandidateGenerator(drafter, target)
        width = len(target.layer_ids) * drafter.config.hidden_size

        def verify(counts: list[int], position: int) -> None:
            tokens = torch.arange(sum(counts), device=device) % drafter.config.vocab_size
            packed = pack(counts, [position] * len(counts), device)
            done = packed_pass(target, tokens, packed, caches[position])
            done.logits[-1, -1].item()  # a GPU is done once a result is read

        def draft(rows: int, late: int, position: int) -> None:
            features = torch.zeros(rows * late, width, dtype=drafter.dtype, device=drafter.device)
            row_of = torch.arange(rows, device=drafter.device).repeat_interleave(late)
            positions = torch.arange(position, position + late, device=drafter.device).repeat(rows)
            generator.observe(features, row_of, positions)
            ends = torch.full((rows,), position + late, device=device)
            generator.draft(torch.zeros_like(ends), ends, ends).tokens.tolist()

        return measure(verify, draft, most or SECONDS)

    return load_costs(describe(target.model, drafter), measure_here, anew=most is not None)
