"""Sampled output has the target's distribution: joint counts of the first tokens against exact probabilities.

The vocabulary is so small that the probability of every continuation can be enumerated, so nothing is compared with
another sample. A chi-square test on the joint table covers marginals and conditionals at once; the marginals and the
conditionals of the third token are also tested by themselves.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from tiny import make_drafter, make_target
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from adaflash_hf.generation.budget import Budget
from adaflash_hf.generation.candidate_generator import DiffusionCandidateGenerator


VOCAB, LENGTH, SAMPLES = 4, 4, 3000
SETTINGS = {"vocab_size": VOCAB, "initializer_range": 0.15}
PROMPT = torch.tensor([[2, 1, 3]])


def exact_joint(target, warpers) -> torch.Tensor:
    """Probability of each continuation, `[VOCAB] * LENGTH`."""
    joint = torch.ones([VOCAB] * LENGTH, dtype=torch.float64)
    for depth in range(LENGTH):
        for prefix in itertools.product(range(VOCAB), repeat=depth):
            ids = torch.cat([PROMPT, torch.tensor([prefix], dtype=torch.long)], dim=1)
            with torch.no_grad():
                scores = warpers(ids, target(ids).logits[:, -1].float())
            p = scores.softmax(dim=-1)[0].double()
            joint[prefix] *= p.reshape([VOCAB] + [1] * (LENGTH - depth - 1))
    return joint


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square goodness of fit; cells expected below 5 are pooled. Impossible cells must be empty."""
    counts, probabilities = counts.flatten().double(), probabilities.flatten()
    assert counts[probabilities == 0].sum() == 0, "a token of probability 0 was sampled"
    expected = probabilities / probabilities.sum() * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return float(chi2.sf(statistic, df=max(len(counts) - 1, 1)))


def sample_counts(target, drafter, options) -> torch.Tensor:
    torch.manual_seed(12)
    rows = target.generate(
        PROMPT,
        do_sample=True,
        max_new_tokens=LENGTH + 2,
        num_return_sequences=SAMPLES,
        assistant_model=drafter,
        **{"top_k": 0, **options},
    )
    new = rows[:, PROMPT.shape[1] : PROMPT.shape[1] + LENGTH]
    index = sum(new[:, i] * VOCAB ** (LENGTH - 1 - i) for i in range(LENGTH))
    return torch.bincount(index, minlength=VOCAB**LENGTH).reshape([VOCAB] * LENGTH)


def check(counts, joint):
    assert p_value(counts, joint) > 1e-3
    for position in range(LENGTH):
        others = tuple(i for i in range(LENGTH) if i != position)
        assert p_value(counts.sum(others), joint.sum(others)) > 1e-3
    pair_counts, pair_joint = counts.sum((0, 3)), joint.sum((0, 3))
    for second in range(VOCAB):
        if pair_counts[second].sum() > 100:
            assert p_value(pair_counts[second], pair_joint[second]) > 1e-3


@pytest.mark.parametrize("policy", ["fixed", "survival", "length", "one", "budget"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 3}, {"top_p": 0.8}], ids=str)
def test_distribution(options, policy):
    target = make_target(**SETTINGS)
    drafter = make_drafter(head=policy if policy in ("survival", "length") else None, **SETTINGS)
    if policy != "budget":
        drafter.generation_config.length_policy = "fixed" if drafter.length_head is None else "head"
    if policy == "one":
        drafter.generation_config.num_assistant_tokens = 1
    warpers = LogitsProcessorList()
    if "temperature" in options:
        warpers.append(TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        warpers.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    check(sample_counts(target, drafter, options), exact_joint(target, warpers))


def test_distribution_with_blocks_of_any_width(monkeypatch):
    """Width and rows served as chance has it, before a token is drawn."""
    rng = np.random.default_rng(0)

    def route(self, lookup, drafter, slots, late):
        return rng.random(len(lookup)) < 0.7, self.blocks[rng.integers(len(self.blocks))]

    monkeypatch.setattr(Budget, "route", route)
    target, drafter = make_target(**SETTINGS), make_drafter(head="survival", **SETTINGS)
    check(sample_counts(target, drafter, {}), exact_joint(target, LogitsProcessorList()))


def test_draft_vocabulary_and_slow_path():
    """A reduced draft vocabulary, and a processor that forces the position-by-position path."""
    target = make_target(**SETTINGS)
    drafter = make_drafter(draft_vocab_size=3, **SETTINGS)
    check(sample_counts(target, drafter, {}), exact_joint(target, LogitsProcessorList()))
    identity = LogitsProcessorList([lambda ids, scores: scores])
    counts = sample_counts(target, make_drafter(**SETTINGS), {"logits_processor": identity})
    check(counts, exact_joint(target, LogitsProcessorList()))


def test_a_wrong_q_is_noticed(monkeypatch):
    """The test can fail: claiming that drafts came from a uniform distribution biases the output."""
    draft = DiffusionCandidateGenerator.draft

    def lie(self, *args, **kwargs):
        made = draft(self, *args, **kwargs)
        made.scores = torch.zeros_like(made.scores)
        return made

    monkeypatch.setattr(DiffusionCandidateGenerator, "draft", lie)
    target, drafter = make_target(**SETTINGS), make_drafter(**SETTINGS)
    drafter.generation_config.length_policy = "fixed"
    assert p_value(sample_counts(target, drafter, {}), exact_joint(target, LogitsProcessorList())) < 1e-6


def test_a_length_that_saw_its_token_is_noticed(monkeypatch):
    """Choosing the length after drawing tokens biases the output too (non-anticipation)."""
    draft = DiffusionCandidateGenerator.draft

    def anticipate(self, *args, **kwargs):
        made = draft(self, *args, **kwargs)
        tokens, counts, rows, start = [], [], [], 0
        for count in made.counts:
            block = made.tokens[start : start + count]
            kept = next((k for k, token in enumerate(block.tolist()) if token % 2), count)
            tokens.append(block[:kept])
            rows += range(start, start + kept)
            counts.append(kept)
            start += count
        return type(made)(counts, torch.cat(tokens), made.scores[rows], made.temperature)

    monkeypatch.setattr(DiffusionCandidateGenerator, "draft", anticipate)
    target, drafter = make_target(**SETTINGS), make_drafter(**SETTINGS)
    drafter.generation_config.length_policy = "fixed"
    assert p_value(sample_counts(target, drafter, {}), exact_joint(target, LogitsProcessorList())) < 1e-6


def test_seed_and_rows():
    target, drafter = make_target(), make_drafter()
    options = {"do_sample": True, "max_new_tokens": 10, "assistant_model": drafter}
    prompt = torch.tensor([[2, 4, 3]] * 4)

    def run(seed):
        torch.manual_seed(seed)
        return target.generate(prompt, **options)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert len({tuple(row.tolist()) for row in run(0)}) > 1
