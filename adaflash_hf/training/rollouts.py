"""The text a drafter learns from: the target's own responses to prompts, as token ids, with features beside them."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import is_progress_bar_enabled

from ..target import Target
from .data import FEATURE_KEYS, FeatureShards, collate, save_feature_shard, target_features


def respond(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    chat_template_kwargs: dict | None = None,
) -> list[dict]:
    """The target's responses to user messages, one batch.

    Args:
        temperature: 0 is greedy; otherwise plain sampling.
        chat_template_kwargs: template flags such as `enable_thinking`; acceptance drops when they differ in use.

    Returns:
        Per prompt `input_ids` (prompt and response, without padding, the end token included) and `prompt_length`.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        conversations,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        **(chat_template_kwargs or {}),
    ).to(model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    options = sampling if temperature > 0 else {"do_sample": False}
    sequences = model.generate(**inputs, max_new_tokens=max_new_tokens, **options)
    width = inputs["input_ids"].shape[1]
    ends = set(end_tokens(model))
    samples = []
    for row, mask in zip(sequences.tolist(), inputs["attention_mask"].tolist(), strict=True):
        prompt = row[width - sum(mask) : width]
        response = row[width:]
        end = next((i + 1 for i, token in enumerate(response) if token in ends), len(response))
        samples.append({"input_ids": prompt + response[:end], "prompt_length": len(prompt)})
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
    repeat_temperature: float = 0.8,
    seed: int = 0,
) -> FeatureShards:
    """Responses and features for all prompts, one shard per batch. A shard's name tells what it was made from, so an
    interrupted run goes on where it stopped, and other settings never reuse it. The first use of a prompt is answered
    greedily, repeats are sampled."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    order = list(range(len(prompts)))
    random.Random(seed).shuffle(order)
    seen: set[str] = set()
    jobs: dict[float, list[str]] = {0.0: [], repeat_temperature: []}
    for i in order:
        jobs[repeat_temperature if prompts[i] in seen else 0.0].append(prompts[i])
        seen.add(prompts[i])
    batches = [
        (temperature, texts[start : start + batch_size])
        for temperature, texts in jobs.items()
        for start in range(0, len(texts), batch_size)
    ]
    paths: list[Path] = []
    for number, (temperature, texts) in enumerate(
        tqdm(batches, desc="responses", disable=not is_progress_bar_enabled())
    ):
        recipe = [target.model.name_or_path, max_new_tokens, temperature, seed, texts]
        digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
        path = folder / f"shard-{number:05d}-{digest}.safetensors"
        paths.append(path)
        if path.exists():
            continue
        torch.manual_seed(seed + number)
        samples = respond(target.model, tokenizer, sorted(texts, key=len), max_new_tokens, temperature)
        save_feature_shard(path, add_features(target, samples), target.layer_ids)
    return FeatureShards(paths, target.layer_ids)


def frequent_tokens(dataset: FeatureShards, count: int, always: list[int]) -> torch.Tensor:
    """The `count` token ids that occur most often in responses, `always` among them, ascending, int64 `[count]`.
    Ids that never occur fill up from the lowest."""
    counter: Counter[int] = Counter()
    for input_ids, prompt_length in dataset.token_ids():
        counter.update(input_ids[prompt_length:].tolist())
    ranked = [*always, *(token for token, _ in counter.most_common()), *range(count)]
    return torch.tensor(sorted(list(dict.fromkeys(ranked))[:count]))
