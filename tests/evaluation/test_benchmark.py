"""The benchmark harness on a tiny pair: every method runs, results are complete, and bad settings are refused."""

import json

import pytest
import torch
from tiny import VOCAB, make_drafter, make_target

from adaflash_hf import AdaFlashValueError
from adaflash_hf.evaluation import benchmark


class Tokenizer:
    """Letters to ids; stands in for the default target's, which the tiny one can't share."""

    def _ids(self, text):
        return [2 + ord(letter) % (VOCAB - 2) for letter in text[:9]]

    def __call__(self, text, return_tensors):
        return Inputs([self._ids(text)])

    def apply_chat_template(self, conversations, **options):
        return Inputs([self._ids(conversation[0]["content"]) for conversation in conversations])


class Inputs(dict):
    def __init__(self, rows):
        width = max(map(len, rows))
        super().__init__(
            input_ids=torch.tensor([[0] * (width - len(row)) + row for row in rows]),
            attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        )

    def to(self, device):
        return self


@pytest.fixture
def tiny_pair(monkeypatch):
    target, drafter = make_target(), make_drafter(head="survival")
    target.generation_config.eos_token_id = 3
    monkeypatch.setattr(benchmark, "load", lambda arguments: (target, Tokenizer(), drafter))
    monkeypatch.setattr(benchmark, "evaluation_prompts", lambda domain, n: [f"{domain} {i}" for i in range(n)])


def test_a_whole_run(tiny_pair, tmp_path, capsys):
    benchmark.main(
        ["--drafter", "tiny", "--concurrency", "1", "3", "--temperatures", "0", "1", "--max_new_tokens", "12"]
        + ["--repeats", "2", "--batches", "2", "--output", str(tmp_path)]
    )
    results = json.loads((tmp_path / "results.json").read_text())
    records = results["records"]
    cells = {(r["concurrency"], r["temperature"], r["domain"], r["method"]) for r in records}
    assert len(cells) == len(records) == 2 * 3 * (6 + 4)
    greedy = [r for r in records if r["temperature"] == 0]
    for r in greedy:
        # Greedy outputs are equal, so token counts are.
        plain = next(
            p for p in greedy if p["method"] == "plain" and all(p[k] == r[k] for k in ("concurrency", "domain"))
        )
        assert r["tokens"] == plain["tokens"] and len(r["seconds"]) == 2
    assert all(r["tau"] >= 1 and r["verified_per_step"] >= 1 for r in records if r["method"] in benchmark.OURS)
    table = (tmp_path / "table.md").read_text()
    assert "budget" in table and "OMP_NUM_THREADS" in table and table in capsys.readouterr().out
    assert (tmp_path / "throughput.png").stat().st_size > 5000 and (tmp_path / "lengths.png").exists()


def test_a_method_leaves_the_drafters_own_policy():
    """Which transformers' own route follows, too."""
    target, drafter = make_target(), make_drafter(head="survival")
    inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3).long()}
    for method in ("fixed", "head"):
        benchmark.run(target, inputs, drafter, method, 0.0, 4)
        assert drafter.generation_config.length_policy == "budget"


def test_cost_only(tiny_pair, capsys):
    benchmark.main(["--drafter", "tiny", "--cost"])
    assert json.loads(capsys.readouterr().out)["tokens"][0] == 1


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--methods", "plain", "eagle"], "methods"),
        (["--domains", "law"], "domains"),
        (["--concurrency", "64"], "concurrency"),
        (["--concurrency", "16", "--batches", "3"], "batches"),
        (["--repeats", "0"], "repeats"),
        (["--cost_seconds", "0"], "cost_seconds"),
    ],
)
def test_refusals(arguments, key):
    with pytest.raises(AdaFlashValueError, match=key):
        benchmark.main(["--drafter", "tiny", *arguments])


def test_tokens_count_up_to_the_end_token():
    rows = torch.tensor([[5, 3, 0, 0], [5, 6, 7, 8], [3, 3, 3, 3]])
    assert benchmark.count_tokens(rows, {3}) == 2 + 4 + 1
