"""The kernels run in Triton's interpreter (`tests/conftest.py` sets it), or compiled where there is a GPU."""

import pytest
import torch

from adaflash_hf.kernels import use_backend


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def both():
    """Results of a kernel function by the torch twin and by Triton."""

    def run(function, *args, **kwargs):
        results = []
        for name in ("torch", "triton"):
            with use_backend(name):
                results.append(function(*args, **kwargs))
        return results

    return run
