"""What a verify pass and a draft cost on the user's own machine, measured once per target, drafter, device and dtype.

`measure` runs passes for about two seconds and stores what it saw in the Hugging Face cache folder. Within a call
of `generate` the costs are fixed, so that the same seed gives the same choices.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import cached_assets_path
from transformers import PreTrainedModel

from ..hub import replace_text


# Sizes in the order in which they are measured. One token is a case of its own (a matrix times a vector), so two come
# next; then straight lines over a wide range, which err less than a narrow range that is extrapolated.
TOKENS = (1, 2, 4, 16, 64, 256, 3, 8, 32, 128, 512)
ROWS = (1, 4, 16, 64, 2, 8, 32)
SECONDS = 2.0
# Rounds over the sizes that take less than `QUICK` times as long as the smallest, if there is time for so many.
ROUNDS, QUICK = 16, 4
SHORT, LONG = 64, 1024
# Counts up when costs are measured in another way, so that those stored before are measured anew.
METHOD = 5
# The cached costs are thrown away when passes take this many times as long, or as short, as they say.
WRONG = 1.5


@dataclasses.dataclass
class CostModel:
    """Seconds of a pass, linear between measured sizes and beyond them.

    Attributes:
        tokens, verify: packed tokens of a target pass and their seconds, both rising.
        rows, draft: blocks of a drafter pass and their seconds, both rising.
        slot_verify, slot_draft: seconds per cached position that a pass reads, over all rows.
        catch_up: seconds per committed token that the drafter reads late.
    """

    tokens: list[int]
    verify: list[float]
    rows: list[int]
    draft: list[float]
    slot_verify: float = 0.0
    slot_draft: float = 0.0
    catch_up: float = 0.0

    def verify_seconds(self, first: int, last: int, slots: int) -> np.ndarray:
        """Seconds of target passes over `first` to `last` packed tokens, `[last - first + 1]`."""
        return _between(np.arange(first, last + 1), self.tokens, self.verify) + slots * self.slot_verify

    def draft_seconds(self, rows: int | np.ndarray, context: int, slots: int, share: float = 1.0) -> np.ndarray:
        """Seconds of a drafter pass over `rows` blocks that also reads `context` committed tokens; for an array of
        `rows`, of a pass over so many each. Of each block only a `share` of its slots is drafted: taken to cost what
        so many fewer whole blocks do, though never less than one. Two committed tokens are part of a block's cost."""
        blocks = np.asarray(rows) * share
        late = np.maximum(0, context - 2 * blocks)
        return _between(blocks, self.rows, self.draft) + late * self.catch_up + slots * self.slot_draft


def _between(sizes: np.ndarray, measured: list[int], seconds: list[float]) -> np.ndarray:
    """Linear between measured sizes; past the last at the last slope."""
    inside = np.interp(sizes, measured, seconds)
    if len(measured) < 2:
        return inside * np.maximum(sizes / measured[-1], 1.0)
    slope = (seconds[-1] - seconds[-2]) / (measured[-1] - measured[-2])
    return inside + np.maximum(sizes - measured[-1], 0) * slope


def measure(
    verify: Callable[[list[int], int], None], draft: Callable[[int, int, int], None], most: float = SECONDS
) -> CostModel:
    """Times passes, after a first one, which wakes the device.

    Args:
        verify: runs one target pass of `counts[r]` tokens for row r, each row at the given position.
        draft: runs one drafter pass of so many blocks, late tokens per row, at the given position.
        most: seconds that this may take, about.
    """
    verify([1], SHORT)
    start = time.perf_counter()
    tokens, seconds = _rising(TOKENS, lambda n: verify(_counts(n), SHORT), start + 0.6 * most)
    rows, drafts = _rising(ROWS, lambda n: draft(n, 2, SHORT), start + 0.75 * most)
    slots, until = 2 * (LONG - SHORT), start + 0.75 * most
    return CostModel(
        tokens,
        seconds,
        rows,
        drafts,
        _difference(lambda: verify([1, 1], LONG), lambda: verify([1, 1], SHORT), until) / slots,
        _difference(lambda: draft(2, 2, LONG), lambda: draft(2, 2, SHORT), until) / slots,
        _difference(lambda: draft(1, LONG // 2, SHORT), lambda: draft(1, 2, SHORT), until) / (LONG // 2 - 2),
    )


def _counts(tokens: int) -> list[int]:
    """Tokens per row of a pass of such a size: a few come from one row, many from rows of unlike lengths."""
    if tokens < 16:
        return [tokens]
    pairs = min(8, tokens // 4)
    return [tokens // pairs // 4, tokens // pairs * 3 // 4] * pairs


def _difference(longer: Callable[[], None], shorter: Callable[[], None], until: float) -> float:
    """Seconds that one run takes more than another, at least 0: the best of up to 3 each, taken in turn, since a small
    difference of noisy times would be all noise."""
    longer()  # grows the cache
    best = [float("inf"), float("inf")]
    for turn in range(3):
        if turn > 0 and time.perf_counter() > until:
            break
        for i, run in enumerate((longer, shorter)):
            best[i] = min(best[i], _timed(run))
    return max(0.0, best[0] - best[1])


def _timed(run: Callable[[], None]) -> float:
    """Seconds of a run, the best of up to 3, fewer where one takes long."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < 3 and sum(seconds) < SECONDS / 40):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _rising(sizes: tuple[int, ...], run: Callable[[int], None], until: float) -> tuple[list[int], list[float]]:
    """Sizes that there was time for, at least two, and their seconds.

    The first pass of a size prepares kernels and memory (on a CPU it takes up to six times as long), so it isn't
    timed. What time is left goes into the sizes that take least, in turn: what matters is what one costs beside
    another, and a machine that others use too is slower in one second than in the next. Medians count, and no size
    takes longer than a larger one.
    """
    seconds: dict[int, list[float]] = {}

    def expected(size: int) -> float:
        known = sorted(seconds)
        return float(_between(np.array([size]), known, [float(np.median(seconds[n])) for n in known])[0])

    for size in sizes:
        if len(seconds) < 2 or time.perf_counter() + 2 * expected(size) < until:
            run(size)
            seconds[size] = [_timed(functools.partial(run, size))]
    done = sorted(seconds)
    quick = [size for size in done if seconds[size][0] < QUICK * seconds[done[0]][0]]
    for size in quick * ROUNDS:
        if time.perf_counter() + expected(size) < until:
            seconds[size].append(_timed(functools.partial(run, size)))
    medians = [float(np.median(seconds[size])) for size in reversed(done)]
    return done, np.minimum.accumulate(medians)[::-1].tolist()


def describe(target: PreTrainedModel, drafter: PreTrainedModel) -> dict[str, str]:
    """What the costs depend on; equal descriptions share stored costs."""
    device, policy = target.device, drafter.generation_config
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type} {name}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "target": _digest(target),
        "drafter": _digest(drafter),
        "policy": f"context_window {policy.context_window}, num_assistant_tokens {policy.num_assistant_tokens}",
        "method": str(METHOD),
    }


def _digest(model: PreTrainedModel) -> str:
    """Class, dtype, sizes and kinds of modules (packed, quantised, adapted)."""
    kinds = sorted({type(module).__qualname__ for module in model.modules()})
    config = {key: value for key, value in model.config.to_dict().items() if key not in ("_name_or_path", "dtype")}
    whole = json.dumps([type(model).__qualname__, str(model.dtype), kinds, config], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


_measured: dict[str, CostModel] = {}


def _path(description: dict[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]
    return cached_assets_path("adaflash_hf", namespace="costs") / f"{digest}.json"


def load_costs(description: dict[str, str], measure_costs: Callable[[], CostModel], anew: bool = False) -> CostModel:
    """The costs of this process, else the stored ones, else, or when wanted `anew`, new ones. A cache folder that
    can't be written is no reason to fail: the costs then last as long as the process."""
    key = json.dumps(description, sort_keys=True)
    if anew:
        forget_costs(description)
    if key not in _measured:
        try:
            _measured[key] = CostModel(**json.loads(_path(description).read_text(encoding="utf-8"))["costs"])
        except (OSError, ValueError, TypeError, KeyError):
            _measured[key] = measure_costs()
            with contextlib.suppress(OSError):
                _store(description, _measured[key])
    return _measured[key]


def forget_costs(description: dict[str, str]) -> None:
    """Drops costs that proved wrong; the next call measures anew."""
    _measured.pop(json.dumps(description, sort_keys=True), None)
    with contextlib.suppress(OSError):
        _path(description).unlink()


def _store(description: dict[str, str], costs: CostModel) -> None:
    replace_text(_path(description), json.dumps({**description, "costs": dataclasses.asdict(costs)}, indent=2))
