"""Attention under evict_at over gathered keys: for a chunk of queries, only what some query of it sees.

Eviction is monotone, so that what a chunk sees of the tokens before it is among what the chunk before saw and its own
tokens. With a budget B that are about B keys, whatever the length: a chunk of C queries is one dense call over B + C
keys under a small mask, and a sequence costs O(S (B + C)) forward and backward. Built of ordinary operators, it has
exact gradients on every device.

A row is one kv head of one sequence, as in tiles.py. Rows that see less than the fullest are filled with tokens that
have gone; the mask hides these.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.kernels.sdpa import computing_dtype, sdpa

SMALLEST, LARGEST = 64, 512  # queries of a chunk
HELD = 2**26  # bytes of one layer that may stay until the backward pass; what is larger is gathered again there


@dataclass
class QueryChunk:
    """Queries first .. last - 1 of R rows, and the K keys that they are given, their own the last of them.

    columns : int64 [R, K], of each key; until : int32 [R, K], evict_at of it
    """

    first: int
    last: int
    columns: Tensor
    until: Tensor

    def visible(self) -> Tensor:
        """Bool [R, 1, queries, K]. A query always sees itself, as in `visible_mask`."""
        now = torch.arange(self.first, self.last, device=self.until.device)
        seen = now[:, None] < self.until[:, None]
        own = seen[..., self.first - self.last :]
        own.logical_and_(now[:, None] >= now).diagonal(dim1=-2, dim2=-1).fill_(True)
        return seen[:, None]


def make_chunks(evict_at: Tensor) -> list[QueryChunk]:
    """The chunks of int32 evict_at [R, S]. Where it is on a GPU, that is waited for twice."""
    rows, width = evict_at.shape
    position = torch.arange(width, device=evict_at.device)
    size = _chunk_size(evict_at)
    starts = position[::size]
    # How many keys before it each chunk is given: as many as the fullest row sees.
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
    """About a quarter of what the queries of the fullest row see on average, as a power of two."""
    width = evict_at.shape[-1]
    position = torch.arange(width, device=evict_at.device)
    seen = int((evict_at.clamp(max=width) - position).clamp(min=0).sum(-1).amax()) // width
    return min(max(1 << (seen // 4).bit_length() >> 1, SMALLEST), LARGEST)


def visited_share(chunks: list[QueryChunk]) -> float:
    """The share of all S x S query-key pairs that is computed."""
    return sum((chunk.last - chunk.first) * chunk.columns.shape[1] for chunk in chunks) / chunks[-1].last ** 2


def held_bytes(chunks: list[QueryChunk], dim: int, itemsize: int) -> int:
    """What SDPA keeps for the backward pass besides q, k and v: keys, values, and the masks in their dtype."""
    return itemsize * sum(chunk.columns.numel() * (2 * dim + chunk.last - chunk.first) for chunk in chunks)


def gathered_attention(evict_at: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention under evict_at by SDPA, for chunks of queries over the keys that any of them sees: [B, Hq, S, D].

    evict_at : int32 [B, Hkv, S]; query : [B, Hq, S, D]; key, value : [B, Hkv, S, D]
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
    # All chunks' at once: a gather or a slice for each would have the backward pass fill S numbers for each.
    keys, values = (x.index_select(0, torch.cat(places)).split(counts) for x in (key, value))
    queries = query.split([chunk.last - chunk.first for chunk in chunks], dim=2)
    rows, group = query.shape[:2]
    parts = []
    for chunk, of_queries, *of_keys in zip(chunks, queries, keys, values, strict=True):
        key, value = (x.view(rows, 1, -1, shape[-1]).expand(-1, group, -1, -1) for x in of_keys)
        parts.append(sdpa(of_queries, key, value, scaling, chunk.visible()))
    return torch.cat(parts, dim=2).view(shape).to(dtype)


def gathered_bytes(rows: int, prompt: int, length: int, seen: int, head_dim: int, itemsize: int, layers: int) -> int:
    """What attention over gathered keys holds until the backward pass, where a query sees `seen` entries, and all of
    its prompt; rows: sequences x kv heads. Of one layer, where that is too much to be kept of all of them.
    """
    evict_at = (torch.arange(length, dtype=torch.int32) + seen).clamp(min=prompt)
    held = rows * held_bytes(make_chunks(evict_at[None]), head_dim, itemsize)
    return held if held > HELD else layers * held
