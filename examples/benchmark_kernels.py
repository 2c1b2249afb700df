"""The verify path's kernels: what they must move and compute, what that costs at least, and what they use.

    python examples/benchmark_kernels.py
    python examples/benchmark_kernels.py --targets sm_90 --dtype float32

Counts bytes and operations at 64 rows of 16 packed tokens, V = 151,936, a context of 4,096 slots with 32 query and 8
key heads of size 128, and compiles every kernel for each target to read registers and spills: no GPU is needed.
On a GPU it also measures each kernel and its PyTorch twin against the floor; without one it measures nothing.
"""

import argparse
import os

import torch


# The compiled kernels are examined, not the interpreted ones.
os.environ.pop("TRITON_INTERPRET", None)

from adaflash_hf.kernels import (  # noqa: E402
    RaggedQueries,
    greedy_verify,
    ragged_attention,
    sample_verify,
    survival_lengths,
    use_backend,
)


ROWS, WIDTH, VOCAB_SIZE = 64, 16, 151_936
CONTEXT, HEADS, KV_HEADS, HEAD_DIM = 4096, 32, 8, 128
TOKENS, DRAFTS = ROWS * WIDTH, ROWS * (WIDTH - 1)
# Copy bandwidth and dense bfloat16 rate of an H200.
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.3e12, 790e12


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--targets", nargs="*", help="sm_80, sm_90, sm_100, gfx942; all by default, none to skip.")
    parser.add_argument("--repeats", type=int, default=20, help="Timed runs of each kernel, on a GPU.")
    return parser.parse_args()


def counts(dtype: torch.dtype) -> dict[str, tuple[float, float, float]]:
    """Per kernel: bytes that must move (inputs once, results once), operations, and bytes that the kernels move.

    Splits are those of 132 multiprocessors at these shapes: nine for the race, none elsewhere.
    """
    size = dtype.itemsize
    row = VOCAB_SIZE * size
    ids = TOKENS * 8 + (ROWS + 1) * 8 + 2 * ROWS * 8
    partial = 2 * TOKENS * 8  # a value and an id per token, written and read
    greedy = TOKENS * row + ids, 2.0 * TOKENS * VOCAB_SIZE, TOKENS * row + ids + partial

    # Per score: scale, compare, exponential, add. The race reads one row of p and one of q again per sequence, and
    # spends about 35 operations on the noise of a token (Philox) and 10 on the token.
    scores = (TOKENS + DRAFTS) * row
    sampled_ops = 5.0 * (TOKENS + DRAFTS) * VOCAB_SIZE + 45.0 * ROWS * VOCAB_SIZE
    sampled = scores + ids, sampled_ops, scores + 2 * ROWS * row + ids + 2 * (TOKENS + DRAFTS) * 4 + 2 * ROWS * 9 * 16

    cache = 2 * ROWS * KV_HEADS * CONTEXT * HEAD_DIM * size
    packed = 2 * TOKENS * HEADS * HEAD_DIM * size
    tiles = 1 if size == 2 else 4  # the heads and queries of a row that share a key head: 64 in a tile, or 16
    attention_ops = 4.0 * TOKENS * HEADS * CONTEXT * HEAD_DIM
    attention = cache + packed, attention_ops, tiles * cache + packed + TOKENS * HEADS * 4

    positions = ROWS * (WIDTH - 1)
    lengths = 4.0 * positions + 4 * (TOKENS + 1) + 16 * ROWS
    rates = 1024 * 12 * 2  # a rate and a count per padded position, written and read
    # Sorting would be the least; the kernel compares every position with every other: 4 operations each, 4 M in all.
    sort = 5.0 * positions + positions * 10
    return {
        "greedy_verify": greedy,
        "sample_verify": sampled,
        "ragged_attention": attention,
        "survival_lengths": (lengths, sort, lengths + rates + 32 * 4 * positions),
    }


def floor_seconds(moved: float, operations: float) -> float:
    return max(moved / BYTES_PER_SECOND, operations / FLOPS_PER_SECOND)


def calls(dtype: torch.dtype, device: torch.device) -> dict:
    """The calls to time, at the reference shapes."""
    offsets = torch.arange(ROWS + 1, device=device) * WIDTH
    scores = torch.randn(TOKENS, VOCAB_SIZE, device=device, dtype=dtype)
    draft_scores = torch.randn(DRAFTS, VOCAB_SIZE, device=device, dtype=dtype)
    tokens = torch.randint(VOCAB_SIZE, (TOKENS,), device=device)
    rows = torch.arange(ROWS, device=device).repeat_interleave(WIDTH)
    positions = torch.arange(CONTEXT - WIDTH, CONTEXT, device=device).repeat(ROWS)
    queries = RaggedQueries(rows, positions, ROWS, CONTEXT, [WIDTH] * ROWS)
    query = torch.randn(TOKENS, HEADS, HEAD_DIM, device=device, dtype=dtype)
    key, value = (torch.randn(ROWS, KV_HEADS, CONTEXT, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    survival = torch.rand(ROWS, WIDTH - 1, device=device).cumprod(1)
    costs = 20.0 + torch.arange(TOKENS + 1.0, device=device)
    return {
        "greedy_verify": lambda: greedy_verify(scores, tokens, offsets),
        "sample_verify": lambda: sample_verify(scores, tokens, offsets, 1, draft_scores=draft_scores),
        "ragged_attention": lambda: ragged_attention(query, key, value, queries),
        "survival_lengths": lambda: survival_lengths(survival, costs),
    }


def milliseconds(call, repeats: int) -> float:
    """Median time on the device; every run starts with a cold L2 cache."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    times = []
    for run in range(repeats + 3):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if run >= 3:
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def print_counts(dtype: torch.dtype) -> None:
    print(
        f"{ROWS} rows of {WIDTH} tokens, V = {VOCAB_SIZE}, context {CONTEXT}, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}"
    )
    print(f"{dtype}; floor at {BYTES_PER_SECOND / 1e12} TB/s and {FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s (H200)\n")
    print("| kernel | must move | operations | floor | bound by | moves, counted | over the least |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for name, (least, operations, moved) in counts(dtype).items():
        bound = "memory" if least / BYTES_PER_SECOND > operations / FLOPS_PER_SECOND else "arithmetic"
        print(
            f"| {name} | {least / 1e6:.3f} MB | {operations / 1e9:.3f} G | "
            f"{floor_seconds(least, operations) * 1e6:.3f} us | {bound} | {moved / 1e6:.3f} MB | {moved / least:.3f} |"
        )


def print_usage(dtype: torch.dtype, names: list[str] | None) -> None:
    from adaflash_hf.kernels.aot import TARGETS, usage, variants

    names = list(TARGETS) if names is None else names
    if not names:
        return
    print("\nCompiled ahead of time: registers per thread / spilled bytes per thread / shared bytes per block\n")
    print("| kernel | " + " | ".join(names) + " |")
    print("| --- |" + " ---: |" * len(names))
    for variant in variants(dtype):
        used = [usage(variant, TARGETS[name]) for name in names]
        print(f"| {variant.name} | " + " | ".join(f"{u.registers} / {u.spills} / {u.shared}" for u in used) + " |")


def print_times(dtype: torch.dtype, repeats: int) -> None:
    if not torch.cuda.is_available():
        print("\nNo GPU here: nothing was timed, and no speed is claimed.")
        return
    device = torch.device("cuda")
    print(f"\nMeasured on {torch.cuda.get_device_name(device)}, median of {repeats}\n")
    print("| kernel | Triton | times the H200 floor | torch twin | twin / Triton |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, call in calls(dtype, device).items():
        least, operations, _ = counts(dtype)[name]
        with use_backend("triton"):
            ours = milliseconds(call, repeats)
        with use_backend("torch"):
            twin = milliseconds(call, repeats)
        ratio = ours / (floor_seconds(least, operations) * 1e3)
        print(f"| {name} | {ours:.3f} ms | {ratio:.2f} | {twin:.3f} ms | {twin / ours:.2f} |")


def main():
    arguments = parse_arguments()
    dtype = getattr(torch, arguments.dtype)
    print_counts(dtype)
    print_usage(dtype, arguments.targets)
    print_times(dtype, arguments.repeats)


if __name__ == "__main__":
    main()
