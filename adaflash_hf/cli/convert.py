"""`adaflash convert SRC DST --to LAYOUT`."""

from dataclasses import dataclass, field

from ..checkpoints import LAYOUTS, convert
from .arguments import make_parser, parse


DESCRIPTION = """\
Converts a drafter to the layout of another implementation. The layout of SRC is recognised.

  adaflash      this package; carries code for `trust_remote_code` users
  zlab          z-lab DFlash and AdaFlash; SGLang and vLLM load it
  speculators   vLLM's speculators; vLLM loads it
  transformers  the in-tree DFlash drafter of transformers 5.24

A setting that the other layout can't express is refused by name, and nothing is written. For example:

  adaflash convert z-lab/Qwen3-8B-DFlash-b16 qwen3-drafter --to adaflash
  adaflash convert runs/smollm2/drafter for-vllm --to speculators --no_include_length_head

Serving the result (B is the drafter's block size):

  vllm serve TARGET --speculative-config '{"method": "dflash", "model": "DST", "num_speculative_tokens": B-1}'
  python -m sglang.launch_server --model-path TARGET --speculative-algorithm DFLASH \\
      --speculative-draft-model-path DST --speculative-num-draft-tokens B"""


@dataclass
class ConvertArguments:
    to: str = field(metadata={"help": "Layout to write.", "choices": LAYOUTS})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of SRC on the Hub."})
    subfolder: str = field(default="", metadata={"help": "Folder inside SRC."})
    include_length_head: bool = field(
        default=True, metadata={"help": "Write the length head; leave it out for layouts that hold none."}
    )
    target: str | None = field(
        default=None,
        metadata={
            "help": "Folder or Hub id of the target; `--to speculators` reads head rows from it for drafters with "
            "`draft_vocab_size`. Default: the drafter's `target_model`."
        },
    )
    target_model: str | None = field(
        default=None, metadata={"help": "Name of the target to record, where SRC doesn't say."}
    )


def main(argv: list[str]) -> None:
    parser = make_parser(
        "convert", DESCRIPTION, ConvertArguments, {"src": "Folder or Hub id to read.", "dst": "New folder to write."}
    )
    options, places = parse(parser, argv)
    source = {"subfolder": options.subfolder}
    for key in ("revision", "target_model"):
        if getattr(options, key) is not None:
            source[key] = getattr(options, key)
    convert(places.src, places.dst, options.to, options.include_length_head, options.target, **source)
