"""Compile the Triton kernels for a GPU that need not be present; `target` is a triton.backends.compiler.GPUTarget."""

from __future__ import annotations

from typing import Any

import triton
from triton.compiler import ASTSource

from sparse_rl.kernels import redundancy_triton, topk_triton


def topk(target: Any) -> list[Any]:
    pointers = ("ranks", "before", "moved", "zeros", "held", "wanted", "answers")
    types = {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(("width", "queries", "bit"), "i32")}
    return [_compiled(topk_triton._level, target, types, {"BLOCK": topk_triton.BLOCK}, topk_triton.WARPS)]


def redundancy(target: Any, dim: int) -> list[Any]:
    types = {
        **{"keys": "*bf16", "inverse": "*fp32", "positions": "*i64", "lengths": "*i64", "total": "*i64"},
        **dict.fromkeys(("count", "heads", "width", "dim"), "i32"),
    }
    kernels = []
    for kernel, rows in (
        (redundancy_triton._inverse_norms, redundancy_triton.COLUMNS),
        (redundancy_triton._similarities, redundancy_triton.ROWS),
    ):
        names = enumerate(kernel.arg_names)
        divisible = {
            (i,): [["tt.divisibility", 16]] for i, name in names if types.get(name, "")[:1] == "*" or name == "dim"
        }
        sizes = {"ROWS": rows, "COLUMNS": redundancy_triton.COLUMNS, "DIM": max(16, triton.next_power_of_2(dim))}
        sizes = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        kernels.append(_compiled(kernel, target, types, sizes, redundancy_triton.WARPS, divisible))
    return kernels


def _compiled(
    kernel: Any, target: Any, types: dict[str, str], sizes: dict[str, int], warps: int, attrs: Any = None
) -> Any:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=sizes, attrs=attrs)
    return triton.compile(source, target=target, options={"num_warps": warps})
