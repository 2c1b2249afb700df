"""A queue of prompts, of which only a few are generated at a time: continuous batching for lists of prompts.

The queue is one big left-padded batch whose rows wait until a place is free, so every option of `generate` means what
it means for a batch.
"""

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils.logging import is_progress_bar_enabled

from ..errors import AdaFlashValueError
from ..modeling_adaflash import AdaFlashDrafter
from .rows import left_padded


@dataclass
class Queue:
    """How a batch is worked through.

    Attributes:
        max_live_rows: rows generated at a time.
        on_finish: called with a row's index and new token ids as soon as it is done.
    """

    max_live_rows: int
    on_finish: Callable[[int, list[int]], None] | None = None

    def finish(self, index: int, tokens: torch.Tensor) -> None:
        """Row `index` is done, with new tokens int64 `[n]`."""
        if self.on_finish is not None:
            self.on_finish(index, tokens.tolist())


_queue: contextvars.ContextVar[Queue | None] = contextvars.ContextVar("adaflash_queue", default=None)


def queue_waits() -> bool:
    """Whether the next call of `generate` is to work through a queue."""
    return _queue.get() is not None


def take_queue() -> Queue | None:
    """The queue that the next call of `generate` is to work through; nested calls don't see it."""
    queue = _queue.get()
    _queue.set(None)
    return queue


def generate_many(
    model: PreTrainedModel,
    drafter: AdaFlashDrafter,
    prompts: Sequence[Sequence[int]],
    max_live_rows: int = 16,
    on_finish: Callable[[int, list[int]], None] | None = None,
    progress_bar: bool = True,
    **options,
) -> list[list[int]]:
    """Generates for a list of prompts, `max_live_rows` at a time; a finished row makes room for the next prompt.

    Args:
        prompts: token ids of each prompt, in any number and length.
        on_finish: called with a prompt's index and its new tokens as soon as they are complete.
        options: those of `generate`, for all prompts alike (`max_new_tokens`, `do_sample`, ...).

    Returns:
        New token ids per prompt, the end token included.

    Raises:
        AdaFlashValueError: for an empty prompt, `max_live_rows` below 1, or an option that can't be used here.
    """
    if max_live_rows < 1:
        raise AdaFlashValueError(f"`max_live_rows` is {max_live_rows}: use 1 or more.")
    if not isinstance(drafter, AdaFlashDrafter):
        raise AdaFlashValueError(
            f"`drafter` is a {type(drafter).__name__}: load one with `AdaFlashDrafter.from_pretrained`."
        )
    for key in ("input_ids", "attention_mask", "num_return_sequences", "return_dict_in_generate", "streamer"):
        if key in options:
            raise AdaFlashValueError(f"`{key}` can't be used with a queue of prompts: call `generate` instead.")
    if not prompts:
        return []
    empty = [index for index, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise AdaFlashValueError(f"Prompt {empty[0]} is empty: every prompt needs at least one token.")
    answers: list[list[int]] = [[] for _ in prompts]
    bar = tqdm(total=len(prompts), desc="prompts", disable=not (progress_bar and is_progress_bar_enabled()))

    def finish(index: int, tokens: list[int]) -> None:
        answers[index] = tokens
        bar.update()
        if on_finish is not None:
            on_finish(index, tokens)

    token = _queue.set(Queue(max_live_rows, finish))
    try:
        with bar:
            model.generate(**left_padded(prompts, model.device), assistant_model=drafter, **options)
    finally:
        _queue.reset(token)
    return answers
