"""Trains a drafter for a target on the target's own responses, offline: what `adaflash train` does.

    python examples/train_drafter.py --output_dir runs/smollm2

`--help` lists the steps and every setting; `adaflash_hf/cli/train.py` is the program.
"""

import sys

from adaflash_hf.cli import main


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
