"""Prompts that the target writes itself."""

import json
import re
from pathlib import Path

import pytest
from tiny import make_target
from tiny_tokenizer import make_tokenizer

from adaflash_hf.errors import AdaFlashValueError
from adaflash_hf.training import prompts, written_prompts
from adaflash_hf.training.prompts import CODE_INSTRUCTION, evaluation_prompts, shares_wording, wording
from adaflash_hf.training.setup import PromptArguments, load_prompts
from adaflash_hf.training.written_prompts import WrittenPromptArguments, write_prompts


@pytest.fixture
def openings(tmp_path):
    path = tmp_path / "openings.txt"
    path.write_text("w10\nw20 w21\n")
    return str(path)


def arguments(tmp_path, openings, **values):
    values = {"longest": 24, "batch_size": 8, **values}
    return WrittenPromptArguments(str(tmp_path / "out" / "prompts.jsonl"), openings=openings, **values)


def test_written_once_and_gone_on_with(tmp_path, openings):
    target, tokenizer = make_target(), make_tokenizer()
    first = write_prompts(target, tokenizer, arguments(tmp_path, openings, count=5))
    more = write_prompts(target, tokenizer, arguments(tmp_path, openings, count=9))
    assert more[:5] == first and len(set(more)) == 9
    assert all(text.startswith(("w10", "w20 w21")) and len(text.split()) <= 2 + 24 for text in more)
    assert not any("assistant" in text for text in more)  # where the template ends a message, the message ended
    lines = (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == more
    assert load_prompts(PromptArguments(dataset=str(tmp_path / "out" / "prompts.jsonl"))) == more
    assert write_prompts(target, tokenizer, arguments(tmp_path, openings, count=3)) == more


def test_an_evaluation_prompt_is_never_written(tmp_path, openings, monkeypatch):
    """To `wording`, all words of the tiny target are `w`, so three of them in a row are the held-out prompt."""
    wanted = arguments(tmp_path, openings, count=5)
    texts = write_prompts(make_target(), make_tokenizer(), wanted)
    assert any("w w w" in re.sub(r"[0-9]", "", text) for text in texts)
    Path(wanted.output_file).unlink()
    monkeypatch.setattr(prompts, "evaluation_prompts", lambda domain: ["w1 w2 w3 w4"])
    for text in write_prompts(make_target(), make_tokenizer(), wanted):
        assert "w w w" not in re.sub(r"[0-9]", "", text)


def test_a_target_that_writes_nothing_usable(tmp_path, openings, monkeypatch):
    monkeypatch.setattr(written_prompts, "_usable", lambda start, message: None)
    with pytest.raises(AdaFlashValueError, match="80 messages running.*unusable.*`temperature`"):
        write_prompts(make_target(), make_tokenizer(), arguments(tmp_path, openings, count=5))


def test_wording_ignores_what_all_code_prompts_share():
    held_out = [wording(prompt) for prompt in evaluation_prompts("code")]
    assert shares_wording(evaluation_prompts("code")[3], held_out)
    mine = CODE_INSTRUCTION + 'from typing import List\n\n\ndef area(r: float) -> float:\n    """ Of a circle. """\n'
    assert not shares_wording(mine, held_out)


@pytest.mark.parametrize(
    ("start", "message", "kept"),
    [
        ("", ("Name a river.", True), "Name a river."),
        ("", ("Name a river", False), None),
        ("", ("Hello", True), None),
        ("def ", ('f(x):\n    """Doc."""\n    return', False), 'def f(x):\n    """Doc."""\n'),
        ("def ", ('f(x):\n    """Doc.', True), None),
    ],
)
def test_usable(start, message, kept):
    assert written_prompts._usable(start, message) == kept


@pytest.mark.parametrize(
    ("values", "key"),
    [({"count": 0}, "`count`"), ({"longest": 0}, "`longest`"), ({"temperature": 0.0}, "`temperature`")],
)
def test_refused_values(values, key):
    with pytest.raises(AdaFlashValueError, match=key):
        WrittenPromptArguments("out.jsonl", **values)


def test_refused_openings_and_columns(tmp_path, openings):
    with pytest.raises(AdaFlashValueError, match="`openings`"):
        write_prompts(make_target(), make_tokenizer(), arguments(tmp_path, str(tmp_path / "none.txt")))
    (tmp_path / "data.jsonl").write_text('{"text": "Hi"}\n')
    with pytest.raises(AdaFlashValueError, match="`prompt_column`"):
        load_prompts(PromptArguments(dataset=str(tmp_path / "data.jsonl")))
