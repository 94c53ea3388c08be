"""The descent of topk.py as one Triton kernel: the k-th smallest of every prefix, one program per row.

A row does not fit into registers, so a level of the wavelet matrix takes it block by block, twice: count the zeros
before each place; then move every rank to its half, and send every query after its answer. What stands between the two
passes is in global memory (28 bytes a token), small enough for the L2 cache, and behind a barrier.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096  # of 16,384 the registers spill


@triton.jit
def _kernel(ranks, scratch, answers, width, k, levels, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    ranks += row * width
    answers += row * width
    one = scratch + row * (6 * width + 1)  # the ranks at this level, and at the next
    other = one + width
    left = other + width  # each query's part of them
    right = left + width
    wanted = right + width  # how many smaller ones its answer has there
    before = wanted + width  # zeros before each place, [width + 1]
    lane = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        i = start + lane
        real = i < width
        tl.store(one + i, tl.load(ranks + i, mask=real, other=0), mask=real)
        tl.store(left + i, tl.zeros([BLOCK], tl.int32), mask=real)
        tl.store(right + i, i + 1, mask=real)
        tl.store(wanted + i, tl.zeros([BLOCK], tl.int32) + (k - 1), mask=real)
        tl.store(answers + i, tl.zeros([BLOCK], tl.int32), mask=real)
    tl.store(before, 0)
    tl.debug_barrier()
    for level in range(levels):
        bit = levels - 1 - level
        odd = level % 2
        here = one + odd * width
        there = other - odd * width
        zeros = tl.zeros([], tl.int32)
        for start in range(0, width, BLOCK):
            i = start + lane
            real = i < width
            rank = tl.load(here + i, mask=real, other=0)
            zero = tl.where(real & (((rank >> bit) & 1) == 0), 1, 0)
            tl.store(before + 1 + i, zeros + tl.cumsum(zero, 0), mask=real)
            zeros += tl.sum(zero, 0)
        tl.debug_barrier()
        for start in range(0, width, BLOCK):
            i = start + lane
            real = i < width
            rank = tl.load(here + i, mask=real, other=0)
            smaller = tl.load(before + i, mask=real, other=0)
            tl.store(there + tl.where(((rank >> bit) & 1) == 0, smaller, zeros + i - smaller), rank, mask=real)
            active = real & (i + 1 >= k)
            first = tl.load(left + i, mask=active, other=0)
            last = tl.load(right + i, mask=active, other=0)
            count = tl.load(wanted + i, mask=active, other=0)
            from_left = tl.load(before + first, mask=active, other=0)
            from_right = tl.load(before + last, mask=active, other=0)
            inside = from_right - from_left
            high = count >= inside
            tl.store(wanted + i, tl.where(high, count - inside, count), mask=active)
            tl.store(left + i, tl.where(high, zeros + first - from_left, from_left), mask=active)
            tl.store(right + i, tl.where(high, zeros + last - from_right, from_right), mask=active)
            found = tl.load(answers + i, mask=active, other=0)
            tl.store(answers + i, found + tl.where(high, 1 << bit, 0), mask=active)
        tl.debug_barrier()


def kth_smallest_of_prefixes(ranks: torch.Tensor, k: int) -> torch.Tensor:
    """As in topk.py, int64 [R, M - k + 1], of int64 [R, M] on a GPU (or under TRITON_INTERPRET=1)."""
    rows, width = ranks.shape
    scratch = torch.empty(rows, 6 * width + 1, dtype=torch.int32, device=ranks.device)
    answers = torch.empty(rows, width, dtype=torch.int32, device=ranks.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    _kernel[(rows,)](ranks.int(), scratch, answers, width, k, levels_of(width), BLOCK=block, num_warps=8)
    return answers[:, k - 1 :].long()


def levels_of(width: int) -> int:
    """Bits of the largest rank, at least 1."""
    return max(1, (width - 1).bit_length())


def compiled(target: Any, block: int = BLOCK) -> Any:
    """The kernel compiled for a triton.backends.compiler.GPUTarget, without that GPU."""
    from triton.compiler import ASTSource

    pointers = dict.fromkeys(("ranks", "scratch", "answers"), "*i32")
    signature = {**pointers, "width": "i32", "k": "i32", "levels": "i32", "BLOCK": "constexpr"}
    source = ASTSource(_kernel, signature, constexprs={"BLOCK": block})
    return triton.compile(source, target=target, options={"num_warps": 8})
