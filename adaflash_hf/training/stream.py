"""The stream of rollouts that an on-policy trainer reads, in an order that is the same on every process and after
every restart.

Samples come by job number, and sample i belongs to version i // samples_per_version. So which samples are too stale,
and which come next after a resume, follows from the position in the stream alone.
"""

import random

from torch.utils.data import IterableDataset

from ..errors import AdaFlashValueError
from .exchange import Exchange, wait_for
from .rollout_worker import RolloutWorker, load_rollouts


class RolloutStream(IterableDataset):
    """Samples (`input_ids`, `prompt_length`, ...), waiting for rollouts where none is there yet.

    Args:
        exchange: where rollouts are.
        samples_per_version: samples between two published versions, passes counted.
        versions: the stream ends after the samples of so many, the last of them whole. Without an end, the loader,
            which reads a batch ahead, would wait at the end of training for rollouts that nobody needs.
        max_staleness: a job is passed over, and counted in `stale_jobs`, when it was made by a drafter more versions
            older than the one that the trainer has published by then.
        passes: times that each sample is trained on before the next version.
        seed: of the order within a version.
        worker: makes missing jobs in this process; `None` waits for a worker process.
        leads: whether this process tells workers how far the trainer is; one of several does.

    Raises:
        AdaFlashValueError: when `passes` doesn't divide `samples_per_version`.
    """

    def __init__(
        self,
        exchange: Exchange,
        samples_per_version: int,
        versions: int,
        max_staleness: int = 2,
        passes: int = 1,
        seed: int = 0,
        worker: RolloutWorker | None = None,
        leads: bool = True,
    ):
        if samples_per_version % passes:
            raise AdaFlashValueError(
                f"`rollout_passes` is {passes}, which doesn't divide the {samples_per_version} samples of a version: "
                "change it, `steps_per_version` or the batch size."
            )
        self.exchange, self.samples_per_version, self.versions = exchange, samples_per_version, versions
        self.max_staleness = max_staleness
        self.passes, self.seed, self.worker, self.leads = passes, seed, worker, leads
        self.stale_jobs = 0

    def __iter__(self):
        self.stale_jobs = 0
        job, waiting = 0, []
        for version in range(self.versions):
            fresh: list[dict] = []
            while len(fresh) < self.samples_per_version // self.passes:
                if not waiting:
                    samples, made_by = self._load(job)
                    job += 1
                    if version - made_by > self.max_staleness:
                        self.stale_jobs += 1
                        continue
                    waiting = samples
                fresh.append(waiting.pop(0))
            for number in range(self.passes):
                order = random.Random(f"{self.seed}/{version}/{number}").sample(range(len(fresh)), len(fresh))
                yield from (fresh[i] for i in order)

    def _load(self, job: int) -> tuple[list[dict], int]:
        if self.leads:
            self.exchange.need_job(job)
        path = self.exchange.rollout_path(job)
        if self.worker is not None and not path.exists():
            self.worker.make(job)
        wait_for(path, "that a rollout worker is running")
        return load_rollouts(self.exchange, job)
