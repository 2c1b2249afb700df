"""Model cards: what a reader of a drafter's Hub page must know, rendered from one template.

A card is made of the configuration and of `CardDetails`, which holds what no configuration says: training data,
measured accepted lengths with their command, licence. The details are kept in `card.json` beside the weights, so that
loading and saving again gives the same card, byte for byte.

The Hub copies this file for `trust_remote_code` users: it imports nothing of the package but its configurations.
"""

import dataclasses
import json
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .configuration_adaflash import AdaFlashConfig, AdaptiveLengthConfig
from .errors import AdaFlashValueError


DETAILS_FILE = "card.json"
TAGS = ["adaflash", "dflash", "speculative-decoding"]
RESULT_KEYS = ("tau", "command", "versions", "settings")


@dataclasses.dataclass
class CardDetails:
    """What a card says beyond the configuration. Everything is optional; what is unknown is said to be.

    Attributes:
        repo_id: name that the card's snippets load; the folder saved to where it is `None`.
        base_model: repo id of the target; the configuration's `target_model` where it is `None`.
        drafter: for a length head on its own: the drafter that it was trained for.
        license: SPDX name.
        language: ISO codes of the languages trained on.
        datasets: Hub ids of the training data.
        training_data: a paragraph (Markdown) on the text, its size, and how the drafter was trained on it.
        chat_template_kwargs: flags given to the target's chat template for the training text; `{}` means none.
        results: `tau` (accepted length per domain, bonus token included), `command`, `versions` (by package) and
            `settings` (a sentence), as the benchmark writes them.
        notes: a last paragraph (Markdown): limits, origin of the weights.
    """

    repo_id: str | None = None
    base_model: str | None = None
    drafter: str | None = None
    license: str | None = None
    language: list[str] = dataclasses.field(default_factory=list)
    datasets: list[str] = dataclasses.field(default_factory=list)
    training_data: str | None = None
    chat_template_kwargs: dict | None = None
    results: dict = dataclasses.field(default_factory=dict)
    notes: str | None = None

    def __post_init__(self):
        if not self.results:
            return
        wrong = sorted(self.results.keys() ^ set(RESULT_KEYS))
        if wrong:
            raise AdaFlashValueError(f"`results` lacks or doesn't know {wrong}: give exactly {list(RESULT_KEYS)}.")
        tau = self.results["tau"]
        if not tau or not all(isinstance(value, int | float) and value >= 1 for value in tau.values()):
            raise AdaFlashValueError(f"`tau` is {tau}: give a number of at least 1 for each domain.")

    @classmethod
    def from_json(cls, text: str) -> "CardDetails":
        """Reads `card.json`.

        Raises:
            AdaFlashValueError: for a key that a card doesn't have.
        """
        values = json.loads(text)
        unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise AdaFlashValueError(f"{DETAILS_FILE} has unknown keys {unknown}: remove them.")
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"


def render_card(config, details: CardDetails, folder: str | Path, parameters: int) -> str:
    """The text of README.md, metadata block included.

    Args:
        config: an `AdaFlashConfig`, or an `AdaptiveLengthConfig` for a head on its own.
        details: see `CardDetails`.
        folder: where the model is saved, for the snippets when `details.repo_id` is unknown.
        parameters: number of weights.
    """
    name = details.repo_id or Path(folder).as_posix()
    title = Path(name).name or Path(folder).resolve().name  # "." has no name of its own
    is_drafter = isinstance(config, AdaFlashConfig)
    base_model = details.base_model or (config.target_model if is_drafter else None)
    # A folder on this machine means nothing on the Hub.
    is_repo_id = base_model is not None and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", base_model) is not None
    is_repo_id = is_repo_id and not Path(base_model).is_dir()
    rows = _drafter_rows(config) if is_drafter else _head_rows(config)
    rows |= {
        "parameters": f"{parameters:,}",
        "chat template": _template_flags(details.chat_template_kwargs),
        "language": ", ".join(details.language) or "not recorded",
    }
    tau = details.results.get("tau", {})
    data = ModelCardData(
        base_model=base_model if is_repo_id else None,
        datasets=details.datasets or None,
        language=details.language or None,
        library_name="transformers",
        license=details.license,
        # The name that the results below are filed under.
        model_name=title if tau else None,
        pipeline_tag="text-generation" if is_drafter else None,
        tags=TAGS + ([] if is_drafter else ["length-head"]),
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=domain,
                dataset_name=domain,
                metric_type="accepted_length",
                metric_name="accepted length (tau)",
                metric_value=value,
            )
            for domain, value in tau.items()
        ]
        or None,
    )
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        title=title,
        name=name,
        is_drafter=is_drafter,
        link=f"[{base_model}](https://huggingface.co/{base_model})" if is_repo_id else base_model,
        target=base_model or "the target's repo id or folder",
        drafter=details.drafter,
        rows=rows,
        tau=tau,
        mean_tau=sum(tau.values()) / len(tau) if tau else None,
        results=details.results,
        versions=", ".join(f"{package} {version}" for package, version in details.results.get("versions", {}).items()),
        training_data=details.training_data,
        notes=details.notes,
        template_kwargs=_keyword_lines(details.chat_template_kwargs),
    )
    return str(card).rstrip() + "\n"


def _drafter_rows(config: AdaFlashConfig) -> dict[str, str]:
    head = config.length_head
    sliding = config.layer_types.count("sliding_attention")
    within = ""
    if sliding:
        order = "causal" if config.sliding_window_causal else "not causal"
        within = f" ({sliding} with a sliding window of {config.sliding_window}, {order} inside the block)"
    vocabulary = config.draft_vocab_size
    return {
        "block size": f"{config.block_size} (anchor included; {config.num_drafted_tokens} drafted tokens)",
        "drafter layers": f"{config.num_hidden_layers}{within}",
        "tapped target layers": f"{', '.join(map(str, config.target_layer_ids))} (0-based outputs)",
        "mask token": f"id {config.mask_token_id}",
        "label convention": f"`{config.label_convention}`",
        "draft vocabulary": f"{vocabulary:,} rows of the target's head" if vocabulary else "the target's",
        "length head": f"`{head.kind}`" if head is not None else "none",
    }


def _head_rows(config: AdaptiveLengthConfig) -> dict[str, str]:
    return {
        "kind": f"`{config.kind}`",
        "block size": f"{config.block_size} (anchor included; {config.num_drafted_tokens} drafted tokens)",
        "hidden size": str(config.hidden_size),
        "bottleneck": str(config.bottleneck_size),
    }


def _template_flags(flags: dict | None) -> str:
    if flags is None:
        return "not recorded"
    return ", ".join(f"`{key}={value!r}`" for key, value in flags.items()) or "the target's own, no flags"


def _keyword_lines(flags: dict | None) -> str:
    return "".join(f"    {key}={value!r},\n" for key, value in (flags or {}).items())


_TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

{% if is_drafter -%}
A drafter for speculative decoding with AdaFlash ([arXiv 2607.19223](https://arxiv.org/abs/2607.19223)). It can't
generate alone, so `pipeline(...)` snippets don't apply: pass it to the `generate` of its target
{%- if link %}, {{ link }}{% endif %}.
What comes out is the target's own.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from adaflash_hf import AdaFlashDrafter

target = AutoModelForCausalLM.from_pretrained("{{ target }}")
tokenizer = AutoTokenizer.from_pretrained("{{ target }}")
drafter = AdaFlashDrafter.from_pretrained("{{ name }}", dtype=target.dtype)

inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Name three rivers."}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
{{ template_kwargs }})
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

Without the package, in transformers' own loop (one sequence at a time):

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{{ target }}")
tokenizer = AutoTokenizer.from_pretrained("{{ target }}")
drafter = AutoModel.from_pretrained(
    "{{ name }}",
    dtype=target.dtype,
    trust_remote_code=True,
)

inputs = tokenizer("The capital of France is", return_tensors="pt")
output = target.generate(
    **inputs, assistant_model=drafter, speculation_type="dflash", max_new_tokens=64, do_sample=False
)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```
{%- else -%}
A length head for an AdaFlash drafter ([arXiv 2607.19223](https://arxiv.org/abs/2607.19223)): it says how much of a
drafted block is worth verifying. It belongs to the drafter it was trained for
{%- if drafter %}, [{{ drafter }}](https://huggingface.co/{{ drafter }}){% endif %}.

```python
from adaflash_hf import AdaFlashDrafter, AdaptiveLengthHead

drafter = AdaFlashDrafter.from_pretrained("{{ drafter or "the drafter's repo id or folder" }}")
drafter.length_head = AdaptiveLengthHead.from_pretrained("{{ name }}", dtype=drafter.dtype)
drafter.config.length_head = drafter.length_head.config
```
{%- endif %}

| | |
| --- | --- |
{% for key, value in rows.items() -%}
| {{ key }} | {{ value }} |
{% endfor %}
## Accepted length

{% if tau -%}
tau is accepted tokens per verify step, the bonus token included. {{ results.settings }}

| domain | tau |
| --- | ---: |
{% for domain, value in tau.items() -%}
| {{ domain }} | {{ "%.2f" | format(value) }} |
{% endfor -%}
| mean | {{ "%.2f" | format(mean_tau) }} |

    {{ results.command }}

Versions: {{ versions }}.
{%- else -%}
Not measured.
{%- endif %}

## Training

{{ training_data or "Not recorded." }}
{%- if notes %}

## Notes

{{ notes }}
{%- endif %}
"""
