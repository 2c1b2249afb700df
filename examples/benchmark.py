"""Throughput by concurrency, for the default target on this machine or any pair on a GPU.

    OMP_NUM_THREADS=2 python examples/benchmark.py --concurrency 1 4 16 --output runs/benchmark
    python examples/benchmark.py --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --concurrency 1 8 32

The same as `adaflash bench`; `--help` lists all settings. Writes `results.json`, `table.md` and plots to `--output`.
"""

import sys
from pathlib import Path

from adaflash_hf.evaluation.benchmark import main


DRAFTER = Path(__file__).parent.parent / "hub_cards" / "SmolLM2-135M-Instruct-AdaFlash"


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if not any(argument.split("=")[0] in ("--drafter", "-h", "--help") for argument in arguments):
        arguments += ["--drafter", str(DRAFTER)]
    main(arguments)
