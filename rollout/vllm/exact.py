"""Attention over the paged cache in float32 on a CPU, by the same function as in the trainer and the reference engine.

vLLM's CPU kernel is exact to about 1e-7 per layer, but a trained model amplifies that to more than 1e-5 in log-probs.
`sparse_rl.attention.kernels.sdpa` computes in float64; the remaining difference, within 1e-5, comes from matrix
products. Other dtypes use vLLM's kernel, because their own rounding is far coarser.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rollout.vllm.compat.paged import read_blocks
from rollout.vllm.plan import NOBODYS
from sparse_rl.attention.kernels.sdpa import sdpa

ELEMENTS = 2**18  # key elements gathered at a time: 2 MiB in float64, which fit into a core's cache


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    starts: Tensor,
    scale: float,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Compute causal attention for B requests with different numbers of queries, and write it to `out`.

    query, out : [T, Hq, D], queries of one request after the other, and their attention output
    keys, values : [number of blocks, Hkv, block size, D], the paged cache
    blocks : int [B, max blocks], blocks of each request
    lengths : int [B], number of entries that each request holds; the last entry is that of the last query's token
    starts : int [B + 1], index of each request's first query, then T
    bias : float32 [number of blocks, Hkv, block size], added to the logits, except for requests whose entries are all
        new
    """
    counts = starts[1:] - starts[:-1]
    single = (counts == 1).nonzero()[:, 0]
    _, heads, size, dim = keys.shape
    for rows in _pieces(single, lengths, heads * dim):
        held = lengths[rows]
        longest = int(held.max())
        table, place = blocks[rows, : -(-longest // size)].long(), starts[rows].long()
        # blocks after those of a request may hold NaN, and 0 x NaN is NaN
        table.masked_fill_(torch.arange(0, longest, size) >= held[:, None], NOBODYS)
        key, value = (read_blocks(paged, table)[:, :, :longest] for paged in (keys, values))
        mask = (torch.arange(longest) < held[:, None])[:, None, None]
        if bias is not None:
            mask = read_blocks(bias, table)[:, :, None, :longest].masked_fill(~mask, float("-inf"))
        grouped = query[place].unflatten(1, (heads, -1))  # the G query heads of a kv head, as G queries of one head
        out[place] = sdpa(grouped, key, value, scale, mask).flatten(1, 2)
    for row in (counts > 1).nonzero()[:, 0].tolist():
        first, count, length = int(starts[row]), int(counts[row]), int(lengths[row])
        table = blocks[row : row + 1, : -(-length // size)].long()
        # contiguous, because torch has no fused kernel for transposed keys, and would allocate all logits
        key, value = (read_blocks(paged, table)[:, :, :length].contiguous() for paged in (keys, values))
        part, whole = query[first : first + count].transpose(0, 1)[None], count == length
        later = None if whole else torch.arange(length) <= torch.arange(length - count, length)[:, None]
        if bias is not None and later is not None:
            added = read_blocks(bias, table)[:, :, None, :length].masked_fill(~later, float("-inf"))
            later = added.repeat_interleave(query.shape[1] // heads, dim=1)
        out[first : first + count] = sdpa(part, key, value, scale, later, causal=whole)[0].transpose(0, 1)


def _pieces(rows: Tensor, lengths: Tensor, elements: int) -> Iterator[Tensor]:
    """Yield pieces of `rows`, each with about ELEMENTS key elements in rows of similar length.

    lengths : number of entries of each row of the batch
    elements : key elements per entry
    """
    rows = rows[lengths[rows].argsort(descending=True)]
    while len(rows):
        count = max(1, ELEMENTS // (elements * int(lengths[rows[0]])))
        yield rows[:count]
        rows = rows[count:]
