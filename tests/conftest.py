import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


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

    def draft(self, anchors, positions, room, prefixes=None):
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
