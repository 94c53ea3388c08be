"""The caches of all layers as one: then a compaction is one call, and not one for each layer.

vLLM places all layers in one allocation, at equal distances: layer after layer, or layers within each block. Either way
the blocks of all layers are one row of blocks, and block b of layer l has the place l * of_layer + b * of_block in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparse_rl.errors import UserError


@dataclass(frozen=True)
class Arrangement:
    """What a layer, and a block, add to the place of a block among those of all layers."""

    of_layer: int
    of_block: int

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> Arrangement:
        """That of views [blocks, ...], one for each layer. Raises UserError where they do not lie so."""
        first, layers, blocks = views[0], len(views), views[0].shape[0]
        step = views[1].storage_offset() - first.storage_offset() if layers > 1 else blocks * first.stride(0)
        lies = {
            (v.untyped_storage().data_ptr(), v.storage_offset() - layer * step, v.shape, v.stride())
            for layer, v in enumerate(views)
        }
        if len(lies) == 1:
            if step == blocks * first.stride(0):
                return cls(blocks, 1)
            if layers * step == first.stride(0):
                return cls(1, layers)
        raise UserError("vLLM cannot evict: the caches of its layers do not lie at equal distances in one allocation")

    def joined(self, views: Sequence[Tensor]) -> Tensor:
        """Views [blocks, ...] so arranged, as one [layers x blocks, ...]."""
        first = views[0]
        shape = (len(views) * first.shape[0], *first.shape[1:])
        return first.as_strided(shape, (first.stride(0) // self.of_block, *first.stride()[1:]), first.storage_offset())

    def apart(self, joined: Tensor, layers: int) -> Tensor:
        """[layers x blocks, ...], so arranged, as a view [layers, blocks, ...]."""
        if self.of_block == 1:
            return joined.unflatten(0, (layers, -1))
        return joined.unflatten(0, (-1, layers)).transpose(0, 1)


@dataclass
class Slab:
    """What a compaction works on, of all layers: L x blocks blocks.

    keys, values : [L x blocks, Hkv, block size, D]; positions int32, state float32 [L x blocks, Hkv, block size]
    queries : [L x rows, W, Hq, D]; coordinate : [L x blocks, Hkv, block size], that of the keys which holds biases
        (folded.py)
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: dict[str, Tensor]
    queries: Tensor | None
    coordinate: Tensor | None
