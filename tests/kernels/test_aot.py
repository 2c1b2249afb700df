"""Every kernel compiles ahead of time for each target, without spilling registers. In a process of its own, because
the tests run Triton's interpreter."""

import os
import subprocess
import sys

import pytest


CODE = """
import sys, torch
from adaflash_hf.kernels.aot import TARGETS, usage, variants
target = sys.argv[1]
for variant in variants(torch.bfloat16):
    used = usage(variant, TARGETS[target])
    print("RESULT", target, variant.name, used.registers, used.spills, sep="|")
"""


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_no_spills(target):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", CODE, target], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line.split("|") for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 9 and all(int(registers) > 0 for *_, registers, _ in lines)
    assert not [name for _, _, name, _, spills in lines if int(spills)]
