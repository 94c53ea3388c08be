"""The memory of a layer, or of all layers as one: then a compaction is one call, and not one for each layer.

vLLM places all layers in one allocation, at equal distances: layer after layer, or layers within each block. Either way
the blocks of all layers are one row of blocks, and block b of layer l has the place l * of_layer + b * of_block in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arrangement:
    """What a layer, and a block, add to the place of a block among those of all layers."""

    of_layer: int
    of_block: int

    @classmethod
    def of(cls, views: Sequence[torch.Tensor]) -> Arrangement | None:
        """That of views [blocks, ...] of one allocation, one for each layer; None: they are not at equal distances."""
        first, blocks = views[0], views[0].shape[0]
        step = views[1].storage_offset() - first.storage_offset() if len(views) > 1 else blocks * first.stride(0)
        wanted = first.shape, first.stride(), first.untyped_storage().data_ptr(), first.storage_offset()
        for number, view in enumerate(views):
            start = view.storage_offset() - number * step
            if (view.shape, view.stride(), view.untyped_storage().data_ptr(), start) != wanted:
                return None
        if step == blocks * first.stride(0):
            return cls(blocks, 1)
        return cls(1, len(views)) if first.stride(0) == len(views) * step else None

    def joined(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """Views [blocks, ...] so arranged, as one [layers x blocks, ...]."""
        first = views[0]
        shape = (len(views) * first.shape[0], *first.shape[1:])
        return first.as_strided(shape, (first.stride(0) // self.of_block, *first.stride()[1:]), first.storage_offset())

    def filled(self, shape: Sequence[int], value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor [layers, blocks, ...], so arranged."""
        layers, blocks, *rest = shape
        if self.of_block == 1:
            return torch.full(tuple(shape), value, dtype=dtype, device=device)
        return torch.full((blocks, layers, *rest), value, dtype=dtype, device=device).transpose(0, 1)


APART = Arrangement(0, 1)  # of layers that are not joined


@dataclass
class Slab:
    """What a compaction works on, of one layer or of all.

    keys, values : [blocks, Hkv, block size, D]; positions int32, state float32 [blocks, Hkv, block size]
    queries : [rows, W, Hq, D]; coordinate : [blocks, Hkv, block size], that of the keys which holds biases (folded.py)
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    state: dict[str, torch.Tensor]
    queries: torch.Tensor | None
    coordinate: torch.Tensor | None

    def moved(self) -> list[torch.Tensor]:
        """The tensors that a compaction moves with an entry."""
        return [self.keys, self.values, self.positions, *self.state.values()]
