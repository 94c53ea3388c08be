"""LayeredCache: a cache for each range of layers, under a policy of its own. It has the methods of an EvictingCache.

Each part counts for itself: the entries held differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from rollout.cache import EvictingCache
from rollout.paged import PagedCache
from sparse_rl.policies.base import Policy
from sparse_rl.policies.layered import Layered

OF_LAYERS = {"opened": -1, "pi": 0.0}  # sections of all layers, and what they hold for a layer without pages


class LayeredCache:
    """A cache for each range of layers, with the methods of an EvictingCache.

    parts : (layers, their cache), from the first layer on
    """

    def __init__(self, parts: Sequence[tuple[range, EvictingCache]]) -> None:
        self.parts = list(parts)

    @classmethod
    def of(cls, policy: Layered, make: Callable[[Policy], EvictingCache]) -> LayeredCache:
        """An empty one. policy : bound to the model; make : makes the empty cache of a part's policy"""
        ends = list(accumulate(policy.spans))
        ranges = [range(end - span, end) for end, span in zip(ends, policy.spans, strict=True)]
        return cls([(layers, make(part)) for layers, part in zip(ranges, policy.parts, strict=True) if layers])

    @property
    def seen(self) -> list[int]:
        return self.parts[0][1].seen

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        for _, cache in self.parts:
            cache.begin_prefill(prompt_lengths, device)

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        for _, cache in self.parts:
            cache.begin_decode(active, device)

    def select(self, rows: Sequence[int]) -> None:
        for _, cache in self.parts:
            cache.select(rows)

    def fork(self, rows: Sequence[int]) -> LayeredCache:
        return LayeredCache([(layers, cache.fork(rows)) for layers, cache in self.parts])

    def queries(self, layer: int) -> torch.Tensor:
        return self._of(layer).queries(layer)

    def evict_at(self, row: int, length: int) -> torch.Tensor:
        return torch.cat([cache.evict_at(row, length) for _, cache in self.parts])

    def further(self, row: int, length: int) -> dict[str, torch.Tensor]:
        """Those of the pages, with nothing for the other layers, and which layers they speak of."""
        found: dict[str, torch.Tensor] = {}
        paged = [layer for layers, cache in self.parts if isinstance(cache, PagedCache) for layer in layers]
        total = self.parts[-1][0].stop
        for layers, cache in self.parts:
            for name, values in cache.further(row, length).items():
                if name not in OF_LAYERS:
                    found[name] = values  # settings, the same in all parts
                    continue
                empty = values.new_full((total, *values.shape[1:]), OF_LAYERS[name])
                whole = found.setdefault(name, empty)
                whole[layers.start : layers.stop] = values
        return found | ({"paged_layers": torch.tensor(paged, dtype=torch.int32)} if paged else {})

    def allocated_bytes(self) -> int:
        return sum(cache.allocated_bytes() for _, cache in self.parts)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See `KVView.attend`."""
        return self._of(layer).attend(layer, query, key, value, scaling)

    def _of(self, layer: int) -> EvictingCache:
        return next(cache for layers, cache in self.parts if layer in layers)
