"""Attention under evict_at with any of ATTENTION_KERNELS: the interface between the views and the kernels.

gather        dense calls for chunks of queries, over the keys that any query of a chunk sees
sdpa          SDPA under masks of tokens x tokens, one layer at a time
flex          FlexAttention over the 128 x 128 tiles that are not empty, keys in natural order (flex.py)
flex_sorted   FlexAttention with keys sorted by evict_at in segments, which leaves fewer tiles; flex for short rows
dense         the reference, in float64

Gathering rests on this: an evicted token never comes back. So a chunk of C queries sees its own tokens, and about
`budget` of the keys of the previous chunk: it is one dense attention call over about budget + C keys, with a small
mask. A sequence of S tokens costs O(S (budget + C)), forward and backward. The kernel consists of ordinary torch
operators, so its gradients are exact on every device. A row is one kv head of one sequence. Rows that see fewer keys
than the fullest row are filled up with evicted tokens, which the mask hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.kernels.exact import computing_dtype, sdpa
from sparse_rl.kernels.flex import flex_attend


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float, bias: Tensor | None = None
) -> Tensor:
    """Return softmax(q K^T scaling + bias) V over the visible keys, [B, Hq, S, D] in the dtype of the queries.

    query : [B, Hq, S, D], S queries; all computation is in float64
    key, value : [B, Hkv, N, D]
    visible : bool [B, Hkv, S, N], True if the query sees the key
    bias : [B, Hkv, N], added to the logits of each key; None means no bias
    """
    dtype, group = query.dtype, query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    heads = []
    for head in range(query.shape[1]):
        kv = head // group
        logits = query[:, head] @ key[:, kv].transpose(-1, -2) * scaling
        if bias is not None:
            logits = logits + bias[:, kv, None].double()
        weights = logits.masked_fill(~visible[:, kv], float("-inf")).softmax(-1)
        heads.append(weights @ value[:, kv])
    return torch.stack(heads, dim=1).to(dtype)


SMALLEST, LARGEST = 64, 512  # limits of the number of queries in a chunk
HELD = 2**26  # bytes that a layer may keep for the backward pass; above this, the backward pass gathers the keys again


@dataclass
class QueryChunk:
    """The queries from `first` to `last` - 1 of R rows, and the K keys that they attend to."""

    first: int
    last: int
    columns: Tensor  # int64 [R, K], position of each key; the last ones are the positions of the queries themselves
    until: Tensor  # int32 [R, K], evict_at of each key

    def visible(self) -> Tensor:
        """Return the mask of the chunk, bool [R, 1, queries, K]. A query always sees its own token."""
        now = torch.arange(self.first, self.last, device=self.until.device)
        seen = now[:, None] < self.until[:, None]
        own = seen[..., self.first - self.last :]
        own.logical_and_(now[:, None] >= now).diagonal(dim1=-2, dim2=-1).fill_(True)
        return seen[:, None]


def make_chunks(evict_at: Tensor, before: int = 0) -> list[QueryChunk]:
    """Divide the queries of all rows, from position `before` on, into chunks, for evict_at int32 [R, S]. On a GPU, this
    waits for the GPU twice."""
    rows, width = evict_at.shape
    position = torch.arange(width, device=evict_at.device)
    size = _chunk_size(evict_at)
    starts = position[before::size]
    # The number of earlier keys of each chunk is the number that the fullest row sees.
    survive = (position < starts[:, None]) & (evict_at[:, None] > starts[:, None])  # [R, chunks, S]
    counts = survive.sum(-1).amax(0).tolist()
    chunks, columns, until = [], position[:before].expand(rows, before), evict_at[:, :before]
    for first, count in zip(range(before, width, size), counts, strict=True):
        last = min(first + size, width)
        alive = (until > first).to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :count]
        columns = torch.cat([columns.gather(1, alive), position[first:last].expand(rows, -1)], dim=1)
        until = torch.cat([until.gather(1, alive), evict_at[:, first:last]], dim=1)
        chunks.append(QueryChunk(first, last, columns, until))
    return chunks


def held_bytes(chunks: list[QueryChunk], dim: int, itemsize: int) -> int:
    """Return the bytes that SDPA keeps for the backward pass: gathered keys and values, and masks in the same dtype."""
    return itemsize * sum(chunk.columns.numel() * (2 * dim + chunk.last - chunk.first) for chunk in chunks)


def _chunk_size(evict_at: Tensor) -> int:
    """Return the queries per chunk: a power of two, about 1/4 of the mean number of keys seen in the fullest row."""
    width = evict_at.shape[-1]
    position = torch.arange(width, device=evict_at.device)
    seen = int((evict_at.clamp(max=width) - position).clamp(min=0).sum(-1).amax()) // width
    return min(max(1 << (seen // 4).bit_length() >> 1, SMALLEST), LARGEST)


def visited_share(chunks: list[QueryChunk]) -> float:
    return sum((chunk.last - chunk.first) * chunk.columns.shape[1] for chunk in chunks) / chunks[-1].last ** 2


def gathered_attention(evict_at: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Compute attention under evict_at, int32 [B, Hkv, S], by an SDPA call for each chunk of queries: [B, Hq, T, D]."""
    chunks = make_chunks(evict_at.flatten(0, 1), key.shape[2] - query.shape[2])
    attend = partial(_attend_chunks, chunks)
    itemsize = computing_dtype(query, value).itemsize
    if torch.is_grad_enabled() and held_bytes(chunks, query.shape[-1], itemsize) > HELD:
        return checkpoint(attend, query, key, value, scaling, use_reentrant=False, preserve_rng_state=False)
    return attend(query, key, value, scaling)


def _attend_chunks(chunks: list[QueryChunk], query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    shape, dtype, wanted, width = query.shape, value.dtype, computing_dtype(query, value), key.shape[2]
    query = query.to(wanted).unflatten(1, (key.shape[1], -1)).flatten(0, 1)  # [R, G, T, D]
    key, value = (x.to(wanted).flatten(0, 2) for x in (key, value))  # [R * S, D]
    first_of_row = torch.arange(0, len(key), width, device=key.device)[:, None]
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


Evictions = Callable[[], Any]  # returns evict_at, int32 [B, Hkv, S]


def masked_attention(
    evict_at: Evictions, query: Tensor, key: Tensor, value: Tensor, scaling: float, kernel: str = "sdpa"
) -> Tensor:
    """Compute attention under evict_at with the given kernel: [B, Hq, T, D].

    evict_at : function that returns evict_at, int32 [B, Hkv, S]; the kernels sdpa and dense call it again in the
        backward pass; for flex and flex_sorted, it may return the tiles under evict_at
    query : [B, Hq, T, D], the queries of the last T of S tokens
    key, value : [B, Hkv, S, D]
    kernel : one of ATTENTION_KERNELS; on a CPU, flex is torch's plain operator, which is slow and refuses gradients
    """
    if kernel.startswith("flex"):  # saves lists of tiles, no S x S tensor
        sort, compiled = kernel == "flex_sorted", query.is_cuda
        return flex_attend(evict_at(), query, key, value, scaling, in_segments=sort, compiled=compiled)[0]
    if kernel == "gather":
        return gathered_attention(evict_at(), query, key, value, scaling)
    attend = partial(_by_reference if kernel == "dense" else _by_sdpa, evict_at)
    if not torch.is_grad_enabled():
        return attend(query, key, value, scaling)
    # If the mask were saved for the backward pass, the masks of all layers would stay in memory. So only query, key and
    # value are saved, and the mask is recomputed.
    return checkpoint(attend, query, key, value, scaling, use_reentrant=False, preserve_rng_state=False)


def _by_sdpa(evict_at: Evictions, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    # Fold kv heads into the batch: the mask [B * Hkv, 1, S, S] then serves all query heads of a group.
    mask = visible_mask(evict_at())[:, :, -query.shape[2] :].flatten(0, 1)[:, None]
    grouped = query.unflatten(1, (-1, group)).flatten(0, 1)
    key, value = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (key, value))
    return sdpa(grouped, key, value, scaling, mask).view(query.shape)


def _by_reference(evict_at: Evictions, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return dense_attention(query, key, value, visible_mask(evict_at())[:, :, -query.shape[2] :], scaling)


def visible_mask(evict_at: Tensor) -> Tensor:
    """Return the mask of evict_at, int32 [B, Hkv, S], as bool [B, Hkv, S queries, S tokens].

    Query q sees token t if t <= q < evict_at[t]. It always sees its own token, so that padding has no empty softmax.
    """
    position = torch.arange(evict_at.shape[-1], device=evict_at.device, dtype=evict_at.dtype)
    mask = position[:, None] < evict_at[:, :, None, :]
    mask.logical_and_(position[:, None] >= position)
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    return mask
