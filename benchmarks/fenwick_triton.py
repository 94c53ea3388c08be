"""The competitor of running_topk on a GPU, for benchmarks/topk.py: a Fenwick tree per row, filled token by token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(ranks, tree, cutoff, width, k, levels):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    ranks += row * width
    cutoff += row * width
    tree += row * (width + 1)
    for t in range(width):
        i = tl.load(ranks + t) + 1
        while i <= width:
            tl.store(tree + i, tl.load(tree + i) + 1)
            i += i & -i
        if t + 1 >= k:
            place = 0
            left = k
            for level in range(levels):
                step = 1 << (levels - 1 - level)
                inside = place + step <= width
                count = tl.load(tree + place + step, mask=inside, other=0)
                further = inside & (count < left)
                left = tl.where(further, left - count, left)
                place = tl.where(further, place + step, place)
            tl.store(cutoff + t, place)


def fenwick(ranks: torch.Tensor, k: int) -> torch.Tensor:
    """Return the rank of the k-th best token of each prefix, int32 [R, M], for ranks int64 [R, M] on a GPU.

    The result is -1 for prefixes shorter than k.
    """
    rows, width = ranks.shape
    tree = torch.zeros(rows, width + 1, dtype=torch.int32, device=ranks.device)
    cutoff = torch.full((rows, width), -1, dtype=torch.int32, device=ranks.device)
    _kernel[(rows,)](ranks.int(), tree, cutoff, width, k, width.bit_length(), num_warps=1)
    return cutoff
