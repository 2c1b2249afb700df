"""Which implementation runs, and what is said when it can't."""

import sys

import pytest
import torch

from adaflash_hf import AdaFlashError, AdaFlashValueError
from adaflash_hf.kernels import dispatch, use_backend


class GpuTensor:
    """What the dispatch looks at; no GPU is needed to test its choice."""

    device = torch.device("cuda")

    def __init__(self, dtype=torch.bfloat16):
        self.dtype = dtype


def test_choice():
    assert dispatch.takes_triton(GpuTensor())
    assert not dispatch.takes_triton(GpuTensor(torch.float64))
    assert not dispatch.takes_triton(torch.zeros(1))
    with use_backend("torch"):
        assert not dispatch.takes_triton(GpuTensor())
        with use_backend("triton"):
            assert dispatch.takes_triton(GpuTensor())
            with pytest.raises(AdaFlashValueError, match="float64"):
                dispatch.takes_triton(GpuTensor(torch.float64))
        assert not dispatch.takes_triton(GpuTensor())
    with pytest.raises(AdaFlashValueError, match="'triton' or 'torch'"), use_backend("cuda"):
        pass


def test_missing_triton_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(AdaFlashError, match="pip install triton"):
        dispatch.takes_triton(GpuTensor())
    assert not dispatch.takes_triton(torch.zeros(1))


def test_cpu_tensors_need_the_interpreter(monkeypatch):
    import triton

    with use_backend("triton"):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
        assert dispatch.takes_triton(torch.zeros(1))
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        with pytest.raises(AdaFlashError, match="TRITON_INTERPRET=1"):
            dispatch.takes_triton(torch.zeros(1))


def test_splits_fill_the_device(monkeypatch):
    monkeypatch.setattr(dispatch, "multiprocessors", lambda device: 132)
    cuda = torch.device("cuda")
    assert dispatch.num_splits(1024, 151_936, 4096, cuda) == 1
    assert dispatch.num_splits(16, 151_936, 4096, cuda) == 18
    assert dispatch.num_splits(1, 31, 4096, cuda) == 1
    assert dispatch.num_splits(1, 10**9, 4096, cuda) == 64
