"""Every option of `generate` with a drafter: as without, or refused in one sentence.

Run as a program (`python tests/generation/test_options.py`), this file prints the result as a Markdown table, beside
what transformers' own drafting does in the same cells, where the draft is the target's own text.
"""

import contextlib
import copy
import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parent.parent))  # for running this file as a program

from option_grid import CELLS, ROWS, Call, cells, difference, drafter  # noqa: E402
from test_sampling import SETTINGS, check, exact_joint, sample_counts  # noqa: E402
from tiny import make_drafter, make_target  # noqa: E402
from transformers import GenerationMixin, LogitsProcessorList  # noqa: E402
from transformers.generation import logits_process as hf  # noqa: E402

from adaflash_hf import AdaFlashValueError  # noqa: E402


def pytest_generate_tests(metafunc):
    """One greedy row and three sampled rows of each option, or, with `--all-cells`, both ways of both."""
    if "sampling" in metafunc.fixturenames:
        chosen = list(cells())
        if not metafunc.config.getoption("--all-cells"):
            chosen = [(name, batch, sampling) for name, batch, sampling in chosen if (batch > 1) == sampling]
        metafunc.parametrize("name, batch, sampling", chosen)


def test_cell(name, batch, sampling, oracle):
    cell = CELLS[name]
    call = Call(cell, batch)
    if cell.refused is not None:
        with pytest.raises(AdaFlashValueError) as refusal:
            call.run(sampling, drafter())
        assert str(refusal.value).startswith(cell.refused)
        return
    plain = call.run(sampling, arguments=cell.reference)
    sequences = plain[0] if torch.is_tensor(plain[0]) else plain[0].sequences
    oracle(sequences)
    assert difference(plain, call.run(sampling, drafter())) is None


@pytest.mark.parametrize(
    "options, warper",
    [
        ({"min_p": 0.15}, hf.MinPLogitsWarper(0.15)),
        ({"typical_p": 0.7}, hf.TypicalLogitsWarper(0.7)),
        ({"repetition_penalty": 1.6}, hf.RepetitionPenaltyLogitsProcessor(1.6)),
        ({"no_repeat_ngram_size": 2}, hf.NoRepeatNGramLogitsProcessor(2)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_distribution(options, warper):
    """Sampled tokens follow the processed distribution (temperature, top_k and top_p: `test_sampling.py`)."""
    target = make_target(**SETTINGS)
    counts = sample_counts(target, make_drafter(head="survival", **SETTINGS), options)
    check(counts, exact_joint(target, LogitsProcessorList([warper])))


@contextlib.contextmanager
def bare_transformers():
    """`generate` without this package's hooks."""
    hooked = {name: getattr(GenerationMixin, name) for name in ("_assisted_decoding", "_validate_generation_mode")}
    for name, function in hooked.items():
        setattr(GenerationMixin, name, function.adaflash_original)
    try:
        yield
    finally:
        for name, function in hooked.items():
            setattr(GenerationMixin, name, function)


def outcome(call: Call, sampling: bool, ours: bool) -> str:
    cell = call.cell
    try:
        plain = None if cell.refused else call.run(sampling, arguments=cell.reference)
    except Exception:
        plain = None
    try:
        if ours:
            result = call.run(sampling, drafter())
        else:
            with bare_transformers():
                result = call.run(sampling, copy.deepcopy(call.target))
    except AdaFlashValueError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}"
    if plain is None:
        return "runs, not compared"
    differs = difference(plain, result)
    return "equal" if differs is None else f"**{differs} differ**"


def main() -> None:
    print("| option | with a drafter, batch 1 | batch 3 | transformers' own, batch 1 | batch 3 |")
    print("| --- | --- | --- | --- | --- |")
    for name, cell in CELLS.items():
        columns = []
        for ours in (True, False):
            for batch in ROWS:
                modes = [True] if cell.sampling == "only" else [False, True]
                found = [outcome(Call(cell, batch), sampling, ours) for sampling in modes]
                columns.append(found[0] if len(set(found)) == 1 else " / ".join(found))
        print(f"| `{name}` | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
