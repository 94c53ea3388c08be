"""The passes of topk.py over the bits of the ranks, in Triton: they find the k-th smallest rank of every prefix.

The ranks of a row are a permutation of 0 to M - 1. A node is a range of ranks, from n to n + 2^(bit + 1) - 1. At the
level of that bit, the node's tokens are stored at the places from n on, oldest first. So those of them that belong to
a prefix come first, and their number describes them.

Each level is a separate kernel launch that reads the output of the level before. So no program waits for another, and
blocks of 512 tokens fill a GPU even if there are few rows. Between two levels, torch counts, for each place, the ranks
before this place whose next bit is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # tokens per program: 8 rows of 16,384 tokens give 256 programs
WARPS = 4


@triton.jit(do_not_specialize=["width", "queries", "bit"])  # one kernel for all levels and sizes
def _level(ranks, before, moved, zeros, held, wanted, answers, width, queries, bit, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Move the ranks of a block to the two halves of their nodes, and each query to the half with its answer.

    All tensors are int32.

    ranks, moved : [R, M], the rank at each place, at this level and at the next
    zeros : [R, M], 1 if the next bit of the moved rank is 0
    before : [R M + 1], number of zeros of this bit before each place, counted from the start of the first row
    held : [R, queries], for each query, the number of tokens of its prefix in its node
    wanted : [R, queries], for each query, the number of these tokens that are smaller than its answer
    answers : [R, queries], for each query, the first rank of its node, which is the answer at the last level
    """
    row = tl.program_id(0).to(tl.int64) * width
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < width

    rank = tl.load(ranks + row + place, mask=real, other=0)
    node = rank >> (bit + 1) << (bit + 1)
    smaller = tl.load(before + row + place, mask=real, other=0) - tl.load(before + row + node, mask=real, other=0)
    to = tl.where((rank >> bit) & 1 == 0, node + smaller, (1 << bit) + place - smaller)
    tl.store(moved + row + to, rank, mask=real)
    if bit > 0:
        tl.store(zeros + row + to, 1 - ((rank >> (bit - 1)) & 1), mask=real)

    valid = place < queries
    query = tl.program_id(0).to(tl.int64) * queries + place
    node = tl.load(answers + query, mask=valid, other=0)
    count = tl.load(held + query, mask=valid, other=0)
    rest = tl.load(wanted + query, mask=valid, other=0)
    low = tl.load(before + row + node + count, mask=valid, other=0) - tl.load(before + row + node, mask=valid, other=0)
    high = rest >= low
    tl.store(answers + query, tl.where(high, node + (1 << bit), node), mask=valid)
    tl.store(held + query, tl.where(high, count - low, low), mask=valid)
    tl.store(wanted + query, tl.where(high, rest - low, rest), mask=valid)


def kth_smallest_of_prefixes(ranks: Tensor, k: int) -> Tensor:
    """Return, for each row, the k-th smallest number among the first k, k + 1, ..., M numbers: int64 [R, M - k + 1].

    ranks : int64 [R, M], each row a permutation of 0 to M - 1, on a GPU (or under TRITON_INTERPRET=1)
    """
    rows, width = ranks.shape
    top = max(1, (width - 1).bit_length()) - 1  # the highest bit of a rank
    ranks_now = ranks.int()
    ranks_next = torch.empty_like(ranks_now)
    zeros = 1 - (ranks_now >> top & 1)
    before = ranks_now.new_zeros(rows * width + 1)
    held = torch.arange(k, width + 1, dtype=torch.int32, device=ranks.device).repeat(rows, 1)
    wanted, answers = torch.full_like(held, k - 1), torch.zeros_like(held)
    sizes = width, width - k + 1
    grid = rows, triton.cdiv(width, BLOCK)
    for bit in range(top, -1, -1):
        torch.cumsum(zeros.view(-1), 0, dtype=torch.int32, out=before[1:])
        _level[grid](
            ranks_now, before, ranks_next, zeros, held, wanted, answers, *sizes, bit, BLOCK=BLOCK, num_warps=WARPS
        )
        ranks_now, ranks_next = ranks_next, ranks_now
    return answers.long()
