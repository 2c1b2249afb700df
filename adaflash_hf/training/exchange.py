"""The folder through which a trainer and rollout workers meet. Either side may be killed at any moment.

    versions/00000003/      a published drafter, complete from the moment it has this name, never written again
    current                 the newest version's number
    rollouts/00000012.safetensors  the responses of job 12, complete from the moment it has this name, never rewritten
    needed                  the job that the trainer reads next, which bounds how far workers run ahead
    recipe.json             what jobs are made from; a worker with another recipe is refused
    finished                present once training is over

Every file and folder is written beside its final name and moved there. A job's content follows from its number and
the recipe alone (and from the drafter's version where sampling), and the trainer takes jobs in order, so no list of
consumed samples is kept: the number of trained samples, which a checkpoint knows, says where to go on.
"""

import json
import os
import shutil
import time
from pathlib import Path

from transformers.utils import logging

from ..errors import AdaFlashValueError
from ..hub import replace_text


logger = logging.get_logger(__name__)
_WARN_SECONDS = 120


def wait_for(path: Path, hint: str) -> None:
    """Returns once the file exists. Warns every two minutes that it doesn't; `hint` says what to look at then."""
    asked = time.monotonic()
    while not path.exists():
        if time.monotonic() - asked > _WARN_SECONDS:
            logger.warning(f"{path} has not come for {_WARN_SECONDS} s: check {hint}.")
            asked = time.monotonic()
        time.sleep(0.05)


class Exchange:
    """One such folder.

    Args:
        folder: created when missing.
        keep_versions: newest versions that `publish` leaves; older ones are deleted.
    """

    def __init__(self, folder: str | Path, keep_versions: int = 4):
        self.folder, self.keep_versions = Path(folder), keep_versions
        self.versions, self.rollouts = self.folder / "versions", self.folder / "rollouts"
        for path in (self.versions, self.rollouts):
            path.mkdir(parents=True, exist_ok=True)

    def _read_number(self, name: str) -> int | None:
        try:
            return int((self.folder / name).read_text())
        except FileNotFoundError:
            return None

    def _write_text(self, name: str, text: str) -> None:
        replace_text(self.folder / name, text)

    def version_path(self, version: int) -> Path:
        return self.versions / f"{version:08d}"

    def current_version(self) -> int | None:
        """The newest published version, `None` before the first."""
        return self._read_number("current")

    def publish(self, version: int, save) -> None:
        """Lets `save(folder)` write a version, then points to it. A version that exists already, from before a
        restart, stays as it is: rollouts may carry its number."""
        path = self.version_path(version)
        if not path.exists():
            for leftover in self.versions.glob(".*"):
                shutil.rmtree(leftover)
            partial = self.versions / f".{path.name}.{os.getpid()}"
            save(partial)
            os.rename(partial, path)
        self._write_text("current", str(version))
        for old in sorted(self.versions.glob("[0-9]*"))[: -self.keep_versions]:
            if old != path:
                shutil.rmtree(old)

    def rollout_path(self, job: int) -> Path:
        return self.rollouts / f"{job:08d}.safetensors"

    def needed_job(self) -> int:
        return self._read_number("needed") or 0

    def need_job(self, job: int) -> None:
        self._write_text("needed", str(job))

    def agree_on(self, recipe: dict) -> None:
        """Records what jobs are made from.

        Raises:
            AdaFlashValueError: when the folder was begun with another recipe, naming the first key that differs.
        """
        path = self.folder / "recipe.json"
        if not path.exists():
            self._write_text("recipe.json", json.dumps(recipe, indent=2))
        recorded = self.recipe()
        for key in recorded.keys() | recipe.keys():
            if recorded.get(key) != recipe.get(key):
                raise AdaFlashValueError(
                    f"`{key}` of the rollouts is {recipe.get(key)!r}, but {self.folder} was begun with "
                    f"{recorded.get(key)!r}: use that, or another folder."
                )

    def recipe(self) -> dict:
        """What the first worker recorded with `agree_on`."""
        return json.loads((self.folder / "recipe.json").read_text(encoding="utf-8"))

    @property
    def finished(self) -> bool:
        return (self.folder / "finished").exists()

    def set_finished(self, finished: bool) -> None:
        if finished:
            self._write_text("finished", "")
        else:
            (self.folder / "finished").unlink(missing_ok=True)
