"""Saving and pushing with a complete card: the base class of the drafter and the length head.

The Hub copies this file for `trust_remote_code` users, so it stays self-contained with relative imports.
"""

import os
import tempfile
from pathlib import Path

from huggingface_hub import HfApi
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .cards import DETAILS_FILE, CardDetails, render_card


HUB_ARGUMENTS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")


def read_text(name_or_path, file: str, hub: dict) -> str | None:
    """The text of a file of a folder or Hub repo, `None` where there is no such file. `hub`: `HUB_ARGUMENTS`."""
    try:
        path = cached_file(name_or_path, file, **hub)
    except OSError:
        return None
    return Path(path).read_text(encoding="utf-8")


def replace_file(path: Path, write) -> None:
    """Lets `write` fill a temporary file, then puts it in place in one step, so that readers never see half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """`replace_file` with UTF-8 text."""
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


class HubModel(PreTrainedModel):
    """A PreTrainedModel that is saved and pushed with its card.

    Attributes:
        card: what the card says beyond the configuration (`CardDetails`); read by `from_pretrained`, kept in
            `card.json`. Training a loaded model further makes its results stale: assign new details then.
    """

    def __init__(self, config):
        super().__init__(config)
        self.card = CardDetails()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As in transformers; reads the details of the card too."""
        hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        loaded = cls.load_weights(pretrained_model_name_or_path, *args, **kwargs)
        if pretrained_model_name_or_path is not None:
            (loaded[0] if isinstance(loaded, tuple) else loaded).read_settings(pretrained_model_name_or_path, hub)
        return loaded

    @classmethod
    def load_weights(cls, name_or_path, *args, **kwargs):
        """transformers' `from_pretrained`; a subclass may read other layouts."""
        return super().from_pretrained(name_or_path, *args, **kwargs)

    def read_settings(self, name_or_path, hub: dict) -> None:
        """Takes over `card.json` from a folder or Hub repo, if it has one; a subclass may read more files."""
        text = read_text(name_or_path, DETAILS_FILE, hub)
        if text is not None:
            self.card = CardDetails.from_json(text)

    def save_pretrained(self, save_directory, is_main_process: bool = True, *, push_to_hub: bool = False, **kwargs):
        """As in transformers; writes README.md, `card.json` and the code for `trust_remote_code` users too."""
        hub = {key: kwargs.pop(key) for key in _PUSH_ARGUMENTS if key in kwargs}
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            self.write_card(save_directory)
        if push_to_hub and is_main_process:
            repo_id = hub.pop("repo_id", None) or Path(save_directory).name
            saving = {key: kwargs[key] for key in ("max_shard_size", *_SAVING_ARGUMENTS) if key in kwargs}
            self.push_to_hub(repo_id, token=kwargs.get("token"), **hub, **saving)

    def write_card(self, folder) -> None:
        """Writes README.md and `card.json` into `folder`."""
        folder = Path(folder)
        text = render_card(self.config, self.card, folder, sum(p.numel() for p in self.parameters()))
        replace_text(folder / DETAILS_FILE, self.card.to_json())
        replace_text(folder / "README.md", text)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        **saving,
    ) -> str:
        """Uploads weights, configuration, card and code, in one commit that replaces files of the same names.

        Args:
            repo_id: name of the repo; created when missing, and the name that the card's snippets load.
            revision: branch to push to; created when missing. Or a pull request's (`refs/pr/N`).
            saving: `variant` and `state_dict`, as in `save_pretrained`.
            (The others are as in transformers.)

        Raises:
            TypeError: for another argument.

        Returns:
            The URL of the commit.
        """
        unknown = saving.keys() - set(_SAVING_ARGUMENTS)
        if unknown:
            raise TypeError(f"`{unknown.pop()}` is no argument of `push_to_hub` here: leave it out.")
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr and not revision.startswith("refs/"):  # a pull request's is there
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        self.card.repo_id = repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size, **saving)
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {type(self).__name__}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
                # Else the whole file of an earlier push would win over the shards of this one.
                delete_patterns=["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"],
            )


_PUSH_ARGUMENTS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr")
_SAVING_ARGUMENTS = ("variant", "state_dict")
