"""The similarities of redundancy.py in Triton: tiles on the tensor cores, never written to memory; for half precision.

The products are of the keys as the cache holds them, in bfloat16 or float16: exact in float32, in which they are added.
The norms come after. So nothing is rounded that float32 does not round, though the tensor cores do the work; keys that
were normalised first would have to be rounded to half precision again.

A cosine from 0.5 to 1 is a multiple of 2**-24. Counted in these, sums are of whole numbers: the same in any order, so
that neither the tiles nor the atomic additions show in the result, nor what else is in the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128  # tokens of a program
COLUMNS = 32  # others at a time; the units of 1 of up to 127 fit into 32 bits
WARPS = 8
UNIT = tl.constexpr(2.0**24)


@triton.jit(do_not_specialize=["count"])
def _inverse_norms(keys, inverse, count, dim, ROWS: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """keys [count, dim] -> 1 / |key|, float32 [count]."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, DIM)
    real = (token < count)[:, None] & (place < dim)[None, :]
    key = tl.load(keys + token.to(tl.int64)[:, None] * dim + place[None, :], mask=real, other=0.0).to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(key * key, 1))
    tl.store(inverse + token, tl.div_rn(1.0, tl.where(norm < 1e-8, 1e-8, norm)), mask=token < count)


@triton.jit(do_not_specialize=["heads", "width"])  # one kernel for all sizes but the heads' own
def _similarities(  # type: ignore[no-untyped-def]
    keys, inverse, positions, lengths, total, heads, width, dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Add to `total`, int64 [R, Hkv, N], what a tile of tokens is similar to others.

    The sum over its columns is that over its rows: a . b is b . a to the last bit, where both are added in one order.

    keys [R, Hkv, N, dim]; inverse float32, positions int64 [R, Hkv, N]; lengths int64 [R]
    """
    tiles = tl.cdiv(width, ROWS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    length = tl.load(lengths + row // heads).to(tl.int32)
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, DIM)[None, :]
    first = row * width
    keys += first * dim
    own = tl.load(keys + i[:, None] * dim + place, mask=(i < length)[:, None] & (place < dim), other=0.0)
    own_inverse = tl.load(inverse + first + i, mask=i < length, other=0.0)
    sums = tl.zeros([ROWS], tl.int64)
    newest = tl.full([ROWS], -1, tl.int32)  # the position of the most recent of the similar tokens, its slot, and
    slot = tl.zeros([ROWS], tl.int32)
    shared = tl.zeros([ROWS], tl.int32)  # how similar it is
    for start in range(0, length, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        other = tl.load(keys + j[:, None] * dim + place, mask=(j < length)[:, None] & (place < dim), other=0.0)
        other_inverse = tl.load(inverse + first + j, mask=j < length, other=0.0)
        position = tl.load(positions + first + j, mask=j < length, other=-1).to(tl.int32)
        cosine = tl.dot(own, tl.trans(other)) * (own_inverse[:, None] * other_inverse[None, :])
        similar = (cosine >= 0.5) & (i[:, None] != j[None, :])
        units = tl.where(similar, cosine * UNIT, 0.0).to(tl.int32)
        sums += tl.sum(units, 1)
        recent = tl.max(tl.where(similar, position[None, :], -1), 1)
        it = similar & (position[None, :] == recent[:, None])
        better = recent > newest
        slot = tl.where(better, tl.sum(tl.where(it, j[None, :], 0), 1), slot)
        shared = tl.where(better, tl.sum(tl.where(it, units, 0), 1), shared)
        newest = tl.where(better, recent, newest)
    tl.atomic_add(total + first + i, sums, mask=i < length, sem="relaxed")
    tl.atomic_add(total + first + slot, -shared.to(tl.int64), mask=newest >= 0, sem="relaxed")


def total_similarity(keys: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
    """float32 [R, Hkv, N]: per entry, the sum of its similarities to the others, as in redundancy.py.

    keys [R, Hkv, N, D] bfloat16 or float16, on a GPU (or float16 under TRITON_INTERPRET=1); positions int64
    [R, Hkv, N]; lengths int64 [R]. An entry whose key or norm is not finite gets NaN; padding gets anything.
    """
    rows, heads, width, dim = keys.shape
    keys, positions = keys.contiguous(), positions.contiguous()
    wide = {"DIM": max(16, triton.next_power_of_2(dim)), "num_warps": WARPS}
    inverse = torch.empty(positions.shape, dtype=torch.float32, device=keys.device)
    total = torch.zeros_like(positions)
    count = inverse.numel()
    _inverse_norms[triton.cdiv(count, COLUMNS),](keys, inverse, count, dim, ROWS=COLUMNS, **wide)
    grid = (rows * heads * triton.cdiv(width, ROWS),)
    arguments = keys, inverse, positions, lengths, total, heads, width, dim
    _similarities[grid](*arguments, ROWS=ROWS, COLUMNS=COLUMNS, **wide)
    return (total * (1 / UNIT.value)).masked_fill_(~(inverse > 0), float("nan"))


def compiled(target: Any, dim: int, dtype: str = "bf16") -> list[Any]:
    """Both kernels for heads of `dim`, compiled for a triton.backends.compiler.GPUTarget, without that GPU."""
    from triton.compiler import ASTSource

    types = {
        "keys": f"*{dtype}", "inverse": "*fp32", "positions": "*i64", "lengths": "*i64", "total": "*i64",
        **dict.fromkeys(("count", "heads", "width", "dim"), "i32"),
    }  # fmt: skip
    found = []
    for kernel, rows in ((_inverse_norms, COLUMNS), (_similarities, ROWS)):
        names = enumerate(kernel.arg_names)
        divisible = {
            (i,): [["tt.divisibility", 16]] for i, name in names if types.get(name, "")[:1] == "*" or name == "dim"
        }
        sizes = {"ROWS": rows, "COLUMNS": COLUMNS, "DIM": max(16, triton.next_power_of_2(dim))}
        sizes = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs=sizes, attrs=divisible)
        found.append(triton.compile(source, target=target, options={"num_warps": WARPS}))
    return found
