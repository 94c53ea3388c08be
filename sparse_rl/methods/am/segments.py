"""Segments of a sequence between compactions, for the replay of fitted entries.

The queries of a segment all see the same kept entries, and, causally, the segment's own tokens. Sizes in shapes are
those of view.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.kernels.sdpa import sdpa


@dataclass
class Segment:
    """The tokens between two compactions, for the R rows that have this segment.

    rows : int64 [R], indices of the rows in the batch
    kept_rows : int64 [R], indices of the same rows among the rows of the previous segment
    own : int64 [R, T], columns of the segment's tokens, right-padded
    real : bool [R, T], False for padding
    first : int64 [R], column of the first token of each row's sequence
    """

    rows: Tensor
    kept_rows: Tensor
    own: Tensor
    real: Tensor
    first: Tensor


@dataclass
class Held:
    """The K entries per kv head that a compaction left.

    index, bias, values : int64 [R, H, K], columns of the entries, ascending; float32 [R, H, K]; and [R, H, K, D]
    """

    index: Tensor
    bias: Tensor
    values: Tensor


def segments(evict_at: Tensor, times: Tensor, device: torch.device) -> list[Segment]:
    """Return the segments of a batch, the same for every layer, on `device`.

    evict_at : int32 [L, B, H, S], in host memory
    times : int32 [B, C], columns before which the compactions of each row take place, ascending
    """
    real = evict_at[0, :, 0] > 0  # False for padding
    width = real.shape[1]
    start = real.int().argmax(1)
    end = start + real.sum(1)
    times = torch.cat([start[:, None], times.clamp(max=width).long(), torch.full((len(real), 1), width)], dim=1)
    times = torch.minimum(times, end[:, None])
    results, before = list[Segment](), torch.arange(len(real))
    for place in range(times.shape[1] - 1):
        first, last = times[:, place], times[:, place + 1]
        rows = (last > first).nonzero()[:, 0]
        if not len(rows):
            break
        own = first[rows, None] + torch.arange(int((last - first).max()))
        is_real = own < last[rows, None]
        kept_rows = torch.searchsorted(before, rows)
        parts = (rows, kept_rows, own.clamp(max=width - 1), is_real, start[rows])
        results.append(Segment(*(part.to(device) for part in parts)))
        before = rows
    return results


def tensors_of(held: Held | None) -> tuple[Tensor, ...]:
    return () if held is None else (held.index, held.bias, held.values)


def saved(function: Any, *tensors: Tensor) -> Any:
    """Return function(*tensors) with gradient checkpointing, which saves only `tensors` for the backward pass."""
    if not torch.is_grad_enabled():
        return function(*tensors)
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def columns_of(x: Tensor, columns: Tensor) -> Tensor:
    """Gather the columns int64 [R, H, N] of x [R, H, S, D]. Returns [R, H, N, D]."""
    return x.gather(2, columns[..., None].expand(*columns.shape, x.shape[-1]))


def placed(out: Tensor, segment: Segment, attended: Tensor, start: int = 0) -> Tensor:
    """Return `out` [B, S, Hq, D] with the attention output of a segment's queries at their columns.

    attended : [R, Hq, T, D], the output of T queries
    start : index of the first of these queries in the segment
    """
    queries = slice(start, start + attended.shape[2])
    where = segment.real[:, queries].nonzero(as_tuple=True)
    columns = segment.own[:, queries][where]
    return out.index_put((segment.rows[where[0]], columns), attended.transpose(1, 2)[where])


def attend(
    segment: Segment,
    scaling: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *held: Tensor,
    queries: slice | None = None,
) -> Tensor:
    """Attend from a segment's queries to the entries `held` and, causally, to the segment's own tokens.

    queries : the indices in the segment of the queries that attend; None means all. It requires entries `held`

    Returns the output [R, Hq, number of queries, D].
    """
    start, end = (0, segment.own.shape[1]) if queries is None else (queries.start, queries.stop)
    rows, own, asking = segment.rows, segment.own[:, :end], segment.own[:, start:end]
    heads, width = key.shape[1], asking.shape[1]
    query, key, value = query[rows], key[rows], value[rows]
    columns = own[:, None].expand(-1, heads, -1)
    asked = columns_of(query, asking[:, None].expand(-1, query.shape[1], -1))
    keys, values = columns_of(key, columns), columns_of(value, columns)
    if not held:
        return sdpa(asked, keys, values, scaling, causal=True)
    causal = torch.ones(width, end, dtype=torch.bool, device=own.device).tril(start)
    index, bias, held_values = held
    keys, values = torch.cat([columns_of(key, index), keys], dim=2), torch.cat([held_values, values], dim=2)
    later = torch.zeros(width, end, device=own.device).masked_fill(~causal, float("-inf"))
    mask = torch.cat(
        [bias[:, :, None].expand(-1, -1, width, -1), later.expand(*bias.shape[:2], -1, -1)], dim=-1
    ).flatten(0, 1)[:, None]
    group = asked.shape[1] // heads
    grouped = asked.reshape(-1, group, width, asked.shape[-1])  # kv heads join the rows: a group shares a mask
    keys, values = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (keys, values))
    return sdpa(grouped, keys, values, scaling, mask).reshape(asked.shape)
