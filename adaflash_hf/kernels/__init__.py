"""Kernels of the verify path: Triton on CUDA and ROCm tensors, a PyTorch twin of each for everything else.

    greedy_verify      leading drafts that are the target's argmax, and the bonus token
    sample_verify      rejection sampling of drafts, and the token after them
    ragged_attention   packed queries over a cache whose slots are positions
    survival_lengths   how many drafted tokens of each row to verify
    use_backend        forces one of the two implementations

Each function's file holds its contract and its twin; the file of the same name with `_triton` holds the kernel, and is
imported only where it runs. `aot.py` compiles every kernel without a GPU.

The folder needs torch, Triton and `../errors.py` alone, so it can be published with `kernel-builder` as it stands: a
`build.toml` with `[general] name = "adaflash"` and `backends = ["cuda", "rocm"]` and `[torch-noarch]`, and this folder
with `errors.py` as `torch-ext/adaflash/`.
"""

from .dispatch import use_backend
from .greedy_verify import greedy_verify
from .ragged_attention import RaggedQueries, ragged_attention, ragged_attention_with_weights
from .sample_verify import draft_columns_of, sample_verify
from .survival_lengths import survival_lengths


__all__ = [
    "RaggedQueries",
    "draft_columns_of",
    "greedy_verify",
    "ragged_attention",
    "ragged_attention_with_weights",
    "sample_verify",
    "survival_lengths",
    "use_backend",
]
