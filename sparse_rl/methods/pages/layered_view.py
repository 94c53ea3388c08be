"""Replay of a model whose layers have different kinds of caches; each kind of layer is replayed by its own view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from sparse_rl.attention.interface import KVView, Replayed, TraceView
from sparse_rl.attention.views.replay import ReplayView
from sparse_rl.methods.pages.view import PagedView


class LayeredView(TraceView):
    """Replays pages in the layers that the trace section paged_layers lists, and evictions in the other layers.

    In the other layers, the values of `opened` and `pi` are not used.
    """

    replays: ClassVar = PagedView.replays | {"paged_layers"}
    requires: ClassVar = PagedView.requires | {"paged_layers"}

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        layers, how = range(len(batch["evict_at"])), (self.device, self.kernel, self.through)
        paged = batch["paged_layers"].tolist()
        evicting = [layer for layer in layers if layer not in paged]
        self.of_layer: dict[int, tuple[KVView, int]] = {}  # the view, and the layer's index in it
        if paged:
            of_layers = {name: values[paged] for name, values in batch.items() if name in ("evict_at", "opened", "pi")}
            of_all = {name: batch[name] for name in ("closed_at", "paged_with")}
            view = PagedView(of_layers | of_all, *how)
            self.of_layer |= {layer: (view, place) for place, layer in enumerate(paged)}
        if evicting:
            view_of_evictions = ReplayView({"evict_at": batch["evict_at"][evicting]}, *how)
            self.of_layer |= {layer: (view_of_evictions, place) for place, layer in enumerate(evicting)}

    @classmethod
    def holds(cls, config: Any, replayed: Replayed) -> list[tuple[str, int, str]]:
        """Return the memory of the part that needs most, because layers are replayed one at a time."""
        held = (part.cache.part("view").holds(part.cache, replayed) for part in config.ranges)
        return max(held, key=lambda items: sum(size for _, size, _ in items))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        view, place = self.of_layer[layer]
        return view.attend(place, query, key, value, scaling)
