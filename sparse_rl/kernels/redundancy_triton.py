"""The similarities of redundancy.py in Triton, for keys in half precision.

Tiles of similarities are computed on the tensor cores and never stored in memory. The tensor cores multiply the keys as
the cache holds them, and add the exact products in float32. Norms are applied afterwards: normalising first would
round the keys to half precision again.

A cosine from 0.5 to 1 is a multiple of 2**-24. In this unit, sums of similarities are sums of integers, which are the
same in any order. So the result depends neither on the tiles, nor on the order of the atomic additions, nor on the
other rows of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128  # tokens per program
COLUMNS = 32  # tokens with which a program compares its tokens at a time; 127 cosines in UNITs sum to at most 32 bits
WARPS = 8
UNIT = tl.constexpr(2.0**24)


@triton.jit(do_not_specialize=["count"])
def _inverse_norms(keys, inverse, count, dim, ROWS: tl.constexpr, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, DIM)
    valid = (token < count)[:, None] & (place < dim)[None, :]
    key = tl.load(keys + token.to(tl.int64)[:, None] * dim + place[None, :], mask=valid, other=0.0).to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(key * key, 1))
    tl.store(inverse + token, tl.div_rn(1.0, tl.where(norm < 1e-8, 1e-8, norm)), mask=token < count)


@triton.jit(do_not_specialize=["heads", "width"])  # one kernel for all sizes except the head dimension
def _similarities(  # type: ignore[no-untyped-def]
    keys, inverse, positions, lengths, total, heads, width, dim,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Compute the similarities of a tile of tokens to all tokens, and add their sums to `total`, in units of 2**-24.

    The kernel sums the cosines of a row, the definition those of a column. Both sums are equal to the last bit, because
    a . b and b . a are added in the same order. The most recent similar token's cosine is subtracted afterwards.

    keys, inverse : [R, Hkv, N, dim], and float32 [R, Hkv, N], inverse norms of the keys
    positions, total : int64 [R, Hkv, N]
    """
    tiles = tl.cdiv(width, ROWS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    length = tl.load(lengths + row // heads).to(tl.int32)
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, DIM)[None, :]
    first = row * width
    keys += first * dim
    row_keys = tl.load(keys + i[:, None] * dim + place, mask=(i < length)[:, None] & (place < dim), other=0.0)
    row_inverse = tl.load(inverse + first + i, mask=i < length, other=0.0)
    sums = tl.zeros([ROWS], tl.int64)
    # position, slot and similarity of the most recent similar token
    newest = tl.full([ROWS], -1, tl.int32)
    slot = tl.zeros([ROWS], tl.int32)
    newest_units = tl.zeros([ROWS], tl.int32)
    for start in range(0, length, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        column_keys = tl.load(keys + j[:, None] * dim + place, mask=(j < length)[:, None] & (place < dim), other=0.0)
        column_inverse = tl.load(inverse + first + j, mask=j < length, other=0.0)
        position = tl.load(positions + first + j, mask=j < length, other=-1).to(tl.int32)
        cosine = tl.dot(row_keys, tl.trans(column_keys)) * (row_inverse[:, None] * column_inverse[None, :])
        similar = (cosine >= 0.5) & (i[:, None] != j[None, :])
        units = tl.where(similar, cosine * UNIT, 0.0).to(tl.int32)
        sums += tl.sum(units, 1)
        recent = tl.max(tl.where(similar, position[None, :], -1), 1)
        is_recent = similar & (position[None, :] == recent[:, None])
        newer = recent > newest
        slot = tl.where(newer, tl.sum(tl.where(is_recent, j[None, :], 0), 1), slot)
        newest_units = tl.where(newer, tl.sum(tl.where(is_recent, units, 0), 1), newest_units)
        newest = tl.where(newer, recent, newest)
    tl.atomic_add(total + first + i, sums, mask=i < length, sem="relaxed")
    tl.atomic_add(total + first + slot, -newest_units.to(tl.int64), mask=newest >= 0, sem="relaxed")


def total_similarity(keys: Tensor, positions: Tensor, lengths: Tensor) -> Tensor:
    """Return, for each entry, the sum of its similarities to the other entries (see redundancy.py).

    keys : [R, Hkv, N, D], bfloat16 or float16 on a GPU (or float16 under TRITON_INTERPRET=1)
    positions, lengths : int64 [R, Hkv, N] and int64 [R], the number of entries of each row

    Returns float32 [R, Hkv, N]. An entry whose key or norm is not finite gets NaN; padding gets arbitrary values.
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
