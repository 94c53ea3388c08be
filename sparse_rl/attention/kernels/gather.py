"""Attention under evict_at over gathered keys: a chunk of queries gets only the keys that any of its queries sees.

An evicted token never comes back. So a chunk sees its own tokens, and some of the keys of the previous chunk. Under a
budget, the latter are about `budget` keys, for any length of the sequence. A chunk of C queries is one dense attention
call over about budget + C keys, with a small mask. A sequence of S tokens costs O(S (budget + C)), forward and
backward. The kernel consists of ordinary torch operators, so its gradients are exact on every device.

A row is one kv head of one sequence. Rows that see fewer keys than the fullest row are filled up with evicted tokens,
which the mask hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.kernels.sdpa import computing_dtype, sdpa

SMALLEST, LARGEST = 64, 512  # limits of the number of queries in a chunk
HELD = 2**26  # bytes that a layer may keep for the backward pass; above this, the backward pass gathers the keys again


@dataclass
class QueryChunk:
    """The queries from `first` to `last` - 1 of R rows, and the K keys that they attend to.

    columns : int64 [R, K], position of each key; the last ones are the positions of the queries themselves
    until : int32 [R, K], evict_at of each key
    """

    first: int
    last: int
    columns: Tensor
    until: Tensor

    def visible(self) -> Tensor:
        """Return the mask of the chunk, bool [R, 1, queries, K]. A query always sees its own token."""
        now = torch.arange(self.first, self.last, device=self.until.device)
        seen = now[:, None] < self.until[:, None]
        own = seen[..., self.first - self.last :]
        own.logical_and_(now[:, None] >= now).diagonal(dim1=-2, dim2=-1).fill_(True)
        return seen[:, None]


def make_chunks(evict_at: Tensor) -> list[QueryChunk]:
    """Divide the queries of all rows into chunks, for evict_at int32 [R, S]. On a GPU, this waits for the GPU twice."""
    rows, width = evict_at.shape
    position = torch.arange(width, device=evict_at.device)
    size = _chunk_size(evict_at)
    starts = position[::size]
    # The number of earlier keys of each chunk is the number that the fullest row sees.
    survive = (position < starts[:, None]) & (evict_at[:, None] > starts[:, None])  # [R, chunks, S]
    counts = survive.sum(-1).amax(0).tolist()
    chunks, columns, until = [], position[:0].expand(rows, 0), evict_at[:, :0]
    for first, count in zip(range(0, width, size), counts, strict=True):
        last = min(first + size, width)
        alive = (until > first).to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :count]
        columns = torch.cat([columns.gather(1, alive), position[first:last].expand(rows, -1)], dim=1)
        until = torch.cat([until.gather(1, alive), evict_at[:, first:last]], dim=1)
        chunks.append(QueryChunk(first, last, columns, until))
    return chunks


def _chunk_size(evict_at: Tensor) -> int:
    """Return the queries per chunk: a power of two, about 1/4 of the mean number of keys seen in the fullest row."""
    width = evict_at.shape[-1]
    position = torch.arange(width, device=evict_at.device)
    seen = int((evict_at.clamp(max=width) - position).clamp(min=0).sum(-1).amax()) // width
    return min(max(1 << (seen // 4).bit_length() >> 1, SMALLEST), LARGEST)


def visited_share(chunks: list[QueryChunk]) -> float:
    return sum((chunk.last - chunk.first) * chunk.columns.shape[1] for chunk in chunks) / chunks[-1].last ** 2


def held_bytes(chunks: list[QueryChunk], dim: int, itemsize: int) -> int:
    """Return the bytes that SDPA keeps for the backward pass: gathered keys and values, and masks in the same dtype."""
    return itemsize * sum(chunk.columns.numel() * (2 * dim + chunk.last - chunk.first) for chunk in chunks)


def gathered_attention(evict_at: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Compute attention under evict_at, [B, Hq, S, D], with one SDPA call for each chunk of queries.

    evict_at : int32 [B, Hkv, S]
    query, key, value : [B, Hq, S, D], [B, Hkv, S, D] and [B, Hkv, S, D]
    """
    chunks = make_chunks(evict_at.flatten(0, 1))
    attend = partial(_attend, chunks)
    itemsize = computing_dtype(query, value).itemsize
    if torch.is_grad_enabled() and held_bytes(chunks, query.shape[-1], itemsize) > HELD:
        return checkpoint(attend, query, key, value, scaling, use_reentrant=False, preserve_rng_state=False)
    return attend(query, key, value, scaling)


def _attend(chunks: list[QueryChunk], query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    shape, dtype, wanted = query.shape, value.dtype, computing_dtype(query, value)
    query = query.to(wanted).unflatten(1, (key.shape[1], -1)).flatten(0, 1)  # [R, G, S, D]
    key, value = (x.to(wanted).flatten(0, 2) for x in (key, value))  # [R * S, D]
    first_of_row = torch.arange(0, len(key), shape[2], device=key.device)[:, None]
    places = [(first_of_row + chunk.columns).flatten() for chunk in chunks]
    counts = [len(place) for place in places]
    # Gather for all chunks together: a gather or slice per chunk would fill S numbers per chunk in the backward pass.
    keys, values = (x.index_select(0, torch.cat(places)).split(counts) for x in (key, value))
    queries = query.split([chunk.last - chunk.first for chunk in chunks], dim=2)
    rows, group = query.shape[:2]
    parts = []
    for chunk, chunk_queries, *keys_and_values in zip(chunks, queries, keys, values, strict=True):
        key, value = (x.view(rows, 1, -1, shape[-1]).expand(-1, group, -1, -1) for x in keys_and_values)
        parts.append(sdpa(chunk_queries, key, value, scaling, chunk.visible()))
    return torch.cat(parts, dim=2).view(shape).to(dtype)


def gathered_bytes(rows: int, prompt: int, length: int, seen: int, head_dim: int, itemsize: int, layers: int) -> int:
    """Return the bytes that attention over gathered keys keeps for the backward pass.

    `rows` is sequences x kv heads. Queries after the prompt see `seen` entries; prompt queries see all tokens before
    them. A layer that would keep more than `HELD` bytes keeps none, and the backward pass gathers
    its keys again; the result is then the bytes of one layer.
    """
    evict_at = (torch.arange(length, dtype=torch.int32) + seen).clamp(min=prompt)
    layer_bytes = rows * held_bytes(make_chunks(evict_at[None]), head_dim, itemsize)
    return layer_bytes if layer_bytes > HELD else layers * layer_bytes
