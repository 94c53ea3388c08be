"""Eviction replay, training under exactly the attention that the sampler had; and which cache or view has which layer.

The traces of a micro-batch stay in host memory. When a layer runs, its slice of evict_at is copied to the device, the
next layer's slice is prefetched, and the layer's mask is made, used and dropped; a backward pass that recomputes the
layer repeats this. FlexAttention's tiles, which contain evict_at, are instead made for all layers at once, and kept for
the backward pass. If they exceed KEPT bytes, they are made for one block of layers after the other, and made again in a
backward pass that recomputes the layers.

A layer with a sliding window sees what the model decides (windows.py), any other layer what the cache policy decides,
and the policy `layered` has a cache for each range of layers. A LayerMap says which view or cache has which layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sparse_rl.attention.families import windows_of
from sparse_rl.attention.interface import KVView, TraceView
from sparse_rl.attention.windows import WindowCache
from sparse_rl.experts import RouterRecord, RouterReplay
from sparse_rl.kernels.exact import sdpa
from sparse_rl.kernels.flex import Tiles, padded, tiles_bytes, tiles_of
from sparse_rl.kernels.masked import masked_attention
from sparse_rl.methods.config import CONFIGS
from sparse_rl.states.mixers import Sequences, States
from sparse_rl.trace import EvictionTrace, TraceError, batch_traces, pinned, policy_part

KEPT = 2**27  # bytes of the tiles of a block of layers; one layer may have more


class ReplayView(TraceView):
    """Replays traces that record only evictions, in the section evict_at, int32 [layers, rows, kv heads, columns]."""

    replays: ClassVar = frozenset({"evict_at"})
    requires: ClassVar = replays
    before = 0  # column of the first query

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        evict_at = batch["evict_at"]
        self.evict_at = pinned(evict_at, self.device)
        width = evict_at.shape[-1]
        # A layer without evictions needs no mask: causal attention is enough once rows are shifted to column 0.
        self.causal = (~((evict_at > 0) & (evict_at < width)).flatten(1).any(1)).tolist()
        self.starts = (evict_at[0, :, 0] == 0).long().cumprod(-1).sum(-1).tolist()
        self._fetched: dict[int, Tensor] = {}
        self._last = -1
        self._stream = _side_stream(self.device) if self.device.type == "cuda" else None
        self._arrived: dict[int, torch.cuda.Event] = {}
        self._made: dict[int, Tiles] = {}  # of one block of layers

    def begin_at(self, column: int) -> None:
        """Expect only the queries from a column on; the keys are those of all columns."""
        self.before, self.causal = column, [False] * len(self.causal)

    def layer(self, index: int) -> Tensor:
        """Return one layer's evict_at on the device, int32 [rows, kv heads, columns], and prefetch the next layer's,
        which is the preceding one in a backward pass.
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

    def tiles(self, index: int) -> Tiles:
        """Return one layer's tiles. Those of its whole block are made, and replace another block's."""
        rows = self.evict_at[0, :, :, 0].numel()
        at_once = max(1, KEPT // tiles_bytes(rows, padded(self.evict_at.shape[-1])))
        block, place = divmod(index, at_once)
        if block not in self._made:
            self._made.clear()  # freed before the next are made
            evict_at = self.evict_at[block * at_once :][:at_once].to(self.device, non_blocking=True)
            self._made[block] = tiles_of(evict_at, self.kernel == "flex_sorted", self.before)
        return self._made[block].layer(place, rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if self.causal[layer]:
            return _causal(query, key, value, scaling, self.starts)
        evict_at = partial(self.tiles if self.kernel.startswith("flex") else self.layer, layer)
        return masked_attention(evict_at, query, key, value, scaling, self.kernel)


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


Place = tuple[Any, int]  # a view or cache, and the index in it of a layer of the model


class LayerMap(KVView):
    """A `kv_view` of several views or caches, each of which computes the attention of some layers.

    of_policy : the view or cache under the policy, which counts the layers without a sliding window from 0
    of_layer : layer of the model -> its place
    """

    def __init__(self, of_policy: Any, of_layer: Mapping[int, Place]) -> None:
        self.of_policy, self.of_layer, self.policy = of_policy, of_layer, of_policy.policy

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        part, place = self.of_layer[layer]
        out: Tensor = part.attend(place, query, key, value, scaling)
        return out


class CacheMap(LayerMap):
    """The caches of all layers, the record of the routers' choices, and the states of layers that have one.

    Implements `Cache` (policies/cache.py).
    """

    routers: RouterRecord | None = None
    states: States | None = None

    def __init__(
        self,
        of_policy: Any,
        of_layer: Mapping[int, Place],
        routers: RouterRecord | None = None,
        states: States | None = None,
    ) -> None:
        super().__init__(of_policy, of_layer)
        self.routers, self.states, self.past, self.piece = routers, states, of_policy.past, of_policy.piece
        # each cache once, in the order of its first layer
        self.parts = list({id(part): part for part, _ in of_layer.values()}.values())

    @property
    def seen(self) -> list[int]:
        seen: list[int] = self.of_policy.seen
        return seen

    @property
    def of_windows(self) -> WindowCache | None:
        return next((part for part in self.parts if isinstance(part, WindowCache)), None)

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        for part in self.parts:
            part.begin_prefill(prompt_lengths, device)
        if self.routers is not None:
            self.routers.begin_prefill(self.seen)
        if self.states is not None:
            self.states.begin_prefill(prompt_lengths)

    def begin_chunk(self, counts: Sequence[int], device: torch.device) -> None:
        for part in self.parts:
            part.begin_chunk(counts, device)
        if self.routers is not None:
            self.routers.begin_chunk(self.seen, counts, device)

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        for part in self.parts:
            part.begin_decode(active, device)
        if self.routers is not None:
            self.routers.begin_chunk(self.seen, list(map(int, active)), device)
        if self.states is not None:
            self.states.begin_decode()

    def select(self, rows: Sequence[int]) -> None:
        for part in [*self.parts, *filter(None, [self.routers, self.states])]:
            part.select(rows)

    def fork(self, rows: Sequence[int]) -> Self:
        records = self.routers and self.routers.fork(rows), self.states and self.states.fork(rows)
        return self._of([part.fork(rows) for part in self.parts], *records)

    def taken(self, row: int) -> Self:
        records = self.routers and self.routers.fork([row]), self.states and self.states.fork([row])
        return self._of([part.taken(row) for part in self.parts], *records)

    @classmethod
    def joined(cls, caches: Sequence[Self]) -> Self:
        parts = [type(ours[0]).joined(ours) for ours in zip(*(cache.parts for cache in caches), strict=True)]
        routers = [cache.routers for cache in caches if cache.routers is not None]
        states = [cache.states for cache in caches if cache.states is not None]
        records = RouterRecord.joined(routers) if routers else None, States.joined(states) if states else None
        return caches[0]._of(parts, *records)

    def _of(self, parts: Sequence[Any], routers: RouterRecord | None, states: States | None) -> Self:
        """Return a map of other caches, each in the place of the one of `self.parts` with its index."""
        of_part = {id(part): other for part, other in zip(self.parts, parts, strict=True)}
        places = {layer: (of_part[id(part)], place) for layer, (part, place) in self.of_layer.items()}
        return type(self)(of_part[id(self.of_policy)], places, routers, states)

    def trace(self, row: int, length: int) -> EvictionTrace:
        trace: EvictionTrace = self.of_policy.trace(row, length)
        if self.of_windows is not None:
            trace = trace.beside_windows(self.of_windows.sizes)
        if self.routers is None:
            return trace
        return trace.beside({"routed": self.routers.routed(row, length)})

    def allocated_bytes(self) -> int:
        return sum(part.allocated_bytes() for part in [*self.parts, *filter(None, [self.states])])


def places(of_policy: Any, of_windows: Any, windows: Sequence[int], counted: bool = True) -> dict[int, Place]:
    """Return the place of each layer of a model: `of_windows` for layers with a sliding window, else `of_policy`.

    windows : the window of each layer in tokens, 0 for a layer without one
    counted : True if `of_windows` counts its layers from 0, as `of_policy` does; a WindowCache has the model's indices
    """
    result: dict[int, Place] = {}
    for layer, window in enumerate(windows):
        before = sum((other > 0) == (window > 0) for other in windows[:layer])
        result[layer] = (of_windows, before if counted else layer) if window else (of_policy, before)
    return result


def map_of_caches(
    of_policy: Any, of_windows: WindowCache, routers: RouterRecord | None = None, states: States | None = None
) -> CacheMap:
    return CacheMap(of_policy, places(of_policy, of_windows, of_windows.sizes, counted=False), routers, states)


def map_of_traces(
    view: Any, batch: Mapping[str, Tensor], device: torch.device | str, kernel: str = "gather"
) -> LayerMap:
    """Return the map of a view of the policy's decisions, with the windows and experts of a batch of traces."""
    windowed = batch.get("windowed", torch.zeros(len(batch["evict_at"])))
    of_windows = ReplayView({"evict_at": batch["evict_at"][windowed > 0]}, device, kernel) if windowed.any() else None
    made = LayerMap(view, places(view, of_windows, windowed.tolist()))
    made.routers = RouterReplay(batch["routed"], device) if "routed" in batch else None
    return made


def map_of_model(view: Any, config: Any, lengths: Tensor, width: int, kernel: str = "gather") -> LayerMap:
    """Return the map of a view that decides in the forward pass, with the sliding windows of a model, for rows of
    `lengths` tokens, int64 [rows], right-padded to `width`.
    """
    windows, of_windows = windows_of(config), None
    if any(windows):
        token = torch.arange(width, dtype=torch.int32)
        leaves = token + torch.tensor(list(filter(None, windows)), dtype=torch.int32)[:, None]
        evict_at = leaves[:, None].where(token < lengths.cpu()[:, None], 0)  # 0: no query sees padding
        evictions = evict_at[:, :, None].expand(-1, -1, config.num_key_value_heads, -1).contiguous()
        of_windows = ReplayView({"evict_at": evictions}, lengths.device, kernel)
    made = LayerMap(view, places(view, of_windows, windows))
    made.states = Sequences.right_padded(lengths.tolist())
    return made


NOT_RECORDED = (
    "a compacted context can be replayed only for a dense model, with `chunking: kv`, and either `policy: evict` or "
    "`policy: am` with `fit: ridge` and reference queries of the context's own tokens, `queries: [context]` or "
    "`queries: [window]`"
)


def views() -> list[type[TraceView]]:
    with_contexts = [config.part("context_view") for config in CONFIGS.values() if config.context_view_class]
    return list(dict.fromkeys([*(config.part("view") for config in CONFIGS.values()), *with_contexts]))


def make_view(
    traces: Sequence[EvictionTrace],
    starts: Sequence[int],
    width: int,
    device: torch.device | str,
    kernel: str = "gather",
    through: bool = True,
) -> LayerMap:
    """Make the view that replays the traces. Pass the view to the model as `kv_view`, with NO_MASK as attention_mask.

    traces : one trace for each row of the batch
    starts : the column of each row's first token; all 0 means right padding
    width : number of columns of the batch
    device : the device of the model
    kernel : one of ATTENTION_KERNELS
    through : under the policy am, True if gradients flow through the refitted biases and values

    Raises TraceError if no view replays all sections of the traces, or if `batch_traces` cannot batch them.
    """
    whole = batch_traces(traces, starts, width)
    batch = policy_part(whole)
    for view in views():
        if view.requires <= batch.keys() <= view.replays:
            made = map_of_traces(view(batch, device, kernel, through), whole, device, kernel)
            made.states = Sequences(
                (row, start + first, start + end)
                for row, (trace, start) in enumerate(zip(traces, starts, strict=True))
                for first, end in pairwise((0, *(trace.documents or (len(trace),))))
            )
            return made
    abilities = "; ".join(f"{view.__name__} replays {', '.join(sorted(view.replays))}" for view in views())
    why = f"; {NOT_RECORDED}" if batch.keys() == {"evict_at", "compacted_at"} else ""
    raise TraceError(f"no view replays traces with the sections {', '.join(batch)}{why} ({abilities})")
