"""Training text as token ids, with the target's features beside it when they were computed ahead.

A feature shard is one safetensors file. For sequence j it holds `input_ids.j` int32 `[n]`, `features.j` `[n, T*d]`
(tapped layers), `teacher_hidden.j` `[n, d]` (input of the target's head) and `teacher_argmax.j` int32 `[n]` (the
target's choice of the next token); its metadata holds prompt lengths, tapped layers and the chat template's flags.
Files are written beside their final name and moved, so a reader never sees half a shard.
"""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset

from ..errors import AdaFlashValueError
from ..hub import replace_file
from ..target import Target


FEATURE_KEYS = ("features", "teacher_hidden", "teacher_argmax")


def target_features(target: Target, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """One teacher-forced pass over right-padded `[b, n]` ids: `features` `[b, n, T*d]`, `teacher_hidden` `[b, n, d]`
    and `teacher_argmax` `[b, n]` (int64)."""
    hidden = {}
    handle = target.head.register_forward_pre_hook(lambda module, args: hidden.update(last=args[0]))
    try:
        with torch.no_grad(), target.taps() as captured:
            logits = target.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    finally:
        handle.remove()
    return {
        "features": target.features(captured),
        "teacher_hidden": hidden["last"],
        "teacher_argmax": logits.argmax(dim=-1),
    }


def save_feature_shard(
    path: str | Path, samples: list[dict], target_layer_ids: list[int], chat_template_kwargs: dict
) -> None:
    """Writes samples (`input_ids`, `prompt_length` and the three feature tensors) to one shard, atomically.

    Args:
        chat_template_kwargs: flags of the chat template that the text was made with.
    """
    tensors = {}
    for j, sample in enumerate(samples):
        tensors[f"input_ids.{j}"] = torch.as_tensor(sample["input_ids"], dtype=torch.int32)
        tensors[f"features.{j}"] = sample["features"].bfloat16().contiguous()
        tensors[f"teacher_hidden.{j}"] = sample["teacher_hidden"].bfloat16().contiguous()
        tensors[f"teacher_argmax.{j}"] = sample["teacher_argmax"].int()
    metadata = {
        "prompt_lengths": json.dumps([int(sample["prompt_length"]) for sample in samples]),
        "target_layer_ids": json.dumps(list(target_layer_ids)),
        "chat_template_kwargs": json.dumps(chat_template_kwargs, sort_keys=True),
    }
    replace_file(Path(path), lambda partial: save_file(tensors, partial, metadata=metadata))


class FeatureShards(Dataset):
    """The sequences of feature shards, read lazily: those of a folder, or those listed.

    Attributes:
        chat_template_kwargs: the flags that all of the text was made with; `None` when shards differ or don't say.

    Raises:
        AdaFlashValueError: when there is no shard, or one made with other tapped layers.
    """

    def __init__(self, shards: str | Path | list[Path], target_layer_ids: list[int], longest: int | None = None):
        self.paths = shards if isinstance(shards, list) else sorted(Path(shards).glob("*.safetensors"))
        if not self.paths:
            raise AdaFlashValueError(f"{shards} holds no feature shard: run the feature step first.")
        self.longest = longest
        self.items: list[tuple[int, int, int]] = []
        flags = set()
        for number, path in enumerate(self.paths):
            with safe_open(path, framework="pt") as shard:
                metadata = shard.metadata()
            if json.loads(metadata["target_layer_ids"]) != list(target_layer_ids):
                raise AdaFlashValueError(
                    f"{path} was made with target_layer_ids {metadata['target_layer_ids']}, the drafter has "
                    f"{list(target_layer_ids)}: delete the folder to make the features anew."
                )
            for j, length in enumerate(json.loads(metadata["prompt_lengths"])):
                self.items.append((number, j, length))
            flags.add(metadata.get("chat_template_kwargs", "null"))
        self.chat_template_kwargs: dict | None = json.loads(flags.pop()) if len(flags) == 1 else None

    def __len__(self) -> int:
        return len(self.items)

    def token_ids(self):
        """Iterates over (`input_ids` int32 `[n]`, prompt length) without reading features."""
        for number, items in itertools.groupby(self.items, key=lambda item: item[0]):
            with safe_open(self.paths[number], framework="pt") as shard:
                for _, j, prompt_length in items:
                    yield shard.get_tensor(f"input_ids.{j}"), prompt_length

    def __getitem__(self, index: int) -> dict:
        number, j, prompt_length = self.items[index]
        with safe_open(self.paths[number], framework="pt") as shard:
            sample = {key: shard.get_tensor(f"{key}.{j}") for key in ("input_ids", *FEATURE_KEYS)}
        if self.longest is not None:
            sample = {key: value[: self.longest] for key, value in sample.items()}
        return {**sample, "prompt_length": prompt_length}


def collate(samples: Iterable[dict]) -> dict[str, torch.Tensor]:
    """Right-pads samples to one batch: `input_ids`, `attention_mask`, `loss_mask` (true on response tokens) and,
    where every sample has them, the feature tensors."""
    samples = list(samples)
    ids = [torch.as_tensor(sample["input_ids"], dtype=torch.long) for sample in samples]
    pad = torch.nn.utils.rnn.pad_sequence
    lengths = torch.tensor([len(x) for x in ids])
    positions = torch.arange(int(lengths.max()))
    prompt_lengths = torch.tensor([int(sample["prompt_length"]) for sample in samples])
    attention_mask = positions < lengths[:, None]
    batch = {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": attention_mask,
        "loss_mask": attention_mask & (positions >= prompt_lengths[:, None]),
    }
    if all("features" in sample for sample in samples):
        for key in FEATURE_KEYS:
            batch[key] = pad([sample[key] for sample in samples], batch_first=True)
        batch["teacher_argmax"] = batch["teacher_argmax"].long()
    return batch


def noisy(features: torch.Tensor, loss_mask: torch.Tensor, amount: float) -> torch.Tensor:
    """Features `[b, n, T*d]` plus normal noise of `amount` standard deviations of each feature. Deviations are those
    over response tokens (`loss_mask`), since the first tokens of a prompt are often outliers in all layers."""
    kept = features[loss_mask].float()
    if len(kept) < 2:
        return features
    return features + torch.randn_like(features) * (amount * kept.std(dim=0)).to(features.dtype)
