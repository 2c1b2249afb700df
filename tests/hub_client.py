"""Run by `test_hub.py` in a process of its own, with HF_ENDPOINT pointed at the hub on loopback: pushes and loads as a
user of the package would. Prints one JSON object."""

import json
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))

import torch
from huggingface_hub import HfApi, ModelCard, snapshot_download
from tiny import make_drafter
from transformers import AutoModel

from adaflash_hf import AdaFlashDrafter, AdaFlashValueError, AdaptiveLengthHead
from adaflash_hf.cards import CardDetails
from adaflash_hf.checkpoints import convert, save_drafter


def same(a, b) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def main(folder: Path) -> dict:
    found = {}
    drafter = make_drafter(head="survival", draft_vocab_size=16)
    drafter.generation_config.survival_threshold = 0.25
    drafter.card = CardDetails(license="apache-2.0", language=["en"], training_data="A hundred words.")

    # 1. Drafter with head, and its card.
    found["commit"] = drafter.push_to_hub("org/drafter")
    loaded = AdaFlashDrafter.from_pretrained("org/drafter")
    found["drafter"] = same(loaded, drafter) and loaded.generation_config.survival_threshold == 0.25
    found["auto"] = same(AutoModel.from_pretrained("org/drafter"), drafter)
    found["card"] = str(ModelCard.load("org/drafter"))
    found["details"] = loaded.card.training_data
    first = snapshot_download("org/drafter").rsplit("/", 1)[-1]

    # 2. A second push with changed weights and card; the first stays loadable by its commit.
    changed = make_drafter(head="survival", draft_vocab_size=16, seed=5)
    changed.card = CardDetails(license="apache-2.0", training_data="Two hundred words.")
    changed.push_to_hub("org/drafter", commit_message="More text")
    found["second"] = same(AdaFlashDrafter.from_pretrained("org/drafter"), changed)
    found["first_by_revision"] = same(AdaFlashDrafter.from_pretrained("org/drafter", revision=first), drafter)
    found["second_card"] = "Two hundred words." in str(ModelCard.load("org/drafter"))

    # 3. Another branch, sharded; then whole again on the same branch.
    drafter.push_to_hub("org/drafter", revision="sharded", max_shard_size="20KB")
    found["sharded"] = same(AdaFlashDrafter.from_pretrained("org/drafter", revision="sharded"), drafter)
    found["main_untouched"] = same(AdaFlashDrafter.from_pretrained("org/drafter"), changed)

    # 4. Sharded over a whole file: the old file must not win, and what is no weight of this model stays.
    HfApi().upload_file(repo_id="org/drafter", path_in_repo="inner/model.safetensors", path_or_fileobj=b"other")
    drafter.push_to_hub("org/drafter", max_shard_size="20KB")
    found["sharded_over_whole"] = same(AdaFlashDrafter.from_pretrained("org/drafter"), drafter)

    # 5. The head alone, through `save_pretrained(push_to_hub=True)`.
    drafter.length_head.card = CardDetails(base_model="org/target", drafter="org/drafter")
    drafter.length_head.save_pretrained(folder / "head", push_to_hub=True, repo_id="org/head")
    head = AdaptiveLengthHead.from_pretrained("org/head")
    found["head"] = same(head, drafter.length_head) and head.config.kind == "survival"
    found["head_card"] = str(ModelCard.load("org/head"))

    # 6. Another layout, in a subfolder, on the Hub; and the converter reading from there.
    plain = make_drafter(draft_vocab_size=None)
    save_drafter(plain, folder / "zlab" / "inner", "zlab")
    HfApi().create_repo("org/foreign")
    HfApi().upload_folder(repo_id="org/foreign", folder_path=folder / "zlab")
    found["subfolder"] = same(AdaFlashDrafter.from_pretrained("org/foreign", subfolder="inner"), plain)
    convert("org/foreign", folder / "ours", "adaflash", subfolder="inner")
    found["converted"] = same(AdaFlashDrafter.from_pretrained(folder / "ours"), plain)
    drafter.save_pretrained(folder / "own" / "inner")
    HfApi().upload_folder(repo_id="org/foreign", folder_path=folder / "own", path_in_repo="own")
    loaded = AdaFlashDrafter.from_pretrained("org/foreign", subfolder="own/inner")
    found["own_subfolder"] = same(loaded, drafter) and loaded.generation_config.survival_threshold == 0.25
    found["own_subfolder"] &= loaded.card == drafter.card
    try:
        AdaFlashDrafter.from_pretrained("org/nothing")
    except (OSError, AdaFlashValueError) as error:
        found["missing"] = str(error)

    # 7. The card's folder, as it would be pushed.
    repo = "hub_cards/SmolLM2-135M-Instruct-AdaFlash"
    AdaFlashDrafter.from_pretrained(Path(__file__).parent.parent / repo).push_to_hub(repo)
    return found


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(Path(sys.argv[1]))))
