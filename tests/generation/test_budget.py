"""The budget policy: lengths against brute force, routes, costs, and the lookup source."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import VOCAB, make_drafter, make_target, ragged_prompts

from adaflash_hf.configuration_adaflash import AdaptiveLengthConfig
from adaflash_hf.generation import costs as costs_module
from adaflash_hf.generation.acceptance import RunningAcceptance, lookup_classes
from adaflash_hf.generation.budget import Budget, allocate, best_rate
from adaflash_hf.generation.candidate_generator import DiffusionCandidateGenerator
from adaflash_hf.generation.costs import TOKENS, CostModel, describe, forget_costs, load_costs, measure
from adaflash_hf.generation.lookup import ALIKE, MIXED, ONCE, LookupDraft, NgramIndex
from adaflash_hf.modeling_length_head import AdaptiveLengthHead
from adaflash_hf.target import Target


FLAT = CostModel(tokens=[1, 64], verify=[1.0, 1.1], rows=[1, 8], draft=[0.1, 0.1])
STEEP = CostModel(tokens=[1, 64], verify=[1.0, 64.0], rows=[1, 8], draft=[0.1, 0.1])


def brute_force(survival, seconds):
    rows, width = survival.shape
    best = (0.0, None)
    for lengths in itertools.product(range(width + 1), repeat=rows):
        gain = sum(survival[row, :length].sum() for row, length in enumerate(lengths))
        rate = (rows + gain) / seconds[sum(lengths)]
        if rate > best[0] + 1e-12:
            best = (rate, lengths)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_lengths_equal_brute_force(seed):
    """Random curves and random rising costs: no other choice commits more expected tokens per second."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    survival = rng.random((rows, width)).round(1 if seed % 2 else 3).cumprod(axis=1)
    seconds = np.cumsum(rng.random(rows * width + 1) ** 3) + 1.0
    lengths = allocate(survival, seconds)
    best, _ = brute_force(survival, seconds)
    assert best_rate(survival, seconds) == pytest.approx(best)
    gain = sum(survival[row, :length].sum() for row, length in enumerate(lengths))
    assert (rows + gain) / seconds[lengths.sum()] == pytest.approx(best)


def test_ties_are_split_without_gaps():
    survival = np.full((3, 2), 0.5)
    assert allocate(survival, np.array([1.0, 1.0, 1.0, 1.0, 1.0, 99.0, 99.0])).tolist() == [2, 1, 1]


def test_nothing_is_verified_that_cannot_survive():
    """Also where rounding lets costs fall by a hair: there is no draft there, or no room for one."""
    survival = np.array([[0.5, 0.0], [0.0, 0.0]])
    assert allocate(survival, 1.0 - 1e-16 * np.arange(5) * 4).tolist() == [1, 0]


@pytest.mark.parametrize("blocks", [None, [(3, 4), (1, 2), (2, 3)]])
@pytest.mark.parametrize("seed", range(20))
def test_route_equals_brute_force(seed, blocks):
    """Curves of one family per source: the rows chosen for the drafter, and the block, are the best of all."""
    rng = np.random.default_rng(seed)
    rows, width = 3, 3
    costs = CostModel([1, 12], [1.0, 2.0], [1, 3], [0.15, 0.3 + 0.5 * rng.random()])
    budget = Budget(costs, drafted=width, lookup_tokens=width, blocks=blocks)
    lookup = rng.random((rows, 1)) ** np.arange(1, width + 1)
    drafter = np.tile(rng.random() ** np.arange(1, width + 1), (rows, 1))
    served, block = budget.route(lookup, drafter, slots=0, catching_up=0)

    def rate_of(chosen, block):
        mixed = np.where(np.array(chosen)[:, None], drafter * (np.arange(width) < block[0]), lookup)
        seconds = budget.costs.verify_seconds(rows, rows + mixed.size, 0)
        if any(chosen):
            seconds = seconds + budget.costs.draft_seconds(sum(chosen), 0, 0, block[1] / (width + 1))
        return best_rate(mixed, seconds)

    choices = itertools.product(itertools.product([False, True], repeat=rows), blocks or [(width, width + 1)])
    best = max(rate_of(chosen, block) for chosen, block in choices)
    assert rate_of(served, block) == pytest.approx(best)


def test_narrow_blocks_are_drafted_where_slots_cost():
    """Eight rows: where drafting costs by the slot a narrow block, where slots are free the whole one."""
    by_slot, free = (CostModel([1, 64], [1.0, 1.2], [1, 8], [0.1, most]) for most in (0.8, 0.1))
    widths = {}
    for costs in (by_slot, free):
        budget = Budget(costs, drafted=5, lookup_tokens=0, blocks=[(5, 6), (1, 2), (2, 3), (3, 4), (4, 5)])
        expected = budget.drafter_survival([9] * 8)
        served, block = budget.route(np.zeros_like(expected), expected, 0, 0)
        assert served.all()
        widths[costs.draft[1]] = block
    assert widths[0.1] == (5, 6) and widths[0.8][1] < 4


@pytest.mark.parametrize("convention", ["fill_in", "sample_from_anchor"])
def test_a_narrow_block_is_a_block_of_a_narrower_drafter(convention):
    """Hidden states, drafted slots and survival of blocks of 3 slots equal those of the same weights configured for 3
    slots, also after whole blocks have been drafted."""
    target, drafter = make_target(), make_drafter(label_convention=convention, block_size=6)
    narrow = make_drafter(label_convention=convention, block_size=3)
    narrow.load_state_dict({k: v for k, v in drafter.state_dict().items() if "length_head" not in k}, strict=False)
    generators = []
    for model in (drafter, narrow):
        generators.append(DiffusionCandidateGenerator(model, Target(target, model.config), costs=FLAT))
    features = torch.randn(8, len(drafter.config.target_layer_ids) * drafter.config.hidden_size)
    places = torch.arange(2).repeat_interleave(4), torch.arange(4).repeat(2)
    anchors, ends = torch.tensor([3, 5]), torch.tensor([4, 4])
    for generator in generators:
        generator.observe(features, *places)
    generators[0]._block_hidden(anchors, ends, [0, 1], 6)
    generators[1]._block_hidden(anchors, ends, [0, 1], 3)
    for generator in generators:
        generator.observe(features[:2], torch.arange(2), ends)
    wide, slim = (g._block_hidden(anchors, ends + 1, [0, 1], 3) for g in generators)
    torch.testing.assert_close(wide, slim)
    assert torch.equal(drafter.drafted(wide), narrow.drafted(wide))
    blocks = generators[0].budget.blocks
    assert blocks[0][1] == 6 and len(blocks) > 3
    assert all(slots == tokens + (convention == "fill_in") for tokens, slots in blocks)


def test_only_whole_blocks_where_narrow_ones_cannot_be_read():
    """With a context window narrow blocks would take a wider one's remains for context; a `length` head reads the
    last slot of a whole block."""
    target, plain, windowed = make_target(), make_drafter(), make_drafter()
    windowed.generation_config.context_window = 4
    headed = make_drafter(head="length")

    def blocks(drafter):
        return DiffusionCandidateGenerator(drafter, Target(target, drafter.config), costs=FLAT).budget.blocks

    assert len(blocks(plain)) > 1 and len(blocks(windowed)) == len(blocks(headed)) == 1


def test_a_survival_head_judges_narrow_blocks():
    head = AdaptiveLengthHead(AdaptiveLengthConfig(kind="survival", hidden_size=8, block_size=6, bottleneck_size=4))
    head.recalibrate(torch.full((5,), 2.0), torch.arange(5.0))
    hidden = torch.randn(3, 6, 8)
    hidden[:, 2:] = hidden[:, :2].mean(dim=1, keepdim=True)  # so that the block's mean doesn't tell its width
    torch.testing.assert_close(head(hidden[:, :2]), head(hidden)[:, :1])


def test_greedy_output_is_the_targets_whatever_block_is_drafted(monkeypatch):
    """A batch whose blocks are as wide, and rows served, as chance has it."""
    target, drafter = make_target(), make_drafter(block_size=6)
    drafter.generation_config.lookup_tokens = 0
    ids, mask = ragged_prompts((7, 4, 9))
    rng, used = np.random.default_rng(0), set()

    def route(self, lookup, drafter, slots, late):
        block = self.blocks[rng.integers(len(self.blocks))]
        used.add(block[1])
        return rng.random(len(lookup)) < 0.7, block

    monkeypatch.setattr(Budget, "route", route)
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": mask}
    output = target.generate(ids, assistant_model=drafter, **options)
    assert torch.equal(output, target.generate(ids, **options))
    assert used == {6, 2, 3, 4, 5}


def test_nothing_is_verified_where_it_does_not_pay():
    budget = Budget(STEEP, drafted=4, lookup_tokens=0)
    room = [9, 9]
    expected = budget.drafter_survival(room)
    assert not budget.route(np.zeros_like(expected), expected, 0, 0)[0].any()
    assert budget.lengths(expected, 0, 0, 0).tolist() == [0, 0]
    cheap = Budget(FLAT, drafted=4, lookup_tokens=0)
    assert cheap.route(np.zeros_like(expected), expected, 0, 0)[0].all()
    assert cheap.lengths(expected, 2, 0, 0).tolist() == [4, 4]


def test_a_backlog_is_charged_to_the_steps_that_it_serves():
    """Four prompts of 100 tokens, costs as measured on a CPU: reading the prompts outweighs one step's gain."""
    costs = CostModel([1, 4, 16], [0.113, 0.135, 0.182], [1, 4], [0.011, 0.023], catch_up=6e-5)
    budget = Budget(costs, drafted=5, lookup_tokens=0)
    nothing = np.zeros((4, 5))

    def served(room):
        return budget.route(nothing, budget.drafter_survival(room), 0, Budget.spread(400, room))[0]

    assert served([60] * 4).all()
    assert not served([1] * 4).any()
    assert not budget.route(nothing, budget.drafter_survival([60] * 4), 0, 400)[0].any()


@pytest.mark.parametrize("costs", [FLAT, STEEP, CostModel([1, 2, 8], [1.0, 2.5, 9.0], [1], [0.1])])
def test_worth_has_mean_one_and_favours_rows_that_lag(costs):
    """No row is worth less than its share of a pass, however costs rise."""
    budget = Budget(costs, drafted=4, lookup_tokens=0)
    assert budget.worth([7]).tolist() == [1.0]
    assert budget.worth([7, 7, 7]) == pytest.approx(np.ones(3))
    worth = budget.worth([60, 20, 20, 20])
    assert worth.mean() == pytest.approx(1.0) and (worth >= 0).all()
    assert worth[0] >= worth[1] == worth[2] == worth[3]


def test_only_a_row_that_lags_is_drafted_for_where_passes_go_on_for_it():
    """Four rows at a price at which drafting for none of them commits most tokens per second."""
    costs = CostModel([1, 4, 16], [0.1, 0.16, 0.4], [1, 4], [0.01, 0.03])
    budget = Budget(costs, drafted=2, lookup_tokens=0)
    room = [60, 10, 10, 10]
    nothing, expected = np.zeros((4, 2)), budget.drafter_survival(room)
    assert not budget.route(nothing, expected, 0, 0)[0].any()
    worth = budget.worth(room)[:, None]
    assert budget.route(nothing, expected * worth, 0, 0)[0].tolist() == [True, False, False, False]
    lengths = budget.lengths(expected * worth, 1, 0, 0)
    assert lengths[0] > 0 and not lengths[1:].any()


@pytest.mark.parametrize("waiting", [True, False])
def test_rows_count_alike_while_others_wait(waiting, monkeypatch):
    """A row that finishes then makes place, so the one that lags isn't what is waited for."""
    from adaflash_hf import generate_many

    asked, asked_before_first_end = [], []
    monkeypatch.setattr(Budget, "worth", lambda self, room: asked.append(room) or np.ones(len(room)))
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8]] if waiting else [[1, 2, 3], [4, 5]]
    generate_many(
        make_target(),
        make_drafter(),
        prompts,
        max_live_rows=2,
        on_finish=lambda index, tokens: asked_before_first_end.append(len(asked)),
        progress_bar=False,
        max_new_tokens=6,
        do_sample=False,
    )
    assert asked and (asked_before_first_end[0] > 0) != waiting


def test_survival_respects_room():
    budget = Budget(FLAT, drafted=4, lookup_tokens=6)
    lookup = NgramIndex([5, 6, 5]).lookup(6)
    assert (budget.lookup_survival([lookup, None], [2, 9]) > 0).sum(axis=1).tolist() == [2, 0]
    assert (budget.drafter_survival([1, 9]) > 0).sum(axis=1).tolist() == [1, 4]


def test_less_is_expected_of_sampled_text():
    greedy, sampled = (Budget(FLAT, drafted=3, lookup_tokens=3, sampled=sampled) for sampled in (False, True))
    lookup = [NgramIndex([5, 6, 5]).lookup(3)]
    assert (sampled.lookup_survival(lookup, [9]) < greedy.lookup_survival(lookup, [9])).all()
    assert (sampled.drafter_survival([9]) < greedy.drafter_survival([9])).all()


def test_acceptance_follows_outcomes_and_forgets():
    running = RunningAcceptance([0.5, 0.5])
    for _ in range(50):
        running.forget()
        running.add(np.array([[0, 1]]), np.array([2]), np.array([1]))
    first, second = running.rates
    assert first > 0.9 and second < 0.1
    for _ in range(600):
        running.forget()
    assert running.rates == pytest.approx([0.5, 0.5], abs=0.02)


def test_a_head_that_promises_too_much_is_trusted_less():
    budget = Budget(FLAT, drafted=2, lookup_tokens=0)
    curves = np.array([[0.8, 0.6]])
    assert budget.judged(curves) == pytest.approx(curves)
    for _ in range(20):
        budget.promise(curves, np.array([2]))
        budget.learn([2], [0], [None])
    assert budget.trust < 0.2 and (budget.judged(curves) < 0.2).all()
    assert budget.drafter.rates[0] < 0.2


def test_corrected_survival_falls_and_stays_a_probability():
    """A head that promised too little: what it says is raised, but never above 1 nor above the position before."""
    budget = Budget(FLAT, drafted=3, lookup_tokens=0)
    curves = np.array([[0.5, 0.45, 0.42]])
    for _ in range(30):
        budget.promise(budget.judged(curves), np.array([1]))
        budget.learn([1], [1], [None])
    assert budget.trust > 1.2
    judged = budget.judged(curves)
    assert (np.diff(judged) <= 0).all() and judged[0, 0] > 0.6
    assert (budget.drafter.rates <= 1).all()


def test_positions_without_room_teach_nothing():
    budget = Budget(FLAT, drafted=3, lookup_tokens=0)
    before = budget.drafter.rates
    for _ in range(20):
        budget.promise(np.array([[0.9, 0.0, 0.0]]), np.array([1]))
    assert budget.drafter.rates[1:] == pytest.approx(before[1:])


def test_nothing_is_measured_where_nothing_is_drafted(monkeypatch):
    """`num_assistant_tokens` 0, of the drafter or of the call."""
    from adaflash_hf.generation import decoding

    monkeypatch.setattr(decoding, "target_costs", lambda *arguments: pytest.fail("measured"))
    target, drafter = make_target(), make_drafter()
    ids, _ = ragged_prompts((5,))
    options = {"max_new_tokens": 4, "do_sample": False}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=drafter, num_assistant_tokens=0, **options), plain)
    drafter.generation_config.num_assistant_tokens = 0
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)


def test_judged_but_unverified_positions_teach_the_route():
    """A head that sees no chance keeps the drafter from running again, though nothing was verified."""
    budget = Budget(FLAT, drafted=2, lookup_tokens=0)
    for _ in range(20):
        budget.promise(np.array([[0.05, 0.01]]), np.array([0]))
    assert budget.drafter.rates[0] < 0.2 and budget.trust == 1


def test_useless_drafter_is_hardly_run(monkeypatch):
    """Once its drafts keep failing it is left alone, and tried again only rarely."""
    target, drafter = make_target(), make_drafter()
    drafter.generation_config.lookup_tokens = 0
    ids, _ = ragged_prompts((7,))
    calls = []
    forward = type(drafter).forward
    monkeypatch.setattr(type(drafter), "forward", lambda self, *a, **k: calls.append(1) or forward(self, *a, **k))
    output = target.generate(
        ids, assistant_model=drafter, max_new_tokens=200, do_sample=False, return_dict_in_generate=True
    )
    steps = len(output.statistics.accepted_lengths[0])
    assert output.statistics.mean_accepted_length < 1.2
    # Costs in conftest.py: a draft takes 0.1 of a step, so 5 % against plain decoding is half as many drafts as steps.
    assert 0 < len(calls) < 0.3 * steps


# Lookup.


def test_lookup_finds_the_latest_longest_match():
    index = NgramIndex([1, 2, 3, 9, 2, 3, 8, 1, 2, 3])
    draft = index.lookup(3)
    assert (draft.tokens, draft.match) == ([9, 2, 3], 3)
    index.extend([9, 7, 2, 3])
    assert (index.lookup(1).tokens, index.lookup(1).match) == ([9], 2)
    assert NgramIndex([4, 5, 6]).lookup(3) is None
    assert NgramIndex([4]).lookup(3) is None


def test_lookup_follows_a_loop_past_the_end():
    assert NgramIndex([7, 1, 2, 1, 2]).lookup(5).tokens == [1, 2, 1, 2, 1]
    assert NgramIndex([3, 3]).lookup(4).tokens == [3, 3, 3, 3]


@pytest.mark.parametrize("seed", range(5))
def test_lookup_equals_a_plain_search(seed):
    """Grown token by token, the index answers as a search through the whole text does."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 4, (60,), generator=generator).tolist()
    index = NgramIndex(tokens[:1])
    for length in range(2, 60):
        index.extend(tokens[length - 1 : length])
        text, found = tokens[:length], None
        for size in range(8, 0, -1):
            ends = [e for e in range(size - 1, length - 1) if text[e + 1 - size : e + 1] == text[length - size :]]
            if ends:
                found = (size, [text[e + 1] for e in ends])
                break
        draft = index.lookup(1)
        if found is None:
            assert draft is None
        else:
            # Beyond the indexed length the latest match counts, which another may surpass.
            assert draft.match == found[0] and draft.tokens[0] in found[1] or 4 <= draft.match < found[0]
            went_on = [
                text[e + 1]
                for e in range(draft.match - 1, length - 1)
                if text[e + 1 - min(draft.match, 4) : e + 1] == text[length - min(draft.match, 4) :]
            ]
            if draft.match <= 4:
                alike = ALIKE if went_on[-2:] == went_on[-1:] * 2 else MIXED
                assert draft.history == (ONCE if len(went_on) == 1 else alike)


def test_history_tells_how_earlier_matches_went_on():
    assert NgramIndex([7, 1, 7]).lookup(1).history == ONCE
    assert NgramIndex([7, 1, 7, 2, 7]).lookup(1).history == MIXED
    assert NgramIndex([7, 2, 7, 1, 7, 1, 7]).lookup(1).history == ONCE  # of the match 7 1 7
    assert NgramIndex([7, 1, 4, 7, 1, 5, 7]).lookup(1).history == ALIKE


def test_classes_continue_the_match():
    lookups = [LookupDraft([], 1, ONCE), LookupDraft([], 7, ALIKE), None]
    assert lookup_classes(lookups, 3).tolist() == [[0, 1, 2], [2 * 8 + 6, 7, 7], [0, 1, 2]]


def test_a_looked_up_token_counts_for_its_history():
    """Where earlier matches went on differently, less is promised, and only that class learns from a failure."""
    budget = Budget(FLAT, drafted=2, lookup_tokens=2)
    alike, mixed = ([LookupDraft([5, 6], 2, history)] for history in (ALIKE, MIXED))
    before = budget.lookup_survival(alike, [9])
    assert before[0, 0] > 2 * budget.lookup_survival(mixed, [9])[0, 0]
    for _ in range(20):
        budget.learn([2], [0], mixed)
    assert budget.lookup_survival(alike, [9]) == pytest.approx(before)
    assert budget.lookup_survival(mixed, [9])[0, 0] < 0.06


def test_outcomes_count_once_per_tried_position():
    running = RunningAcceptance([0.5] * 8)
    classes = np.array([[0, 1, 2], [6, 7, 7]])
    running.add(classes, np.array([3, 2]), np.array([1, 2]))
    assert running.tried.tolist() == [1, 1, 0, 0, 0, 0, 1, 1] and running.accepted.tolist() == [1, 0, 0, 0, 0, 0, 1, 1]


def test_lookup_alone_repeats_a_loop():
    """With a text that loops, tokens come from lookup, several per step, and the drafter rests."""
    target, drafter = make_target(), make_drafter()
    ids = torch.tensor([[5, 6, 7, 8] * 3])
    # A head that always continues the loop.
    with torch.no_grad():
        target.lm_head.weight.zero_()
        target.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
        target.lm_head.bias[9] = 1.0
    output = target.generate(
        ids, assistant_model=drafter, max_new_tokens=40, do_sample=False, return_dict_in_generate=True
    )
    assert output.sequences[0, 12:].tolist() == [9] * 40
    assert output.statistics.accepted_by_source["lookup"] > 20
    assert output.statistics.mean_accepted_length > 3


# Costs.


def test_costs_are_linear_between_and_beyond():
    costs = CostModel([1, 3], [1.0, 2.0], [1], [0.5], slot_verify=0.01, slot_draft=0.1, catch_up=0.25)
    assert costs.verify_seconds(1, 4, 0).tolist() == [1.0, 1.5, 2.0, 2.5]
    assert costs.verify_seconds(3, 3, 100).tolist() == [3.0]
    assert costs.draft_seconds(1, 2, 0) == 0.5
    assert costs.draft_seconds(2, 8, 10) == pytest.approx(1.0 + 4 * 0.25 + 1.0)


@pytest.fixture
def clock(monkeypatch):
    """The time that `measure` reads, moved by the passes."""
    now = [0.0]
    monkeypatch.setattr(costs_module.time, "perf_counter", lambda: now[0])
    return now


def test_measure_is_quick_and_rises(clock):
    """Within two seconds, and noise, which only adds, is smoothed to rise."""

    def verify(counts, position):
        clock[0] += 0.02 + 0.001 * sum(counts) + 0.05 * (sum(counts) == 4)

    def draft(rows, late, position):
        clock[0] += 0.005 + 0.0001 * rows * late

    costs = measure(verify, draft)
    assert clock[0] <= 2.0
    assert costs.tokens[:3] == [1, 2, 4] and (np.diff(costs.verify) >= 0).all() and costs.catch_up > 0
    measured = dict(zip(costs.tokens, costs.verify, strict=True))
    assert [measured[n] for n in (1, 4, 16)] == pytest.approx([0.021, 0.036, 0.036])
    assert len(costs.rows) >= 2 and (np.diff(costs.draft) >= 0).all()


def test_slow_seconds_do_not_make_a_size_dear(clock):
    """A machine that is twice as slow for some seconds: with time for several rounds, ratios come out right."""

    def taking(seconds):
        clock[0] += seconds * (2 if clock[0] % 7 > 5 else 1)

    costs = measure(
        lambda counts, position: taking(0.09 + 0.005 * sum(counts)),
        lambda rows, late, position: taking(0.009 + 0.001 * rows),
        30.0,
    )
    assert clock[0] < 33.0 and costs.tokens == sorted(TOKENS)
    quick = costs.tokens[:6]
    assert costs.verify[: len(quick)] == pytest.approx([0.09 + 0.005 * n for n in quick])


def test_the_first_pass_of_a_size_does_not_count(clock):
    seen = set()

    def taking(seconds, *size):
        clock[0] += seconds * (1 if size in seen else 5)
        seen.add(size)

    costs = measure(
        lambda counts, position: taking(0.01 + 0.001 * sum(counts), "verify", *counts, position),
        lambda rows, late, position: taking(0.002 + 0.001 * rows, "draft", rows, late, position),
    )
    assert costs.verify == pytest.approx([0.01 + 0.001 * n for n in costs.tokens])
    assert costs.draft == pytest.approx([0.002 + 0.001 * n for n in costs.rows])
    assert costs.slot_verify == costs.slot_draft == 0


def test_slow_passes_are_measured_far_apart(clock):
    """A CPU's: what there is time for reaches as many tokens as possible."""

    def verify(counts, position):
        clock[0] += 0.1 + 0.004 * sum(counts)

    def draft(rows, late, position):
        clock[0] += 0.02 + 0.002 * rows

    costs = measure(verify, draft)
    assert clock[0] <= 2.3
    assert costs.tokens[-1] == 16 and costs.rows[-1] >= 16


def test_costs_are_stored_once_and_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(costs_module, "_measured", {})
    description = describe(make_target(), make_drafter())
    calls = []

    def measure_costs():
        calls.append(1)
        return FLAT

    assert load_costs(description, measure_costs) == FLAT
    costs_module._measured.clear()  # as in another process
    assert load_costs(description, measure_costs) == FLAT and len(calls) == 1
    stored = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert stored["device"].startswith("cpu") and stored["costs"]["tokens"] == [1, 64]
    next(tmp_path.glob("*.json")).write_text("{")
    costs_module._measured.clear()
    load_costs(description, measure_costs)
    assert len(calls) == 2
    forget_costs(description)
    load_costs(description, measure_costs)
    assert len(calls) == 3
    load_costs(description, measure_costs, anew=True)
    assert len(calls) == 4 and json.loads(next(tmp_path.glob("*.json")).read_text())["costs"] == stored["costs"]


def test_description_tells_what_costs_depend_on():
    target, drafter = make_target(), make_drafter()
    base = describe(target, drafter)
    assert base == describe(make_target(seed=5), drafter)
    assert base != describe(make_target(num_hidden_layers=3), drafter)
    assert base != describe(make_target().to(torch.bfloat16), drafter)
    from adaflash_hf.kernels.packed_linear import pack_linear_weights

    pack_linear_weights(target)
    assert base != describe(target, drafter)
    for key in ("context_window", "num_assistant_tokens"):
        other = make_drafter()
        setattr(other.generation_config, key, 2)
        assert describe(target, other) != describe(target, drafter)


def test_wrong_costs_are_noticed():
    budget = Budget(FLAT, drafted=2, lookup_tokens=0)
    for _ in range(15):
        budget.time(5.0, 1, 0)
    assert not budget.costs_were_wrong
    budget.time(5.0, 1, 0)
    assert budget.costs_were_wrong
    right = Budget(FLAT, drafted=2, lookup_tokens=0)
    for _ in range(30):
        right.time(1.2, 1, 0)
    assert not right.costs_were_wrong


@pytest.mark.parametrize(
    ("options", "timed"),
    [
        ({}, True),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0}, True),
        ({"do_sample": True, "top_k": 5}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"max_time": 100.0}, False),
        ({"streamer": SimpleNamespace(put=lambda value: None, end=lambda: None)}, False),
        ({"output_logits": True, "return_dict_in_generate": True}, False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else "-".join(value) or "plain",
)
def test_only_bare_passes_are_held_against_the_costs(options, timed, monkeypatch):
    """A slow processor or streamer says nothing about what passes cost."""
    seen = []
    monkeypatch.setattr(Budget, "time", lambda self, seconds, tokens, slots: seen.append(seconds))
    ids, _ = ragged_prompts((5,))
    make_target().generate(ids, assistant_model=make_drafter(), max_new_tokens=6, **{"do_sample": False, **options})
    assert bool(seen) == timed


def test_real_passes_can_be_measured(monkeypatch):
    """The probes run a target and a drafter, and leave the target as it was."""
    from adaflash_hf.generation import probing
    from adaflash_hf.target import Target

    target, drafter = make_target("mistral"), make_drafter(head="survival")
    monkeypatch.setattr(probing, "load_costs", lambda description, measure_costs, anew: measure_costs())
    monkeypatch.setattr(costs_module, "SECONDS", 0.3)
    before = target.config._attn_implementation
    with torch.no_grad():
        costs = probing.target_costs(Target(target, drafter.config), drafter, torch.device("cpu"))
    assert len(costs.tokens) >= 2 and min(costs.verify) > 0 and min(costs.draft) > 0
    assert target.config._attn_implementation == before


def test_narrow_blocks_read_as_much_context():
    """The cost of a whole block holds two committed tokens, that of half a block one; the rest are read late."""
    costs = CostModel([1, 2], [1.0, 1.0], [1, 8], [1.0, 8.0], catch_up=0.1)
    assert costs.draft_seconds(8, 16, 0) == pytest.approx(8.0)
    assert costs.draft_seconds(8, 16, 0, 0.5) == pytest.approx(4.0 + 0.1 * 8)
    assert costs.draft_seconds(np.array([4, 8]), 16, 0) == pytest.approx([4.0 + 0.1 * 8, 8.0])
