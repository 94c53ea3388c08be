"""A separate policy for each range of layers (LuKA section 3.3): the policy, its caches, and its replay.

The paper's mixed attention uses lined attention in the first and last layers, and clustered attention in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparse_rl.attention.families import global_layers
from sparse_rl.attention.interface import TraceView
from sparse_rl.attention.views import CacheMap, LayerMap, Place, ReplayView
from sparse_rl.methods.config import LayeredConfig
from sparse_rl.methods.pages.view import PagedView
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import make_cache
from sparse_rl.policies.make import make_policy
from sparse_rl.policies.schedule import PerLayer
from sparse_rl.trace import EvictionTrace


class Layered(Policy):
    config: LayeredConfig
    score_reads = ()

    def __init__(self, config: LayeredConfig, parts: Sequence[Policy] | None = None, layers: int | None = None) -> None:
        super().__init__(config)
        self.parts = [make_policy(part.cache) for part in config.ranges] if parts is None else list(parts)
        # number of layers of each part; taken from the settings until the policy is `bound_to` a model
        self.spans = config.spans(sum(part.layers for part in config.ranges) if layers is None else layers)
        counted = zip(self.spans, self.parts, strict=True)
        self.schedule = PerLayer(parts=tuple((span, part.schedule) for span, part in counted))

    def bound_to(self, model: Any) -> Layered:
        return Layered(self.config, [part.bound_to(model) for part in self.parts], len(global_layers(model.config)))

    def most_read(self, prompt: int, fed: int) -> int:
        read = [part.most_read(prompt, fed) * span for part, span in zip(self.parts, self.spans, strict=True)]
        return math.ceil(sum(read) / sum(self.spans))


OF_LAYERS = {"opened": -1, "pi": 0.0}  # sections with values for all layers, and their filler for layers without pages


def layered_cache(policy: Layered) -> LayeredCache:
    places: dict[int, Place] = {}
    for part, span in zip(policy.parts, policy.spans, strict=True):
        cache, start = make_cache(part), len(places)
        # a cache keeps the indices of the whole, on which random weights of pages depend
        places |= {layer: (cache, layer) for layer in range(start, start + span)}
    return LayeredCache(places[0][0], places)


class LayeredCache(CacheMap):
    """A separate cache for each range of layers, with its own counts: the number of entries held differs."""

    def trace(self, row: int, length: int) -> EvictionTrace:
        evict_at = torch.cat([cache.evict_at(row, length) for cache in self.parts])
        sections: dict[str, Tensor] = {}
        paged: list[int] = []
        for cache in self.parts:
            layers = [layer for layer, (own, _) in self.of_layer.items() if own is cache]
            part_sections = cache.further(row, length)
            paged += layers if "opened" in part_sections else []
            for name, values in part_sections.items():
                if name not in OF_LAYERS:
                    sections[name] = values  # a section without a layer axis is the same in all parts
                    continue
                empty = values.new_full((len(evict_at), *values.shape[1:]), OF_LAYERS[name])
                sections.setdefault(name, empty)[layers] = values
        if paged:
            sections["paged_layers"] = torch.tensor(paged, dtype=torch.int32)
        return EvictionTrace.recorded(evict_at, sections)


class LayeredView(TraceView, LayerMap):
    """Replays pages in the layers that the trace section paged_layers lists, and evictions in the other layers."""

    replays: ClassVar = PagedView.replays | {"paged_layers"}
    requires: ClassVar = PagedView.requires | {"paged_layers"}

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        layers, how = range(len(batch["evict_at"])), (self.device, self.kernel, self.through)
        paged = batch["paged_layers"].tolist()
        evicting = [layer for layer in layers if layer not in paged]
        places: dict[int, Place] = {}
        if paged:
            of_layers = {name: values[paged] for name, values in batch.items() if name in ("evict_at", "opened", "pi")}
            of_all = {name: batch[name] for name in ("closed_at", "paged_with")}
            view = PagedView(of_layers | of_all, *how)
            places |= {layer: (view, place) for place, layer in enumerate(paged)}
        if evicting:
            view_of_evictions = ReplayView({"evict_at": batch["evict_at"][evicting]}, *how)
            places |= {layer: (view_of_evictions, place) for place, layer in enumerate(evicting)}
        self.of_layer = places
