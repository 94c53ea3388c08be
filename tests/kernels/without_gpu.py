"""Run Triton kernels without a GPU in Triton's interpreter, or compile them and read the registers that they use.

Each program runs in a separate process: TRITON_INTERPRET is read when a kernel is defined, and excludes compilation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRINTS_RESOURCES = """
import os, re, subprocess, tempfile, triton
from triton.backends.compiler import GPUTarget
import compiling
from sparse_rl.kernels import {module} as kernels
tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
for generation in (80, 90):
    target = GPUTarget("cuda", generation, 32)
    for kernel in {kernels}:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        print(re.search(r"REG:.*", said.stdout + said.stderr).group(0), f"SHARED_BY_TRITON:{{kernel.metadata.shared}}")
"""


def run(program: str, **environment: str) -> str:
    """Return the output of a Python program that runs in a new process."""
    pytest.importorskip("triton")
    inherited = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    inherited |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}", **environment}
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=inherited, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


def resources_used(module: str, kernels: str, cache: Path) -> list[dict[str, int]]:
    """Return the resources (REG ...) of `kernels`, an expression in terms of `compiling`, `kernels` (the module) and
    `target`, compiled for sm_80 and sm_90. Spilled registers are LOCAL or on the STACK."""
    lines = run(PRINTS_RESOURCES.format(module=module, kernels=kernels), TRITON_CACHE_DIR=str(cache)).splitlines()
    pairs = [[pair.split(":") for pair in line.split() if ":" in pair] for line in lines]
    return [{name: int(number) for name, number in item if not name.startswith("CONSTANT")} for item in pairs]
