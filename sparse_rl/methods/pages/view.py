"""Replay of clustered attention in training: queries open the recorded pages, and summaries are recomputed.

Summaries have gradients. The choice of pages has none: it is a decision, like an eviction. Recorded weights of tokens
in summaries depend on the model too, but are also treated as decisions, without a gradient.

For a chunk of queries, the view gathers the entries that the queries read: the sinks, the tail that any query of the
chunk sees, the summaries, and for each query the tokens of the pages that it opens. So the cost of a layer grows with
the number of tokens times the number of entries that a query reads, and no mask of tokens x tokens is made.

Sizes in shapes: L layers, B rows, S columns, P pages, K pages that a query opens, Hkv kv heads with G query heads each,
C queries of a chunk, R raw entries (sinks and tail) that a chunk reads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.interface import TraceView
from sparse_rl.kernels.exact import computing_dtype
from sparse_rl.methods.pages.policy import Pages, summarise
from sparse_rl.trace import NEVER, TraceError, pinned

CHUNK = 128  # queries at a time


@dataclass
class Chunk:
    """A chunk of consecutive queries, from column `first` to column `last` - 1."""

    first: int
    last: int
    low: Tensor  # int64 [B], the first column after the sinks that the chunk's first query reads as a raw token
    tail: int  # number of columns from the smallest `low` to `last`
    closed: int  # number of pages that are closed for the last query, the maximum over rows


class PagedView(TraceView):
    """Replays traces of clustered attention; summaries always have gradients.

    The view reads these trace sections: opened int16 [L, B, Hkv, S, K]; closed_at int32 [B, P]; paged_with int32 [8];
    pi float32 [L, B, Hkv, S], if summaries are not plain means; and evict_at int32 [L, B, Hkv, S], only to find the
    padding. `kernel` is ignored. Raises TraceError if the trace was sampled under softmax: nested, which cannot be
    replayed.
    """

    replays: ClassVar = frozenset({"evict_at", "opened", "closed_at", "paged_with", "pi"})
    requires: ClassVar = replays - {"pi"}

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        self.opened, self.pages = pinned(batch["opened"], self.device), Pages.read(batch["paged_with"])
        self.pi = pinned(batch["pi"], self.device) if "pi" in batch else None
        if not self.pages.joint:
            raise TraceError("these sequences were sampled under softmax: nested, which is not replayed; use joint")
        real = batch["evict_at"][0, :, 0] > 0  # False for padding
        start, width = real.int().argmax(1), real.shape[1]
        closes = batch["closed_at"]  # [B, P]
        columns = (start[:, None, None] + self.pages.tokens(torch.arange(closes.shape[1]))).clamp(max=width - 1)
        # the first query that no longer reads a column token by token, [B, S]
        until = torch.where(real, NEVER, 0).to(torch.int32)
        until.scatter_reduce_(1, columns.flatten(1), closes.repeat_interleave(self.pages.size, dim=1), reduce="amin")
        self.chunks = list(self._chunks(until, torch.arange(width) - start[:, None] >= self.pages.sinks))
        self.start, self.columns, self.closes, self.until = (x.to(self.device) for x in (start, columns, closes, until))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        opened, summaries = self.decided(layer, key, value)
        dtype = value.dtype
        wide = computing_dtype(query, value)
        grouped = query.to(wide).unflatten(1, (key.shape[1], -1))
        tensors = [x.to(wide) for x in (key, value, *summaries)]
        parts = []
        for chunk in self.chunks:
            work = partial(self._gathered, chunk, scaling, opened)
            part = grouped[:, :, :, chunk.first : chunk.last]
            if torch.is_grad_enabled():
                parts.append(checkpoint(work, part, *tensors, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(work(part, *tensors))
        return torch.cat(parts, dim=3).flatten(1, 2).to(dtype)

    def decided(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the pages that each query of a layer opens, int64 [B, Hkv, S, K], and the summaries of all pages."""
        opened = self.opened[layer].to(self.device, non_blocking=True).long()
        heads, dim = key.shape[1], key.shape[3]
        at = self.columns.flatten(1)[:, None, :, None].expand(-1, heads, -1, dim)
        inside = [x.gather(2, at).unflatten(2, self.columns.shape[1:]) for x in (key, value)]
        weights = None
        if self.pi is not None:
            pi = self.pi[layer].to(self.device, non_blocking=True)
            columns = self.columns.flatten(1)[:, None].expand(-1, heads, -1)
            weights = pi.gather(2, columns).unflatten(2, self.columns.shape[1:])
        return opened, summarise(inside[0], inside[1], self.pages, weights)

    def _chunks(self, until: Tensor, behind: Tensor) -> Iterator[Chunk]:
        """Yield the chunks of queries, which are the same for every layer; computed in host memory.

        until : int32 [B, S], the first query that no longer reads a column token by token
        behind : bool [B, S], True for columns after the sinks
        """
        width = until.shape[1]
        for first in range(0, width, CHUNK):
            last = min(first + CHUNK, width)
            held = (until > first) & behind
            held[:, last:] = False
            low = torch.where(held.any(-1), held.int().argmax(-1), last)
            closed = int(((until > 0) & (until < last) & behind).sum(-1).max()) // self.pages.size
            yield Chunk(first, last, low.to(self.device), int(last - low.min()), closed)

    def _gathered(self, chunk: Chunk, scaling: float, opened: Tensor, query: Tensor, *tensors: Tensor) -> Tensor:
        """Attend from the queries of a chunk, [B, Hkv, G, C, D], to the entries that they read.

        The tensors are keys, values, and the keys and values of the summaries, [B, Hkv, P, D]; `opened` has the pages
        that each query opens, int64 [B, Hkv, S, K].
        """
        key, value, page_keys, page_values = tensors
        pages, heads = self.pages, key.shape[1]
        now = torch.arange(chunk.first, chunk.last, device=self.device)
        sinks = self.start[:, None] + torch.arange(pages.sinks, device=self.device)
        tail = chunk.low[:, None] + torch.arange(chunk.tail, device=self.device)
        columns = torch.cat([sinks, tail], dim=1)  # [B, R]
        real = columns < chunk.last
        columns = columns.clamp(max=chunk.last - 1)
        until = self.until.gather(1, columns)
        seen = real[:, None] & (columns[:, None] <= now[:, None]) & (now[:, None] < until[:, None])  # [B, C, R]
        is_padding = ~seen.any(-1)  # padding queries; each must see at least one key, so that its softmax is finite
        seen[..., 0] |= is_padding

        chunk_opened = opened[:, :, chunk.first : chunk.last]  # [B, Hkv, C, K]
        count = chunk.closed
        is_open = torch.zeros(*chunk_opened.shape[:3], count + 1, dtype=torch.bool, device=self.device)
        is_open = is_open.scatter(3, torch.where(chunk_opened < 0, count, chunk_opened), True)[..., :count]
        summaries = (self.closes[:, None, None, :count] <= now[:, None]) & ~is_open
        inside = (self.start[:, None, None, None, None] + pages.tokens(chunk_opened.clamp(min=0))).flatten(2)
        inside_open = (chunk_opened >= 0).repeat_interleave(pages.size, dim=-1)

        def read(x: Tensor, at: Tensor) -> Tensor:
            return x.gather(2, at[..., None].expand(*at.shape, x.shape[-1]))

        shape = (now.numel(), inside_open.shape[-1])
        inside = inside.clamp(max=key.shape[2] - 1)
        columns = columns[:, None].expand(-1, heads, -1)
        raw_keys, raw_values = read(key, columns), read(value, columns)
        open_keys, open_values = (read(x, inside).unflatten(2, shape) for x in (key, value))
        query = query * scaling
        raw = torch.einsum("bhgcd,bhnd->bhgcn", query, raw_keys)
        of_pages = torch.einsum("bhgcd,bhmd->bhgcm", query, page_keys[:, :, :count]) + pages.bias
        of_open = torch.einsum("bhgcd,bhcnd->bhgcn", query, open_keys)
        masks = ((raw, seen[:, None, None]), (of_pages, summaries[:, :, None]), (of_open, inside_open[:, :, None]))
        logits = torch.cat([part.masked_fill(~visible, float("-inf")) for part, visible in masks], dim=-1)
        widths = [columns.shape[2], count, shape[1]]
        raw_weights, summary_weights, opened_weights = logits.softmax(-1).split(widths, dim=-1)
        return (
            torch.einsum("bhgcn,bhnd->bhgcd", raw_weights, raw_values)
            + torch.einsum("bhgcm,bhmd->bhgcd", summary_weights, page_values[:, :, :count])
            + torch.einsum("bhgcn,bhcnd->bhgcd", opened_weights, open_values)
        )
