"""Compile our Triton kernels for a GPU that need not be present, and read what a compiled kernel uses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparse_rl.kernels import redundancy_triton, topk_triton

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
LIMITS = {"REG": 255, "STACK": 0, "LOCAL": 0, "SHARED": 227 * 1024}  # of Hopper (sm_90); spills are on STACK or LOCAL


def usage(compiled: Any) -> dict[str, int]:
    """Return a compiled kernel's registers per thread, and the bytes that it spills and shares."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        output = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True)
    numbers = re.findall(r"(REG|STACK|LOCAL):(\d+)", output.stdout + output.stderr)
    return {name: int(number) for name, number in numbers} | {"SHARED": compiled.metadata.shared}


def exceeded(used: dict[str, int]) -> set[str]:
    return {name for name, limit in LIMITS.items() if used[name] > limit}


def topk(generation: int = 90) -> list[dict[str, int]]:
    pointers = ("ranks", "before", "moved", "zeros", "held", "wanted", "answers")
    types = {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(("width", "queries", "bit"), "i32")}
    sizes = {"BLOCK": topk_triton.BLOCK}
    return [_used_by(topk_triton._level, generation, types, sizes, topk_triton.WARPS)]


def redundancy(dim: int, dtype: str = "bf16", generation: int = 90) -> list[dict[str, int]]:
    """Return what each of the two kernels uses for keys of `dim` numbers."""
    types = {
        **{"keys": f"*{dtype}", "inverse": "*fp32", "positions": "*i64", "lengths": "*i64", "total": "*i64"},
        **dict.fromkeys(("count", "heads", "width", "dim"), "i32"),
    }
    used = []
    for kernel, rows in (
        (redundancy_triton._inverse_norms, redundancy_triton.COLUMNS),
        (redundancy_triton._similarities, redundancy_triton.ROWS),
    ):
        # what Triton finds in the arguments of a call: pointers are multiples of 16, and `dim` may be one
        divisible = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if types.get(name, "").startswith("*") or (name == "dim" and dim % 16 == 0)
        }
        sizes = {"ROWS": rows, "COLUMNS": redundancy_triton.COLUMNS, "DIM": max(16, triton.next_power_of_2(dim))}
        sizes = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        used.append(_used_by(kernel, generation, types, sizes, redundancy_triton.WARPS, divisible))
    return used


def _used_by(
    kernel: Any, generation: int, types: dict[str, str], sizes: dict[str, int], warps: int, attrs: Any = None
) -> dict[str, int]:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=sizes, attrs=attrs)
    target = GPUTarget("cuda", generation, 32)
    return usage(triton.compile(source, target=target, options={"num_warps": warps}))
