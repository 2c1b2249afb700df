"""The text a drafter learns from: the target's own responses to prompts, as token ids, with features beside them."""

import dataclasses
import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import is_progress_bar_enabled

from ..chat_template import template_ids
from ..generation.rows import left_padded
from ..generation.statistics import collect_statistics
from ..modeling_adaflash import AdaFlashDrafter
from ..target import Target
from .data import FEATURE_KEYS, FeatureShards, collate, save_feature_shard, target_features
from .exchange import wait_for
from .prompts import DOMAINS, evaluation_prompts


@dataclass
class Sampling:
    """How responses are drawn: temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def options(self) -> dict:
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, **dataclasses.asdict(self)}


def respond(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int = 256,
    sampling: Sampling | None = None,
    chat_template_kwargs: dict | None = None,
    drafter: AdaFlashDrafter | None = None,
) -> list[dict]:
    """The target's responses to user messages, one batch.

    Args:
        sampling: greedy when left out.
        chat_template_kwargs: template flags such as `enable_thinking`; acceptance drops when they differ in use.
        drafter: drafts for the target; the responses are the target's own all the same.

    Returns:
        Per prompt `input_ids` (prompt and response, without padding, the end token included), `prompt_length`,
        `finish_reason` (`stop` or `length`) and `accepted_lengths`, tokens committed by each verify step.
    """
    rows = [template_ids(tokenizer, prompt, chat_template_kwargs) for prompt in prompts]
    return complete(model, rows, max_new_tokens, sampling, drafter)


def evaluation_ids(
    tokenizer: PreTrainedTokenizerBase, prompts_per_domain: int, chat_template_kwargs: dict
) -> dict[str, list[list[int]]]:
    """Domain -> token ids of its held-out prompts, as `evaluation.acceptance` takes them."""
    return {
        domain: [
            template_ids(tokenizer, text, chat_template_kwargs)
            for text in evaluation_prompts(domain, prompts_per_domain)
        ]
        for domain in DOMAINS
    }


def complete(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    drafter: AdaFlashDrafter | None = None,
) -> list[dict]:
    """`respond` for prompts that are token ids already."""
    inputs = left_padded(prompts, model.device)
    ends = set(end_tokens(model))
    with collect_statistics() as calls:
        sequences = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            pad_token_id=min(ends, default=0),
            assistant_model=drafter,
            **(sampling or Sampling()).options(),
        )
    accepted = calls[0].accepted_lengths if calls else [[] for _ in prompts]
    samples = []
    for prompt, row, lengths in zip(prompts, sequences.tolist(), accepted, strict=True):
        response = row[inputs["input_ids"].shape[1] :]
        end = next((i + 1 for i, token in enumerate(response) if token in ends), None)
        samples.append(
            {
                "input_ids": prompt + response[:end],
                "prompt_length": len(prompt),
                "finish_reason": "length" if end is None else "stop",
                "accepted_lengths": lengths,
            }
        )
    return samples


def end_tokens(model: PreTrainedModel) -> list[int]:
    """The ids that end a response, none for a model without."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def add_features(target: Target, samples: list[dict], batch_size: int = 8) -> list[dict]:
    """The samples with the target's features, from teacher-forced passes over `batch_size` sequences at a time."""
    done = []
    for start in range(0, len(samples), batch_size):
        part = samples[start : start + batch_size]
        batch = collate(part)
        made = target_features(
            target, batch["input_ids"].to(target.model.device), batch["attention_mask"].to(target.model.device)
        )
        for i, sample in enumerate(part):
            length = len(sample["input_ids"])
            done.append({**sample, **{key: made[key][i, :length].cpu() for key in FEATURE_KEYS}})
    return done


def build_feature_shards(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    folder: str | Path,
    max_new_tokens: int = 256,
    batch_size: int = 32,
    sampling: Sampling | None = None,
    sampled_share: float = 0.5,
    chat_template_kwargs: dict | None = None,
    seed: int = 0,
    index: int = 0,
    count: int = 1,
) -> FeatureShards:
    """Responses and features for all prompts, one shard per batch. A shard's name tells what it was made from, so an
    interrupted run goes on where it stopped, and other settings never reuse it. Several processes share the work
    through the folder, and each returns once all shards are there.

    Args:
        sampling: how sampled responses are drawn; default temperature 1.
        sampled_share: share of prompts whose first response is sampled, not greedy. Repeats of a prompt always are.
        chat_template_kwargs: as in `respond`.
        index, count: this process makes batches index, index + count, ...
    """
    folder, sampling = Path(folder), sampling or Sampling(1.0)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    seen: set[str] = set()
    greedy, sampled = [], []
    for prompt in rng.sample(prompts, len(prompts)):
        (sampled if rng.random() < sampled_share or prompt in seen else greedy).append(prompt)
        seen.add(prompt)
    batches = [
        (how, texts[start : start + batch_size])
        for how, texts in ((Sampling(), greedy), (sampling, sampled))
        for start in range(0, len(texts), batch_size)
    ]
    paths: list[Path] = []
    silent = index > 0 or not is_progress_bar_enabled()
    for number, (how, texts) in enumerate(tqdm(batches, desc="responses", disable=silent)):
        settings = [max_new_tokens, dataclasses.asdict(how), chat_template_kwargs, seed]
        recipe = [target.model.name_or_path, *settings, texts]
        digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
        path = folder / f"shard-{number:05d}-{digest}.safetensors"
        paths.append(path)
        if path.exists() or number % count != index:
            continue
        torch.manual_seed(seed + number)
        samples = respond(target.model, tokenizer, sorted(texts, key=len), max_new_tokens, how, chat_template_kwargs)
        save_feature_shard(path, add_features(target, samples), target.layer_ids, chat_template_kwargs or {})
    for path in paths:
        wait_for(path, "the process that makes it, and whether all processes see this folder")
    return FeatureShards(paths, target.layer_ids)


def frequent_tokens(dataset: FeatureShards, count: int, always: list[int]) -> torch.Tensor:
    """The `count` token ids that occur most often in responses, `always` among them, ascending, int64 `[count]`.
    Ids that never occur fill up from the lowest."""
    counter: Counter[int] = Counter()
    for input_ids, prompt_length in dataset.token_ids():
        counter.update(input_ids[prompt_length:].tolist())
    ranked = [*always, *(token for token, _ in counter.most_common()), *range(count)]
    return torch.tensor(sorted(list(dict.fromkeys(ranked))[:count]))
