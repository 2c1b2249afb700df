"""The grid of `generate` options: what to pass, and what has to come out with a drafter.

`CELLS` names each option; `run` makes one call and returns everything that the call showed. Arguments are made anew
for every call, since processors, criteria and streamers may keep state. Sampling cells leave one token possible
(`top_k=1`, applied after the user's processors), so that a sampled run has one right answer; whether sampled tokens
have the right distribution is asked in `test_sampling.py` and, for the remaining warpers, in `test_options.py`.
"""

import copy
import functools
from dataclasses import dataclass, field

import torch
from tiny import make_drafter, make_target, make_tokenizer, ragged_prompts
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)


NEW_TOKENS = 14
ROWS = {1: (5,), 3: (2, 5, 9)}


class Remembers(LogitsProcessor):
    """Forbids, per row, the tokens it was shown last in its earlier calls: wrong unless called once per token."""

    def __init__(self):
        self.seen = None

    def __call__(self, input_ids, scores):
        self.seen = self.seen or [[] for _ in range(len(input_ids))]
        scores = scores.clone()
        for row, seen in enumerate(self.seen):
            seen.append(int(input_ids[row, -1]))
            scores[row, seen[-4:]] = float("-inf")
            scores[row, len(seen) % scores.shape[1]] += 2.0
        return scores


class Counts(LogitsProcessor):
    """Biases by the number of calls so far."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, torch.tensor([self.calls % scores.shape[1]]), float("-inf"))


class RowStops(StoppingCriteria):
    """Ends row i once it holds 4 + 3 i new tokens whose last one is even."""

    def __init__(self, width: int):
        self.width = width

    def __call__(self, input_ids, scores, **kwargs):
        new = input_ids.shape[1] - self.width
        return torch.tensor([new >= 4 + 3 * i and int(ids[-1]) % 2 == 0 for i, ids in enumerate(input_ids)])


class BatchStops(StoppingCriteria):
    """Answers for the batch as a whole, from all rows at once, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return self.calls >= 4 and int(input_ids[:, -1].sum()) % 3 == 0


class ScoreStops(StoppingCriteria):
    """Looks at the scores of the latest step."""

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].argmax(dim=-1) % 7 == 3


class OutOfTime(StoppingCriteria):
    """`max_time` with a clock that ticks once per call."""

    def __init__(self, ticks: int):
        self.ticks = ticks

    def __call__(self, input_ids, scores, **kwargs):
        self.ticks -= 1
        return torch.full((len(input_ids),), self.ticks < 0)


class Collects:
    """A streamer that writes down what it is given."""

    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.clone())

    def end(self):
        self.ended += 1


def _processor(made):
    return lambda call: {"logits_processor": LogitsProcessorList([made()])}


def _criterion(made, **more):
    return lambda call: {"stopping_criteria": StoppingCriteriaList([made(call)]), **more}


def _end_token(call, k: int) -> int:
    """A token that the unconstrained run of this target writes, so that the end is met inside a block."""
    return int(call.free[0, call.width + k])


def _word(call, k: int) -> str:
    return make_tokenizer().decode([_end_token(call, k)])


def _reused(call, whole: bool):
    """A second turn on the cache of a first, plain one."""
    first = call.target.generate(
        call.ids, attention_mask=call.mask, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    ids = torch.cat([first.sequences, torch.full((len(call.ids), 2), 9)], dim=1)
    mask = torch.cat([call.mask, torch.ones(len(ids), 6, dtype=torch.long)], dim=1)
    held = first.cache.get_seq_length()
    return {"input_ids": ids if whole else ids[:, held:], "attention_mask": mask, "cache": first.cache}


def _covering(call):
    first = call.target.generate(
        call.ids, attention_mask=call.mask, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
    )
    held = first.cache.get_seq_length()
    mask = torch.cat([call.mask, torch.ones(len(call.ids), 3, dtype=torch.long)], dim=1)
    return {"input_ids": first.sequences[:, :held], "attention_mask": mask, "cache": first.cache}


def _without_cache(arguments):
    return {key: value for key, value in arguments.items() if key != "cache"}


def _holes(call):
    mask = call.mask.clone()
    mask[:, -2] = 0
    return {"attention_mask": mask}


@dataclass
class Cell:
    """One option.

    Attributes:
        arguments: the option's keyword arguments, or a function from a `Call` to them.
        refused: start of the refusal's message, where there is one.
        reference: what the right answer's arguments are, where plain `generate` with this option doesn't work.
        target: overrides for the tiny target.
        sampling: whether there are sampling cells, or only sampling ones ("only").
    """

    arguments: object
    refused: str | None = None
    reference: object = None
    target: dict = field(default_factory=dict)
    sampling: object = True


CELLS = {
    # processors
    "temperature": Cell({"temperature": 0.7}, sampling="only"),
    "top_k": Cell({"top_k": 1}, sampling="only"),
    "top_p": Cell({"top_p": 0.8}, sampling="only"),
    "min_p": Cell({"min_p": 0.2}, sampling="only"),
    "typical_p": Cell({"typical_p": 0.5}, sampling="only"),
    "epsilon_cutoff": Cell({"epsilon_cutoff": 0.01}, sampling="only"),
    "eta_cutoff": Cell({"eta_cutoff": 0.01}, sampling="only"),
    "top_h": Cell({"top_h": 0.5}, sampling="only"),
    "repetition_penalty": Cell({"repetition_penalty": 1.5}),
    "no_repeat_ngram_size": Cell({"no_repeat_ngram_size": 2}),
    "bad_words_ids": Cell({"bad_words_ids": [[7], [8, 9], [20]]}),
    "sequence_bias": Cell({"sequence_bias": [[[5], 3.0], [[9, 4], -8.0]]}),
    "suppress_tokens": Cell({"suppress_tokens": [3, 4, 20]}),
    "begin_suppress_tokens": Cell(lambda call: {"begin_suppress_tokens": [_end_token(call, 0)]}),
    "min_new_tokens": Cell(lambda call: {"min_new_tokens": 9, "eos_token_id": _end_token(call, 3)}),
    "min_length": Cell(lambda call: {"min_length": call.width + 9, "eos_token_id": _end_token(call, 3)}),
    "forced_eos_token_id": Cell({"forced_eos_token_id": 6, "eos_token_id": 6}),
    "exponential_decay_length_penalty": Cell({"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 6}),
    "remove_invalid_values": Cell({"remove_invalid_values": True}),
    "renormalize_logits": Cell({"renormalize_logits": True}),
    "encoder_repetition_penalty": Cell({"encoder_repetition_penalty": 1.5}),
    "encoder_no_repeat_ngram_size": Cell({"encoder_no_repeat_ngram_size": 2}),
    "prefix_allowed_tokens_fn": Cell(
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(4 + row + len(ids) % 3, 20 + row))}
    ),
    "guidance_scale": Cell({"guidance_scale": 1.5}),
    "negative_prompt_ids": Cell(
        lambda call: {"guidance_scale": 1.5, "negative_prompt_ids": torch.full((len(call.ids), 2), 5)}
    ),
    "watermarking_config": Cell(lambda call: {"watermarking_config": WatermarkingConfig(bias=4.0)}),
    "watermarking_config (SynthID)": Cell(
        lambda call: {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])},
        sampling="only",
    ),
    "logits_processor (function)": Cell({"logits_processor": [lambda ids, scores: scores.roll(1, dims=1)]}),
    "logits_processor (memory per row)": Cell(_processor(Remembers)),
    "logits_processor (counts calls)": Cell(_processor(Counts)),
    # stopping
    "eos_token_id (list)": Cell(lambda call: {"eos_token_id": [_end_token(call, 2), _end_token(call, 7)]}),
    "max_length": Cell(lambda call: {"max_length": call.width + 7, "max_new_tokens": None}),
    "stop_strings": Cell(lambda call: {"stop_strings": [_word(call, 5)], "tokenizer": make_tokenizer()}),
    "stop_strings, eos_token_id": Cell(
        lambda call: {
            "stop_strings": [_word(call, 5)],
            "tokenizer": make_tokenizer(),
            "eos_token_id": _end_token(call, 9),
        }
    ),
    "stopping_criteria (per row)": Cell(_criterion(lambda call: RowStops(call.width))),
    "stopping_criteria (per row), eos_token_id": Cell(
        lambda call: {
            "stopping_criteria": StoppingCriteriaList([RowStops(call.width)]),
            "eos_token_id": _end_token(call, 6),
        }
    ),
    "stopping_criteria (per batch)": Cell(_criterion(lambda call: BatchStops())),
    "stopping_criteria (scores)": Cell(
        _criterion(lambda call: ScoreStops(), output_scores=True, return_dict_in_generate=True)
    ),
    "max_time": Cell({"max_time": 0.0}),
    "max_time (runs out inside a block)": Cell(_criterion(lambda call: OutOfTime(5))),
    # outputs
    "streamer": Cell(lambda call: {"streamer": Collects()}),
    "streamer, stopping_criteria": Cell(
        lambda call: {
            "streamer": Collects(),
            "stopping_criteria": StoppingCriteriaList([RowStops(call.width)]),
            "eos_token_id": _end_token(call, 6),
        }
    ),
    "return_dict_in_generate": Cell({"return_dict_in_generate": True}),
    "output_scores": Cell({"output_scores": True, "return_dict_in_generate": True, "repetition_penalty": 1.3}),
    "output_logits": Cell({"output_logits": True, "return_dict_in_generate": True}),
    "output_scores, stopping_criteria": Cell(
        _criterion(lambda call: RowStops(call.width), output_scores=True, return_dict_in_generate=True)
    ),
    "output_hidden_states": Cell({"output_hidden_states": True, "return_dict_in_generate": True}),
    "output_attentions (eager)": Cell(
        {"output_attentions": True, "return_dict_in_generate": True}, target={"attn_implementation": "eager"}
    ),
    "output_attentions (eager), static cache": Cell(
        {"output_attentions": True, "return_dict_in_generate": True, "cache_implementation": "static"},
        target={"attn_implementation": "eager"},
        refused="`output_attentions` over a static cache",
    ),
    "output_attentions (sdpa)": Cell({"output_attentions": True, "return_dict_in_generate": True}),
    "num_return_sequences": Cell({"num_return_sequences": 2}, sampling="only"),
    # caches
    "cache (empty)": Cell(lambda call: {"cache": DynamicCache(config=call.target.config)}),
    "cache (reused, all ids)": Cell(lambda call: _reused(call, whole=True)),
    "cache (reused, new ids)": Cell(lambda call: _reused(call, whole=False)),
    "cache (covers the prompt)": Cell(_covering, reference=lambda call: _without_cache(_covering(call))),
    "cache (static)": Cell(lambda call: {"cache": StaticCache(config=call.target.config, max_cache_len=64)}),
    "cache_implementation='static'": Cell({"cache_implementation": "static"}),
    "cache_implementation='offloaded'": Cell({"cache_implementation": "offloaded"}, reference={}),
    "cache_implementation='offloaded', return_dict": Cell(
        {"cache_implementation": "offloaded", "return_dict_in_generate": True},
        reference={"return_dict_in_generate": True},
    ),
    "cache_implementation='offloaded', output_hidden_states": Cell(
        {"cache_implementation": "offloaded", "output_hidden_states": True, "return_dict_in_generate": True},
        refused="An offloaded `cache` needs an accelerator",
    ),
    "cache_implementation='quantized'": Cell(
        {"cache_implementation": "quantized"}, refused="`cache_implementation='quantized'` rounds"
    ),
    "prefill_chunk_size": Cell({"prefill_chunk_size": 3}),
    "use_cache=False": Cell({"use_cache": False}, refused="`use_cache=False` leaves nothing"),
    # inputs
    "position_ids": Cell(lambda call: {"position_ids": (call.mask.cumsum(1) - 1).clamp(min=0) + 3}),
    "attention_mask (holes)": Cell(_holes),
    "inputs_embeds": Cell(
        lambda call: {"input_ids": None, "inputs_embeds": call.target.get_input_embeddings()(call.ids)},
        refused="`inputs_embeds` can't be used",
    ),
    "another argument of the model": Cell({"num_items_in_batch": 3}, refused="`num_items_in_batch` can't be passed"),
    # other modes
    "num_beams": Cell({"num_beams": 2}, refused="`num_beams` 2 can't be combined"),
    "prompt_lookup_num_tokens": Cell(
        {"prompt_lookup_num_tokens": 3}, refused="`prompt_lookup_num_tokens` and an AdaFlash drafter exclude"
    ),
    "assistant_tokenizer": Cell(
        lambda call: {"assistant_tokenizer": make_tokenizer()}, refused="`assistant_tokenizer` has no use"
    ),
}


class Call:
    """One cell's models and prompts; `free` is what the target writes without the option."""

    _made: dict = {}

    def __init__(self, cell: Cell, batch: int):
        key = (batch, repr(cell.target))
        if key not in self._made:
            target = make_target(**cell.target)
            ids, mask = ragged_prompts(ROWS[batch])
            free = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
            self._made[key] = target, ids, mask, free
        self.cell = cell
        self.target, self.ids, self.mask, self.free = self._made[key]
        self.width = self.ids.shape[1]

    def run(self, sampling: bool, assistant=None, arguments=None):
        """Calls `generate` and returns the result and the streamer."""
        chosen = self.cell.arguments if arguments is None else arguments
        made = chosen(self) if callable(chosen) else copy.copy(chosen)
        options = {"input_ids": self.ids, "attention_mask": self.mask, "max_new_tokens": NEW_TOKENS, **made}
        if sampling:
            options = {**options, "do_sample": True, "top_k": 1}
        else:
            options["do_sample"] = False
        if assistant is not None:
            options["assistant_model"] = assistant
        torch.manual_seed(0)
        return self.target.generate(**options), made.get("streamer")


def cells():
    """(name, batch, sampling) of every cell."""
    for name, cell in CELLS.items():
        for batch in ROWS:
            for sampling in (False, True):
                if cell.sampling != "only" or sampling:
                    yield name, batch, sampling


@functools.cache
def drafter():
    return make_drafter(head="survival")


def difference(plain, ours) -> str | None:
    """What differs between two results of `run`; `None` when they are equal. Where a row has finished, outputs per
    step may be 0."""
    (plain, plain_stream), (ours, our_stream) = plain, ours
    if not torch.is_tensor(plain):
        for name in ("scores", "logits", "hidden_states", "attentions"):
            if not _alike(plain.get(name), ours.get(name)):
                return name
        if ours.cache.get_seq_length() != plain.cache.get_seq_length():
            return "cache"
        plain, ours = plain.sequences, ours.sequences
    if not torch.equal(plain, ours):
        return "sequences"
    if plain_stream is not None:
        pairs = zip(plain_stream.values, our_stream.values, strict=False)
        same = len(plain_stream.values) == len(our_stream.values) and all(torch.equal(a, b) for a, b in pairs)
        if not same or our_stream.ended != plain_stream.ended:
            return "stream"
    return None


def _alike(plain, ours) -> bool:
    if plain is None or ours is None:
        return plain is None and ours is None
    if torch.is_tensor(plain):
        if plain.shape != ours.shape:
            return False
        finished = (ours == 0).flatten(1).all(dim=1)
        return torch.allclose(plain[~finished], ours[~finished], rtol=1e-3, atol=1e-4)
    return len(plain) == len(ours) and all(_alike(a, b) for a, b in zip(plain, ours, strict=True))
