"""Replay attention: train under exactly the attention that the sampler had.

The traces of a micro-batch stay in host memory. A layer's slice of evict_at comes to the device when that layer runs,
the next layer's is fetched ahead, the layer's mask is made, used and dropped; the same again in the backward pass,
which recomputes it. So at most one layer's mask and two layers' evict_at are alive on the device. (FlexAttention's
lists of tiles are small, and kept for the backward pass; with gradient checkpointing those of one layer.)

The mask is a function of evict_at alone, so `masked_attention` is the seam between the paths (PATHS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.flex import flex_attend
from sparse_rl.attention.interface import sdpa
from sparse_rl.attention.reference import dense_attention
from sparse_rl.trace import EvictionTrace, batch_traces

# sdpa: S x S masks. flex, flex_sorted: tiles of keys in natural order, or in segments sorted by evict_at. dense: the
# reference, in float64.
PATHS = ("sdpa", "flex", "flex_sorted", "dense")


class ReplayView:
    """A `kv_view` for training: B padded sequences and their evictions.

    Parameters
    ----------
    evict_at : int32 [L, B, Hkv, S] in host memory, from `batch_traces`: values shifted with their rows, pad keys 0
    device : where the model runs
    path : one of PATHS
    """

    def __init__(self, evict_at: torch.Tensor, device: torch.device | str, path: str = "sdpa") -> None:
        self.device, self.path = torch.device(device), path
        pinned = self.device.type == "cuda" and not evict_at.is_pinned()
        self.evict_at = evict_at.pin_memory() if pinned else evict_at
        width = evict_at.shape[-1]
        # A layer where nothing was evicted and no pad key stands before a real one needs no mask: causal is enough.
        leading_pad = evict_at[:, :, :, 0] == 0
        evicted = (evict_at > 0) & (evict_at < width)
        self.causal = (~(evicted.flatten(1).any(1) | leading_pad.flatten(1).any(1))).tolist()
        self._fetched: dict[int, torch.Tensor] = {}
        self._last = -1
        self._stream = _side_stream(self.device) if self.device.type == "cuda" else None
        self._arrived: dict[int, torch.cuda.Event] = {}

    @classmethod
    def of(
        cls,
        traces: Sequence[EvictionTrace],
        starts: Sequence[int],
        width: int,
        device: torch.device | str,
        path: str = "sdpa",
    ) -> ReplayView:
        """The view of ragged traces whose first token stands in column starts[b] of `width`."""
        return cls(batch_traces(traces, starts, width), device, path)

    def layer(self, index: int) -> torch.Tensor:
        """One layer's evict_at on the device, int32 [B, Hkv, S]; the next in the running direction is fetched ahead."""
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

    def _fetch(self, index: int) -> torch.Tensor:
        """On a stream beside the layers', where there is one: the copy takes no time of theirs."""
        if self._stream is None:
            return self.evict_at[index].to(self.device, copy=True)
        with torch.cuda.stream(self._stream):
            slice_ = self.evict_at[index].to(self.device, non_blocking=True, copy=True)
            self._arrived[index] = self._stream.record_event()
        slice_.record_stream(torch.cuda.current_stream(self.device))
        return slice_

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        if self.causal[layer]:
            return sdpa(query, key, value, scaling, causal=True)
        return masked_attention(lambda: self.layer(layer), query, key, value, scaling, self.path)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all views: memory that a stream has used is kept for it."""
    return torch.cuda.Stream(device)


def masked_attention(
    evict_at: Callable[[], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    path: str = "sdpa",
) -> torch.Tensor:
    """query [B, Hq, S, D] over key, value [B, Hkv, S, D] under int32 [B, Hkv, S]: [B, Hq, S, D].

    evict_at : fetches it, in the forward and again in the backward pass (flex: in the forward)
    path : one of PATHS; flex on a CPU is torch's plain operator, which is slow, and whose gradients torch refuses
    """
    if path.startswith("flex"):  # saves lists of tiles, nothing S x S
        sort, compiled = path == "flex_sorted", query.is_cuda
        return flex_attend(evict_at(), query, key, value, scaling, in_segments=sort, compiled=compiled)[0]
    attend = partial(_DENSE[path], evict_at)
    if not torch.is_grad_enabled():
        return attend(query, key, value, scaling)
    # Saving the mask for backward would keep every layer's alive: save q, k, v and make it again.
    return checkpoint(attend, query, key, value, scaling, use_reentrant=False, preserve_rng_state=False)


def _attend(
    evict_at: Callable[[], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    batch, q_heads, width, dim = query.shape
    kv_heads = key.shape[1]
    group = q_heads // kv_heads
    # Fold kv heads into the batch: the mask [B * Hkv, 1, S, S] then serves the group without being repeated.
    mask = visible_mask(evict_at()).view(batch * kv_heads, 1, width, width)
    grouped = query.reshape(batch * kv_heads, group, width, dim)
    key = key.reshape(batch * kv_heads, 1, width, dim).expand(-1, group, -1, -1)
    value = value.reshape(batch * kv_heads, 1, width, dim).expand(-1, group, -1, -1)
    out = sdpa(grouped, key, value, scaling, mask)
    return out.reshape(batch, q_heads, width, dim)


def _reference(
    evict_at: Callable[[], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    return dense_attention(query, key, value, visible_mask(evict_at()), scaling)


_DENSE = {"sdpa": _attend, "dense": _reference}


def visible_mask(evict_at: torch.Tensor) -> torch.Tensor:
    """t <= q < evict_at[t] as bool [B, Hkv, S (query), S (token)], made in place from int32 [B, Hkv, S].

    A position always sees itself (true of every real token; a pad query would otherwise have an empty softmax).
    """
    position = torch.arange(evict_at.shape[-1], device=evict_at.device, dtype=evict_at.dtype)
    mask = position[:, None] < evict_at[:, :, None, :]
    mask.logical_and_(position[:, None] >= position)
    mask.diagonal(dim1=-2, dim2=-1).fill_(True)
    return mask
