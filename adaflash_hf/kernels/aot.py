"""Compiles every kernel ahead of time, at the meta-parameters that the launchers choose for the reference shapes, and
reads registers and spills from the machine code. Needs Triton and no GPU, and must run without TRITON_INTERPRET.

Reference shapes: 64 rows of 16 packed tokens, V = 151,936; context 4,096 with 32 query and 8 key heads of size 128.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import greedy_verify_triton as greedy
from . import ragged_attention_triton as attention
from . import sample_verify_triton as sample
from . import survival_lengths_triton as lengths


TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ROWS, WIDTH, VOCAB_SIZE = 64, 16, 151_936
CONTEXT, HEADS, KV_HEADS, HEAD_DIM = 4096, 32, 8, 128
PLAIN = {"CAUSAL": True, "HAS_WINDOW": False, "HAS_SOFTCAP": False, "HAS_SINKS": False}
BLOCK = {**PLAIN, "CAUSAL": False}
ALL_OPTIONS = dict.fromkeys(PLAIN, True)
_TRITON_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass
class Variant:
    """A kernel with the types of its arguments (`name: type`, i32 where left out) and its meta-parameters."""

    name: str
    kernel: triton.JITFunction
    types: dict[str, str]
    constants: dict[str, object]
    options: dict[str, int] = field(default_factory=dict)


@dataclass
class Usage:
    """What a compiled kernel uses: registers per thread, bytes per thread in local memory (spills), shared bytes."""

    registers: int
    spills: int
    shared: int


def attention_variant(name: str, dtype: torch.dtype, flags: dict[str, bool], head_dim: int = HEAD_DIM) -> Variant:
    """The attention kernel with some of its options."""
    x, f, i = "*" + _TRITON_NAMES[dtype], "*fp32", "*i64"
    types = {"query": x, "key": x, "value": x, "output": x, "sums": f, "offsets": i, "positions": i, "block_ends": i}
    types |= {"sinks": x, "scale": "fp32", "softcap": "fp32"}
    blocks = attention.block_sizes(dtype, HEADS // KV_HEADS, WIDTH, head_dim)
    constants = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_D"), blocks, strict=True))
    constants |= {"GROUPS": HEADS // KV_HEADS, "D": head_dim, **flags}
    options = {"num_warps": attention.NUM_WARPS, "num_stages": attention.NUM_STAGES, "enable_fp_fusion": True}
    return Variant(name, attention.ragged_attention_kernel, types, constants, options)


def variants(dtype: torch.dtype) -> list[Variant]:
    """Every kernel for scores, queries and keys of one dtype, with what the launchers choose."""
    x, f, i, j = "*" + _TRITON_NAMES[dtype], "*fp32", "*i64", "*i32"
    best = {"best_values": f, "best_ids": j}
    heat = {"temperature": "fp32", "draft_temperature": "fp32"}
    sampled = {"scores": x, "sums": f, "draft_scores": x, "draft_sums": f, "draft_columns": j, "tokens": i}
    sampled |= {"offsets": i, "draft_rows": i, "accepted": i, **best, **heat}
    flags = {"HAS_DRAFT_SCORES": True, "HAS_COLUMNS": True, "BLOCK_S": 1, "DRAFT_BLOCK_S": 1}
    rows = {"tokens": i, "offsets": i, "accepted": i, "bonus": i}
    one, eight = {"num_warps": 1}, {"num_warps": 8}
    return [
        Variant("argmax", greedy.argmax_kernel, {"scores": x, **best}, {"BLOCK": greedy.BLOCK_V}, eight),
        Variant(
            "accept_argmax",
            greedy.accept_argmax_kernel,
            {**best, **rows},
            {"BLOCK_K": greedy.BLOCK_K, "BLOCK_S": 1},
            one,
        ),
        Variant(
            "logsumexp",
            sample.logsumexp_kernel,
            {"scores": x, "sums": f, "temperature": "fp32"},
            {"BLOCK": sample.BLOCK_V},
            {**eight, **sample.EXACT},
        ),
        Variant(
            "accept_sampled",
            sample.accept_sampled_kernel,
            sampled,
            {**flags, "BLOCK_K": sample.BLOCK_K},
            {**one, **sample.EXACT},
        ),
        Variant(
            "race",
            sample.race_kernel,
            sampled,
            {**flags, "BLOCK": sample.BLOCK_RACE},
            {**eight, **sample.EXACT},
        ),
        Variant("winner", sample.winner_kernel, {**best, "bonus": i}, {"BLOCK": 8}, one),
        attention_variant("ragged_attention", dtype, PLAIN),
        Variant(
            "join_parts",
            attention.join_parts_kernel,
            {"parts": f, "sums": f, "output": x},
            {"D": HEAD_DIM, "BLOCK_S": 16, "BLOCK_D": HEAD_DIM},
            one,
        ),
        Variant(
            "survival rates",
            lengths.rates_kernel,
            {"survival": f, "costs": f, "room": i, "rates": "*fp64", "taken": j},
            {"SIZE": ROWS * WIDTH, "BLOCK_R": ROWS, "BLOCK_I": lengths.BLOCK_I, "BLOCK_J": lengths.BLOCK_J},
        ),
        Variant(
            "survival choice",
            lengths.choose_kernel,
            {"rates": "*fp64", "taken": j, "costs": f, "lengths": i},
            {"BLOCK_R": ROWS, "BLOCK_K": WIDTH},
        ),
    ]


def usage(variant: Variant, target: GPUTarget) -> Usage:
    """Compiles a variant for a target."""
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in names}
    # As at a launch: pointers are aligned, and the strides of these shapes are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or "stride" in name
    }
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=target, options=variant.options)
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        # Scalar registers spill into lanes of vector registers, which costs no memory traffic and isn't counted.
        vector, scratch = (
            int(re.search(rf"\.{key}:\s*(\d+)", text)[1]) for key in ("vgpr_count", "private_segment_fixed_size")
        )
        return Usage(vector, scratch, compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.backends.__file__).parent / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    found = {key: int(number) for key, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], compiled.metadata.shared)
