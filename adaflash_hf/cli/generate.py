"""`adaflash generate`: a chat in the terminal."""

import sys
import time
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from ..chat_template import FLAGS_HELP, flags_for, read_flags
from ..default_target import DEFAULT_TARGET, load_default_target
from ..errors import AdaFlashValueError
from ..generation.statistics import collect_statistics
from ..modeling_adaflash import AdaFlashDrafter
from .arguments import make_parser, parse


DESCRIPTION = """\
Chats with a target in the terminal: type a message, read the answer. While it is written, a line below it shows
tokens per second and the accepted length (tokens committed per pass of the target, 1 without a drafter); the figures
of the whole answer follow it. An empty line or the end of the input leaves. Messages can be piped in, one a line.

  adaflash generate --drafter hub_cards/SmolLM2-135M-Instruct-AdaFlash
  echo "Name three rivers." | adaflash generate --drafter DRAFTER --plain"""


@dataclass
class GenerateArguments:
    drafter: str = field(metadata={"help": "Folder or Hub id of the drafter."})
    target: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of the target; default: the drafter's `target_model`."}
    )
    max_new_tokens: int = field(default=256, metadata={"help": "Longest answer, in tokens."})
    temperature: float = field(default=0.0, metadata={"help": "0 takes the likeliest token; above, tokens are drawn."})
    system: str | None = field(default=None, metadata={"help": "System message."})
    chat_template_kwargs: str | None = field(default=None, metadata={"help": FLAGS_HELP})
    dtype: str = field(default="auto", metadata={"help": "auto, float32 or bfloat16, of both models."})
    device: str | None = field(default=None, metadata={"help": "Where to run; default: a GPU if there is one."})
    plain: bool = field(default=False, metadata={"help": "Leave the drafter out, to compare."})

    def __post_init__(self):
        if self.chat_template_kwargs is not None:
            read_flags(self.chat_template_kwargs)


class LiveStreamer(TextStreamer):
    """Prints text as it comes and, on a terminal, a line below it with speed and accepted length so far.

    Args:
        tokenizer: decodes the tokens.
        target: its forward passes are counted, the first of which reads the prompt.
    """

    # Make room for one line below and come back; then: save the place, next line, clear, write, return to the place.
    _BELOW, _CLEAR_BELOW = "\033D\033M\0337\033[1E\033[K{}\0338", "\033[J"

    def __init__(self, tokenizer, target):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.tokens = self.passes = 0
        self.started = self.first = time.perf_counter()
        self._hook = target.get_decoder().register_forward_hook(self._count)

    def _count(self, *_):
        self.passes += 1
        if self.passes == 1:
            self.first = time.perf_counter()

    def put(self, value):
        if not self.next_tokens_are_prompt:
            self.tokens += value.numel()
        super().put(value)

    def end(self):
        super().end()
        self._hook.remove()

    def on_finalized_text(self, text: str, stream_end: bool = False):
        live = sys.stdout.isatty()
        sys.stdout.write((self._CLEAR_BELOW if live else "") + text + ("\n" if stream_end else ""))
        if live and not stream_end:
            sys.stdout.write(self._BELOW.format(f"[{self.summary()}]"))
        sys.stdout.flush()

    @property
    def accepted_length(self) -> float:
        return self.tokens / max(self.passes, 1)

    def summary(self, accepted_length: float | None = None) -> str:
        """Tokens, tokens per second of decoding (the prompt's pass left out), and accepted length."""
        seconds = time.perf_counter() - self.first
        rate = (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else 0.0
        accepted_length = self.accepted_length if accepted_length is None else accepted_length
        return f"{self.tokens} tokens, {rate:.1f} tokens/s, accepted length {accepted_length:.2f}"


def load(options: GenerateArguments):
    """(target, tokenizer, drafter), on one device and in one dtype."""
    dtypes = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if options.dtype not in dtypes:
        raise AdaFlashValueError(f"`dtype` is {options.dtype!r}: use one of {', '.join(dtypes)}.")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = options.target or AdaFlashDrafter.from_pretrained(options.drafter).config.target_model
    if name is None:
        raise AdaFlashValueError("The drafter doesn't name its target: pass `--target`.")
    if name == DEFAULT_TARGET:
        target, tokenizer = load_default_target(dtypes[options.dtype])
    else:
        target = AutoModelForCausalLM.from_pretrained(name, dtype=dtypes[options.dtype] or "auto").eval()
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.chat_template is None:
        raise AdaFlashValueError(f"{name} has no chat template: use an instruction-tuned target.")
    drafter = AdaFlashDrafter.from_pretrained(options.drafter, dtype=target.dtype)
    return target.to(device), tokenizer, drafter.to(device)


def answer(target, tokenizer, drafter, messages: list[dict], flags: dict, options: GenerateArguments) -> str:
    """Streams one answer with its figures to stdout and returns its text. `drafter=None` decodes plainly; the chat
    template gets the `flags`."""
    inputs = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **flags,
    ).to(target.device)
    sampling = {"do_sample": True, "temperature": options.temperature}
    streamer = LiveStreamer(tokenizer, target)
    with collect_statistics() as calls:
        output = target.generate(
            **inputs,
            assistant_model=drafter,
            streamer=streamer,
            max_new_tokens=options.max_new_tokens,
            **(sampling if options.temperature > 0 else {"do_sample": False}),
        )
    tau = calls[0].mean_accepted_length if calls else None
    sys.stdout.write(f"[{streamer.summary(tau)}]\n")
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(argv: list[str]) -> None:
    (options,) = parse(make_parser("generate", DESCRIPTION, GenerateArguments), argv)
    target, tokenizer, drafter = load(options)
    flags = flags_for(drafter, options.chat_template_kwargs)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    while True:
        if sys.stdin.isatty():
            sys.stdout.write("> ")
            sys.stdout.flush()
        message = sys.stdin.readline().strip()
        if not message:
            return
        messages.append({"role": "user", "content": message})
        text = answer(target, tokenizer, None if options.plain else drafter, messages, flags, options)
        messages.append({"role": "assistant", "content": text})
