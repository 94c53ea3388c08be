"""LayeredCache: a separate cache for each range of layers, under the policy of that range.

Each cache keeps its own counts, because the number of entries held differs between layers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sparse_rl.methods.eviction.cache import EvictingCache
from sparse_rl.methods.pages.layered import Layered
from sparse_rl.policies.cache import make_cache
from sparse_rl.trace import EvictionTrace

OF_LAYERS = {"opened": -1, "pi": 0.0}  # sections with values for all layers, and their filler for layers without pages


class LayeredCache:
    past = 0
    piece = None

    def __init__(self, policy: Layered) -> None:
        ends = list(accumulate(policy.spans))
        ranges = [range(end - span, end) for end, span in zip(ends, policy.spans, strict=True)]
        self.parts: list[tuple[range, EvictingCache]] = [
            (layers, make_cache(part)) for layers, part in zip(ranges, policy.parts, strict=True) if layers
        ]

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
        forked = copy.copy(self)
        forked.parts = [(layers, cache.fork(rows)) for layers, cache in self.parts]
        return forked

    def queries(self, layer: int) -> Tensor:
        return self._of(layer).queries(layer)

    def trace(self, row: int, length: int) -> EvictionTrace:
        """Return the trace of one row, of `length` tokens.

        Sections with values for each layer get filler values for layers without pages. If there are pages, the section
        paged_layers names the layers that have them.
        """
        evict_at = torch.cat([cache.evict_at(row, length) for _, cache in self.parts])
        sections: dict[str, Tensor] = {}
        paged: list[int] = []
        for layers, cache in self.parts:
            part_sections = cache.further(row, length)
            paged += layers if "opened" in part_sections else []
            for name, values in part_sections.items():
                if name not in OF_LAYERS:
                    sections[name] = values  # a section without a layer axis is the same in all parts
                    continue
                empty = values.new_full((len(evict_at), *values.shape[1:]), OF_LAYERS[name])
                sections.setdefault(name, empty)[layers.start : layers.stop] = values
        if paged:
            sections["paged_layers"] = torch.tensor(paged, dtype=torch.int32)
        return EvictionTrace.recorded(evict_at, sections)

    def allocated_bytes(self) -> int:
        return sum(cache.allocated_bytes() for _, cache in self.parts)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return self._of(layer).attend(layer, query, key, value, scaling)

    def _of(self, layer: int) -> EvictingCache:
        return next(cache for layers, cache in self.parts if layer in layers)
