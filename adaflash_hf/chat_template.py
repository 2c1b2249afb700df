"""Messages as a target's chat template frames them, and the template's flags, such as `enable_thinking`.

A drafter learns from text framed with certain flags and accepts less where they differ, so its card records them.
"""

import json

from transformers import PreTrainedTokenizerBase

from .errors import AdaFlashValueError
from .modeling_adaflash import AdaFlashDrafter


FLAGS_HELP = (
    "Flags of the chat template as JSON, such as '{\"enable_thinking\": false}'; default: those that the drafter's "
    "card records."
)


def read_flags(text: str) -> dict:
    """Flags from a command line's JSON object.

    Raises:
        AdaFlashValueError: when it is none.
    """
    try:
        flags = json.loads(text)
    except json.JSONDecodeError as error:
        raise AdaFlashValueError(f"`chat_template_kwargs` isn't JSON ({error}): write an object.") from error
    if not isinstance(flags, dict):
        raise AdaFlashValueError(f"`chat_template_kwargs` is {text}: write a JSON object.")
    return flags


def flags_for(drafter: AdaFlashDrafter, text: str | None) -> dict:
    """The flags given as JSON or, with `None`, those that the drafter was trained with, as far as its card says."""
    return (drafter.card.chat_template_kwargs or {}) if text is None else read_flags(text)


def template_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, flags: dict | None = None) -> list[int]:
    """The token ids of one user message, up to where the answer starts."""
    conversation = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=True, **(flags or {})
    )
    return encoded["input_ids"]
