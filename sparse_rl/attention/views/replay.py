"""Eviction replay: training under exactly the attention that the sampler had.

The traces of a micro-batch stay in host memory. When a layer runs, its slice of evict_at is copied to the device, the
next layer's slice is prefetched, and the layer's mask is made, used and dropped. The backward pass recomputes the mask
in the same way. So at most one layer's mask and two layers' slices of evict_at are on the device. FlexAttention's lists
of tiles are small and are kept for the backward pass; with gradient checkpointing, only one layer's lists are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_rl.attention.interface import Replayed, TraceView
from sparse_rl.attention.kernels.flex import tiles_bytes
from sparse_rl.attention.kernels.gather import gathered_bytes
from sparse_rl.attention.kernels.masked import masked_attention, sdpa_mask_bytes
from sparse_rl.attention.kernels.sdpa import sdpa


class ReplayView(TraceView):
    """Replays traces that record only evictions, in the section evict_at, int32 [layers, rows, kv heads, columns]."""

    replays: ClassVar = frozenset({"evict_at"})
    requires: ClassVar = replays

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        evict_at = batch["evict_at"]
        pinned = self.device.type == "cuda" and not evict_at.is_pinned()
        self.evict_at = evict_at.pin_memory() if pinned else evict_at
        width = evict_at.shape[-1]
        # A layer without evictions needs no mask: causal attention is enough once rows are shifted to column 0.
        self.causal = (~((evict_at > 0) & (evict_at < width)).flatten(1).any(1)).tolist()
        self.starts = (evict_at[0, :, 0] == 0).long().cumprod(-1).sum(-1).tolist()
        self._fetched: dict[int, Tensor] = {}
        self._last = -1
        self._stream = _side_stream(self.device) if self.device.type == "cuda" else None
        self._arrived: dict[int, torch.cuda.Event] = {}

    @classmethod
    def holds(cls, config: Any, replayed: Replayed) -> list[tuple[str, int, str]]:
        """See `TraceView.holds`. On a GPU, the kernel `auto` is assumed to be FlexAttention."""
        rows, kv_heads, length, kernel = replayed.rows, replayed.kv_heads, replayed.length, replayed.kernel
        itemsize = 8 if kernel == "dense" else replayed.itemsize
        if kernel.startswith("flex") or (kernel == "auto" and replayed.cuda):
            scope = "one layer at a time" if replayed.layers == 1 else "of every layer: no checkpointing"
            return [("tiles", replayed.layers * tiles_bytes(rows, kv_heads, length), f"FlexAttention, {scope}")]
        if kernel in ("auto", "gather"):
            seen, prompt = config.schedule.most_decoding(replayed.prompt, length), min(replayed.prompt, length)
            size = gathered_bytes(rows * kv_heads, prompt, length, seen, replayed.head_dim, itemsize, replayed.layers)
            return [("gathered keys", size, "replay attention: keys, values and masks, at most")]
        note = f"replay attention, one layer at a time: {1 + itemsize} bytes for each kv head, query and token"
        return [("mask of one layer", sdpa_mask_bytes(rows, kv_heads, length, itemsize), note)]

    def layer(self, index: int) -> Tensor:
        """Return one layer's evict_at on the device, int32 [rows, kv heads, columns], and prefetch the next layer's.

        The next layer is the following one in a forward pass, and the preceding one in a backward pass.
        """
        step = -1 if index < self._last else 1
        wanted = [index] if index == self._last else [index, index + step]
        if index != self._last:
            self._fetched = {i: t for i, t in self._fetched.items() if i in wanted}
        for i in wanted:
            if i not in self._fetched and 0 <= i < len(self.causal) and not self.causal[i]:
                self._fetched[i] = self._fetch(i)
        self._last = index
        if index in self._arrived:
            torch.cuda.current_stream(self.device).wait_event(self._arrived.pop(index))
        return self._fetched[index]

    def _fetch(self, index: int) -> Tensor:
        """Copy one layer's evict_at to the device; on a GPU, a side stream copies it while other work runs."""
        if self._stream is None:
            return self.evict_at[index].to(self.device, copy=True)
        with torch.cuda.stream(self._stream):
            slice_ = self.evict_at[index].to(self.device, non_blocking=True, copy=True)
            self._arrived[index] = self._stream.record_event()
        slice_.record_stream(torch.cuda.current_stream(self.device))
        return slice_

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if self.causal[layer]:
            return _causal(query, key, value, scaling, self.starts)
        return masked_attention(lambda: self.layer(layer), query, key, value, scaling, self.kernel)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float, starts: list[int]) -> Tensor:
    """Compute causal attention of rows whose first tokens are in the columns `starts`, by rolling these to column 0."""
    if not any(starts):
        return sdpa(query, key, value, scaling, causal=True)

    def rolled(x: Tensor, direction: int) -> Tensor:
        return torch.stack([row.roll(direction * start, 1) for row, start in zip(x, starts, strict=True)])

    return rolled(sdpa(rolled(query, -1), rolled(key, -1), rolled(value, -1), scaling, causal=True), 1)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the side stream that all views on a device share: torch's allocator reserves memory for every stream."""
    return torch.cuda.Stream(device)
