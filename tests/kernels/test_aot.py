"""Every kernel compiles ahead of time for each target, without spilling registers. In a process of its own, because
the tests run Triton's interpreter."""

import os
import subprocess
import sys


CODE = """
import torch
from adaflash_hf.kernels.aot import TARGETS, usage, variants
for variant in variants(torch.bfloat16):
    for target in TARGETS:
        used = usage(variant, TARGETS[target])
        print("RESULT", target, variant.name, used.registers, used.spills, sep="|")
"""


def test_no_spills():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line.split("|")[1:] for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 4 * 10 and {target for target, *_ in lines} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert all(int(registers) > 0 for _, _, registers, _ in lines)
    assert not [(name, target) for target, name, _, spills in lines if int(spills)]
