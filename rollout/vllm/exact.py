"""Attention over the paged cache in float32 on a CPU: by the very call that the trainer and the reference engine make.

vLLM's CPU kernel is exact to about 1e-7 per layer, but a trained model amplifies that to more than 1e-5 in log-probs,
where `sparse_rl.attention.kernels.sdpa` (float64 inside) makes attention all but free of rounding: what is left, within
1e-5, comes from matrix products. Other dtypes take vLLM's kernel: their own rounding is far coarser.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rollout.vllm.compat.paged import read_blocks
from rollout.vllm.plan import NOBODYS
from sparse_rl.attention.kernels.sdpa import sdpa

ELEMENTS = 2**18  # of keys, gathered at a time: 2 MiB in float64, so that they stay in a core's cache


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
    """Causal attention of a ragged batch of B requests, written into `out`.

    query, out [T, Hq, D]; keys, values [blocks, Hkv, block size, D]; blocks int [B, max blocks]; lengths int [B],
    entries held; starts int [B + 1], each request's first query. A request's last query stands at its last entry.
    bias : float32 [blocks, Hkv, block size], added to the logits, but of requests that bring all that they hold
    """
    counts = starts[1:] - starts[:-1]
    single = (counts == 1).nonzero()[:, 0]
    _, heads, size, dim = keys.shape
    for rows in _pieces(single, lengths, heads * dim):
        held = lengths[rows]
        longest = int(held.max())
        table, place = blocks[rows, : -(-longest // size)].long(), starts[rows].long()
        # behind a request's own blocks stand those of others, whose NaN a weight of zero would not keep out
        table.masked_fill_(torch.arange(0, longest, size) >= held[:, None], NOBODYS)
        key, value = (read_blocks(paged, table)[:, :, :longest] for paged in (keys, values))
        mask = (torch.arange(longest) < held[:, None])[:, None, None]
        if bias is not None:
            mask = read_blocks(bias, table)[:, :, None, :longest].masked_fill(~mask, float("-inf"))
        grouped = query[place].unflatten(1, (heads, -1))  # the G query heads of a group, as G queries of one head
        out[place] = sdpa(grouped, key, value, scale, mask).flatten(1, 2)
    for row in (counts > 1).nonzero()[:, 0].tolist():
        first, count, length = int(starts[row]), int(counts[row]), int(lengths[row])
        table = blocks[row : row + 1, : -(-length // size)].long()
        # contiguous: for keys as they lie, [D, N], torch leaves its fused kernel and makes [T, N]
        key, value = (read_blocks(paged, table)[:, :, :length].contiguous() for paged in (keys, values))
        part, whole = query[first : first + count].transpose(0, 1)[None], count == length
        later = None if whole else torch.arange(length) <= torch.arange(length - count, length)[:, None]
        if bias is not None and later is not None:
            added = read_blocks(bias, table)[:, :, None, :length].masked_fill(~later, float("-inf"))
            later = added.repeat_interleave(query.shape[1] // heads, dim=1)
        out[first : first + count] = sdpa(part, key, value, scale, later, causal=whole)[0].transpose(0, 1)


def _pieces(rows: Tensor, lengths: Tensor, elements: int) -> Iterator[Tensor]:
    """The rows, those of like lengths together, as many at a time as ELEMENTS allows."""
    rows = rows[lengths[rows].argsort(descending=True)]
    while len(rows):
        count = max(1, ELEMENTS // (elements * int(lengths[rows[0]])))
        yield rows[:count]
        rows = rows[count:]
