import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch


# Triton reads this when its kernels are defined, so before anything imports them. With a GPU, they are compiled.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "training")]
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption(
        "--kernels",
        choices=["triton", "torch"],
        help="run with this implementation of the kernels",
    )
    parser.addoption("--all-cells", action="store_true", help="the whole option grid, not half of it")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forced_kernels(request):
    from adaflash_hf.kernels import use_backend

    name = request.config.getoption("--kernels")
    with use_backend(name) if name else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _fixed_costs(monkeypatch, tmp_path):
    """Costs of a machine where verification is cheap, so that runs don't depend on this one's load, and nothing is
    written to the user's cache."""
    from adaflash_hf.generation import costs, probing

    model = costs.CostModel(tokens=[1, 8, 64], verify=[1.0, 1.2, 4.0], rows=[1, 8], draft=[0.1, 0.15])
    monkeypatch.setattr(probing, "load_costs", lambda description, measure_costs, anew: model)
    monkeypatch.setattr(costs, "cached_assets_path", lambda *args, **kwargs: tmp_path)


@pytest.fixture
def oracle(monkeypatch):
    """Makes drafts come from known continuations, with a mistake now and then, so that every accepted length occurs.

    Call it with the plain output `[b, L + n]` and how often to err (`None`: the drafter's own drafts); the drafter
    runs either way.
    """
    from adaflash_hf.generation import decoding
    from adaflash_hf.generation.candidate_generator import DiffusionCandidateGenerator

    state = {}
    original_draft = DiffusionCandidateGenerator.draft
    original_rows = decoding.Rows.__init__

    def keep_rows(self, *args, **kwargs):
        original_rows(self, *args, **kwargs)
        state["rows"] = self

    def draft(self, anchors, positions, room, prefixes=None, waiting=False):
        made = original_draft(self, anchors, positions, room, prefixes)
        if state.get("every") is None:
            return made
        tokens, rows = [], state["rows"]
        for row, count in enumerate(made.counts):
            index = rows.live[row]
            start = rows.lengths[index]
            truth = state["plain"][index, start : start + count].tolist()
            truth += [0] * (count - len(truth))
            for k in range(count):
                if (start + k + index) % state["every"] == 0:
                    truth[k] = (truth[k] + 1) % self.config.vocab_size
            tokens += truth
        made.tokens = torch.tensor(tokens, dtype=torch.long)
        return made

    monkeypatch.setattr(decoding.Rows, "__init__", keep_rows)
    monkeypatch.setattr(DiffusionCandidateGenerator, "draft", draft)

    def use(plain: torch.Tensor, every: int | None = 7):
        state.update(plain=plain, every=every)

    return use
