"""Which implementation of a kernel runs: Triton for CUDA and ROCm tensors, the PyTorch twin for everything else.

Every public function of this package asks `takes_triton` once per call. `use_backend` overrides the answer, for tests
and for comparing the two; the twin is always a correct choice, on any device.
"""

import contextlib
import contextvars
import functools

import torch

from ..errors import AdaFlashError, AdaFlashValueError


KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_forced: contextvars.ContextVar[str | None] = contextvars.ContextVar("adaflash_kernel_backend", default=None)


@contextlib.contextmanager
def use_backend(name: str):
    """Forces "triton" or "torch" while open, in this thread. Triton on CPU tensors needs its interpreter.

    Raises:
        AdaFlashValueError: for another name.
    """
    if name not in ("triton", "torch"):
        raise AdaFlashValueError(f"backend is {name!r}: use 'triton' or 'torch'.")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def is_forced() -> bool:
    """Whether `use_backend` is open, so that the two implementations are to be compared."""
    return _forced.get() is not None


def takes_triton(tensor: torch.Tensor) -> bool:
    """Whether a call on this tensor runs the Triton kernel.

    float64 and other types that the kernels don't have go to the twin unless Triton is forced.

    Raises:
        AdaFlashError: when Triton should run and can't.
    """
    forced = _forced.get()
    on_gpu = tensor.device.type == "cuda"  # ROCm tensors say so too
    if forced == "torch" or (forced is None and not (on_gpu and tensor.dtype in KERNEL_DTYPES)):
        return False
    try:
        import triton
    except ImportError as error:
        raise AdaFlashError(
            "The kernels for GPU tensors need Triton: `pip install triton`, or open "
            '`adaflash_hf.kernels.use_backend("torch")` around the call.'
        ) from error
    if not on_gpu and not triton.knobs.runtime.interpret:
        raise AdaFlashError(
            f"Triton is forced on a {tensor.device.type} tensor: set TRITON_INTERPRET=1 before Python starts, or use "
            "the 'torch' backend."
        )
    if tensor.dtype not in KERNEL_DTYPES:
        raise AdaFlashValueError(f"The Triton kernels have no {tensor.dtype}: use float16, bfloat16 or float32.")
    return True


def on_its_device(launch):
    """Runs a function that launches kernels on the device of its first argument: Triton itself takes the current one,
    whatever device the tensors are on."""

    @functools.wraps(launch)
    def launched(first: torch.Tensor, *args, **kwargs):
        if first.device.type != "cuda":
            return launch(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return launch(first, *args, **kwargs)

    return launched


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors to keep busy; on a CPU (interpreter) 1, so that work is split as little as possible."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_splits(programs: int, size: int, block: int, device: torch.device) -> int:
    """Parts that `size` elements are split into, so that `programs` times the parts fill the device about four
    times over, while no part is under two blocks."""
    wanted = -(-4 * multiprocessors(device) // max(programs, 1))
    return max(1, min(wanted, size // (2 * block), 64))
