"""Functions run in forked processes: no imports to wait for, and SIGKILL hits nothing but them."""

import multiprocessing
import os
import socket
import threading

from accelerate.state import AcceleratorState, GradientState, PartialState
from tqdm import tqdm


_context = multiprocessing.get_context("fork")


def _run(function, args, environment):
    # tqdm's own lock is shared by all forks: one killed while it holds it would stop the others for good.
    tqdm.set_lock(threading.RLock())
    os.environ.update(environment)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    function(*args)


def start(function, *args, **environment):
    process = _context.Process(target=_run, args=(function, args, environment))
    process.start()
    return process


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def together(count: int, function, *args, **environment) -> None:
    """Runs `function` as ranks of one gloo group, with the environment that `accelerate launch` sets."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count), **environment}
    ranks = [
        start(function, *args, ACCELERATE_USE_CPU="true", RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(count)
    ]
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * count
