"""What a call leaves behind and shows along the way: interrupts, nested calls, streamers, statistics, scores."""

import asyncio

import pytest
import torch
from option_grid import Collects, RowStops
from tiny import make_drafter, make_target, make_tokenizer, ragged_prompts
from transformers import (
    AsyncTextIteratorStreamer,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)


GREEDY = {"do_sample": False, "max_new_tokens": 16}
PROMPT = torch.tensor([[5, 9, 14, 3, 22]])


@pytest.mark.parametrize("kind", ["print", "iterator", "async"])
def test_streamers_show_the_same_text(kind, oracle, capsys):
    target, tokenizer = make_target(), make_tokenizer()
    plain = target.generate(PROMPT, **GREEDY)
    oracle(plain)
    text = tokenizer.decode(plain[0, PROMPT.shape[1] :])

    async def collect():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)
        run = asyncio.to_thread(target.generate, PROMPT, streamer=streamer, assistant_model=make_drafter(), **GREEDY)
        task = asyncio.create_task(run)
        pieces = [piece async for piece in streamer]
        await task
        return "".join(pieces)

    if kind == "async":
        assert asyncio.run(collect()) == text
        return
    streamer = (TextStreamer if kind == "print" else TextIteratorStreamer)(tokenizer, skip_prompt=True)
    target.generate(PROMPT, streamer=streamer, assistant_model=make_drafter(), **GREEDY)
    shown = capsys.readouterr().out.strip() if kind == "print" else "".join(streamer)
    assert shown == text


def test_an_interrupt_leaves_nothing_behind(monkeypatch, oracle):
    """Raised in the target, the drafter, a processor, a criterion or the streamer, at the third call."""
    target, drafter = make_target(), make_drafter()
    plain = target.generate(PROMPT, **GREEDY)
    oracle(plain)

    class Third:
        def __init__(self):
            self.calls = 0

        def __call__(self, *args, **kwargs):
            self.calls += 1
            if self.calls == 3:
                raise KeyboardInterrupt
            return args[1] if len(args) > 1 and torch.is_tensor(args[1]) else torch.zeros(1, dtype=torch.bool)

        put = __call__

        def end(self):
            pass

    def hooked(module):
        third = Third()

        def hook(*args):
            third()

        return module.register_forward_hook(hook)

    for options in (
        {"logits_processor": LogitsProcessorList([Third()])},
        {"stopping_criteria": StoppingCriteriaList([Third()])},
        {"streamer": Third()},
        {},
        {"drafter": True},
    ):
        handle = None
        if not options or "drafter" in options:
            handle = hooked(drafter.layers[0].mlp if options else target.model.layers[1].mlp)
        options.pop("drafter", None)
        with pytest.raises(KeyboardInterrupt):
            target.generate(PROMPT, assistant_model=drafter, **options, **GREEDY)
        if handle is not None:
            handle.remove()
        assert target.config._attn_implementation == "sdpa"
        assert not any(layer._forward_hooks for layer in target.model.layers)
        assert torch.equal(target.generate(PROMPT, assistant_model=drafter, **GREEDY), plain)
        assert torch.equal(target.generate(PROMPT, **GREEDY), plain)


def test_generate_inside_generate(oracle):
    """A processor that itself generates with the same target and drafter."""
    target, drafter = make_target(), make_drafter()

    class Asks(LogitsProcessor):
        def __init__(self, **assistant):
            self.assistant = assistant

        def __call__(self, input_ids, scores):
            inner = target.generate(input_ids, do_sample=False, max_new_tokens=3, **self.assistant)
            return scores.index_fill(1, inner[0, -1:], float("-inf"))

    plain = target.generate(PROMPT, logits_processor=LogitsProcessorList([Asks()]), **GREEDY)
    ours = target.generate(
        PROMPT,
        assistant_model=drafter,
        logits_processor=LogitsProcessorList([Asks(assistant_model=drafter)]),
        **GREEDY,
    )
    assert torch.equal(ours, plain)


def test_transition_scores(oracle):
    target = make_target()
    options = {"output_scores": True, "return_dict_in_generate": True, **GREEDY}
    ids, mask = ragged_prompts((3, 7))
    plain = target.generate(ids, attention_mask=mask, **options)
    oracle(plain.sequences)
    ours = target.generate(ids, attention_mask=mask, assistant_model=make_drafter(), **options)
    scores = [
        target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (plain, ours)
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-3, atol=1e-4)


def test_statistics_and_stream_stop_where_the_text_does(oracle):
    """Tokens that a criterion cut off are in no account."""
    target = make_target()
    ids, mask = ragged_prompts((2, 5, 9))
    free = target.generate(ids, attention_mask=mask, **GREEDY)
    oracle(free, every=100)
    for more in ({}, {"eos_token_id": int(free[0, ids.shape[1] + 12]), "pad_token_id": 0}):
        streamer = Collects()
        out = target.generate(
            ids,
            attention_mask=mask,
            assistant_model=make_drafter(),
            stopping_criteria=StoppingCriteriaList([RowStops(ids.shape[1])]),
            streamer=streamer,
            return_dict_in_generate=True,
            **more,
            **GREEDY,
        )
        assert torch.equal(torch.stack(streamer.values[1:], dim=1), out.sequences[:, ids.shape[1] :])
        for row, (accepted, candidates) in enumerate(
            zip(out.statistics.accepted_lengths, out.statistics.candidate_lengths, strict=True)
        ):
            kept = out.sequences.shape[1] - ids.shape[1]
            if more:
                kept = int((out.sequences[row, ids.shape[1] :] != 0).sum())
            assert 1 + sum(accepted) == kept
            assert len(accepted) == len(candidates)
        assert out.cache.get_seq_length() == out.sequences.shape[1] - 1
