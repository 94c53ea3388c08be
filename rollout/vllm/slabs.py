"""Views of the caches of all layers as one tensor, so that a compaction takes one call instead of one call per layer.

vLLM places the caches of all layers in one allocation, at equal distances: layer after layer, or all layers of block 0,
then of block 1, and so on. In both cases the blocks of all layers form one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparse_rl.errors import UserError


@dataclass(frozen=True)
class Arrangement:
    """Position of a block among the blocks of all layers: block b of layer l has index l * of_layer + b * of_block."""

    of_layer: int
    of_block: int

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> Arrangement:
        """Return the arrangement of the layers' caches, [number of blocks, ...] each.

        Raises UserError if they are not at equal distances in one allocation.
        """
        first, layers, blocks = views[0], len(views), views[0].shape[0]
        step = views[1].storage_offset() - first.storage_offset() if layers > 1 else blocks * first.stride(0)
        layouts = {
            (v.untyped_storage().data_ptr(), v.storage_offset() - layer * step, v.shape, v.stride())
            for layer, v in enumerate(views)
        }
        if len(layouts) == 1:
            if step == blocks * first.stride(0):
                return cls(blocks, 1)
            if layers * step == first.stride(0):
                return cls(1, layers)
        raise UserError("vLLM cannot evict: the caches of its layers are not at equal distances in one allocation")

    def joined(self, views: Sequence[Tensor]) -> Tensor:
        """Return the layers' caches, [number of blocks, ...] each, as one view [layers x blocks, ...]."""
        first = views[0]
        shape = (len(views) * first.shape[0], *first.shape[1:])
        return first.as_strided(shape, (first.stride(0) // self.of_block, *first.stride()[1:]), first.storage_offset())

    def apart(self, joined: Tensor, layers: int) -> Tensor:
        """Return a tensor [layers x blocks, ...] as a view [layers, number of blocks, ...]."""
        if self.of_block == 1:
            return joined.unflatten(0, (layers, -1))
        return joined.unflatten(0, (-1, layers)).transpose(0, 1)


@dataclass
class Slab:
    """The tensors that a compaction reads and writes, for the blocks of all L layers.

    keys, values : [L x blocks, Hkv, block size, D]
    positions : int32 [L x blocks, Hkv, block size]
    state : name -> float32 [L x blocks, Hkv, block size], the policy's memory per entry
    queries : [L x rows, W, Hq, D], the last W queries of each request, one row per request; None if the policy needs
        none
    coordinate : [L x blocks, Hkv, block size], the keys' additional coordinate that holds biases (folded.py), if any
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: dict[str, Tensor]
    queries: Tensor | None
    coordinate: Tensor | None
