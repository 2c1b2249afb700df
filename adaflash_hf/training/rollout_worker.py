"""Rollouts for on-policy training: the target answers prompts, helped by the newest published drafter.

A worker makes numbered jobs. Job j answers a fixed slice of the shuffled prompts, greedily or sampled, and its result
is one shard of token ids (never text: detokenised text may tokenise differently). `AdaFlashTrainer` runs a worker
in its own process by default; `run_worker` is the same as a process of its own, on another device. It may be killed
and started again at any time: it goes on with the first job that has no shard.
"""

import hashlib
import json
import random
import time
from dataclasses import asdict, dataclass, field

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..chat_template import read_flags, template_ids
from ..errors import AdaFlashValueError
from ..hub import replace_file
from ..modeling_adaflash import AdaFlashDrafter
from .exchange import Exchange
from .rollouts import Sampling, complete
from .setup import PromptArguments, load_prompts, load_target


logger = logging.get_logger(__name__)


@dataclass
class RolloutArguments:
    """What rollouts are made of, and how far they may run ahead."""

    rollout_batch_size: int = field(default=32, metadata={"help": "Prompts of one job, answered together."})
    rollout_max_new_tokens: int = field(default=256, metadata={"help": "Longest response, in tokens."})
    sampled_share: float = field(default=0.5, metadata={"help": "Share of jobs that are sampled, not greedy; 0 to 1."})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of sampled jobs."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus of sampled jobs; 1 for all tokens."})
    top_k: int = field(default=0, metadata={"help": "Most likely tokens of sampled jobs; 0 for all."})
    chat_template_kwargs: str = field(
        default="{}", metadata={"help": "Flags of the chat template as JSON, such as '{\"enable_thinking\": false}'."}
    )
    rollout_seed: int = field(default=0, metadata={"help": "Seed of the order of prompts and of sampling."})
    max_backlog: int = field(
        default=8,
        metadata={
            "help": "Jobs that workers may be ahead of the trainer. Keep `max_backlog` * `rollout_batch_size` below "
            "the samples of `max_staleness` versions, or some are made in vain (`stale_jobs` in the trainer's log)."
        },
    )

    def __post_init__(self):
        if not 0 <= self.sampled_share <= 1:
            raise AdaFlashValueError(f"`sampled_share` is {self.sampled_share}: use 0 to 1.")
        if not self.temperature > 0:
            raise AdaFlashValueError(f"`temperature` is {self.temperature}: use a number above 0; `sampled_share` 0 "
                                     "makes all rollouts greedy.")  # fmt: skip
        for key in ("rollout_batch_size", "rollout_max_new_tokens", "max_backlog"):
            if getattr(self, key) < 1:
                raise AdaFlashValueError(f"`{key}` is {getattr(self, key)}: use 1 or more.")
        read_flags(self.chat_template_kwargs)

    @property
    def template_flags(self) -> dict:
        """`chat_template_kwargs`, read."""
        return read_flags(self.chat_template_kwargs)

    @property
    def sampling(self) -> Sampling:
        """How sampled responses are drawn."""
        return Sampling(self.temperature, self.top_p, self.top_k)


class RolloutWorker:
    """Makes jobs of an exchange folder.

    Args:
        target: answers the prompts; not changed.
        tokenizer: for the chat template; may be `None` when prompts are token ids.
        prompts: user messages, or lists of token ids.
        exchange: where versions are read and shards written.
        index, count: this worker takes jobs index, index + count, ...

    Raises:
        AdaFlashValueError: when the folder was begun with other prompts or settings.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        prompts: list[str] | list[list[int]],
        exchange: Exchange,
        arguments: RolloutArguments,
        index: int = 0,
        count: int = 1,
    ):
        self.target, self.exchange, self.arguments = target.eval(), exchange, arguments
        self.index, self.count = index, count
        flags = arguments.template_flags
        self.prompts = [template_ids(tokenizer, p, flags) if isinstance(p, str) else list(p) for p in prompts]
        self.version: int | None = None
        self.drafter: AdaFlashDrafter | None = None
        recipe = {key: value for key, value in asdict(arguments).items() if key != "max_backlog"}
        digest = hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()[:16]
        exchange.agree_on({**recipe, "target": target.name_or_path, "prompts": [len(self.prompts), digest]})

    def run(self, poll_seconds: float = 0.5) -> None:
        """Makes jobs until the trainer has finished, waiting where it is `max_backlog` jobs ahead."""
        job = self.index
        while not self.exchange.finished:
            if self.exchange.rollout_path(job).exists():
                job += self.count
            elif job < self.exchange.needed_job() + self.arguments.max_backlog and self._reload():
                self.make(job)
            else:
                time.sleep(poll_seconds)

    def make(self, job: int) -> None:
        """Answers the job's prompts and writes its shard."""
        while not self._reload():
            time.sleep(0.1)
        sampling, indices = self.recipe_of(job)
        cuda = [self.target.device] if self.target.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(random.Random(f"{self.arguments.rollout_seed}-{job}").getrandbits(63))
            samples = complete(
                self.target,
                [self.prompts[i] for i in indices],
                self.arguments.rollout_max_new_tokens,
                sampling,
                self.drafter,
            )
        save_rollouts(self.exchange, job, samples, self.version, sampling)

    def recipe_of(self, job: int) -> tuple[Sampling, list[int]]:
        """How a job is sampled and which prompts it answers: all prompts once per epoch, in an order of its own."""
        arguments, count = self.arguments, len(self.prompts)
        seed = arguments.rollout_seed
        indices, orders = [], {}
        for i in range(job * arguments.rollout_batch_size, (job + 1) * arguments.rollout_batch_size):
            epoch = i // count
            if epoch not in orders:
                orders[epoch] = random.Random(f"{seed}/{epoch}").sample(range(count), count)
            indices.append(orders[epoch][i % count])
        sampled = random.Random(f"{seed}+{job}").random() < arguments.sampled_share
        if not sampled:
            return Sampling(), indices
        return arguments.sampling, indices

    def _reload(self) -> bool:
        """Takes the newest published drafter; false while there is none."""
        version = self.exchange.current_version()
        if version is None:
            return False
        if version != self.version:
            try:
                drafter = AdaFlashDrafter.from_pretrained(
                    self.exchange.version_path(version), dtype=self.target.dtype
                ).to(self.target.device)
            except (OSError, AdaFlashValueError):
                if self.exchange.current_version() == version:
                    raise
                return self._reload()  # a newer version has taken its place and this one was deleted
            self.version, self.drafter = version, drafter
        return True


def save_rollouts(exchange: Exchange, job: int, samples: list[dict], version: int, sampling: Sampling) -> None:
    """Writes a job's shard: `input_ids.j`, `accepted_lengths.j` (int32) and metadata."""
    tensors = {}
    for j, sample in enumerate(samples):
        tensors[f"input_ids.{j}"] = torch.tensor(sample["input_ids"], dtype=torch.int32)
        tensors[f"accepted_lengths.{j}"] = torch.tensor(sample["accepted_lengths"], dtype=torch.int32)
    metadata = {
        "version": str(version),
        "prompt_lengths": json.dumps([sample["prompt_length"] for sample in samples]),
        "finish_reasons": json.dumps([sample["finish_reason"] for sample in samples]),
        "sampling": json.dumps(asdict(sampling)),
    }
    replace_file(exchange.rollout_path(job), lambda path: save_file(tensors, path, metadata=metadata))


def load_rollouts(exchange: Exchange, job: int) -> tuple[list[dict], int]:
    """A job's samples, as `rollouts.complete` makes them, and the drafter version that helped."""
    with safe_open(exchange.rollout_path(job), framework="pt") as shard:
        metadata = shard.metadata()
        columns = json.loads(metadata["prompt_lengths"]), json.loads(metadata["finish_reasons"])
        samples = [
            {
                "input_ids": shard.get_tensor(f"input_ids.{j}"),
                "prompt_length": prompt_length,
                "finish_reason": finish_reason,
                "accepted_lengths": shard.get_tensor(f"accepted_lengths.{j}").tolist(),
            }
            for j, (prompt_length, finish_reason) in enumerate(zip(*columns, strict=True))
        ]
    return samples, int(metadata["version"])


@dataclass
class WorkerArguments:
    """Where a worker process runs."""

    exchange: str = field(metadata={"help": "Folder shared with the trainer (`--exchange` there)."})
    device: str = field(default="auto", metadata={"help": "`auto`, `cpu`, `cuda:1`, ..."})
    dtype: str = field(default="auto", metadata={"help": "The target's dtype; `auto` for its own."})
    worker_index: int = field(default=0, metadata={"help": "This worker's number, from 0."})
    num_workers: int = field(default=1, metadata={"help": "Workers that share the jobs."})


def run_worker(worker: WorkerArguments, prompts: PromptArguments, rollout: RolloutArguments) -> None:
    """Runs one rollout worker until the trainer has finished: `adaflash rollout`."""
    target, tokenizer = load_target(prompts, worker.dtype, worker.device)
    RolloutWorker(
        target,
        tokenizer,
        load_prompts(prompts),
        Exchange(worker.exchange),
        rollout,
        worker.worker_index,
        worker.num_workers,
    ).run()
