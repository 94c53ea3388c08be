"""Blocks are given out clean: a request that gets one finds zeros in it, not what an earlier one has left there.

Attention multiplies what a query does not see by zero, and zero times NaN is NaN. A block is longer than what is in it,
so NaN of a sequence that has failed would reach the next one that has the block. vLLM clears blocks for some models;
here for every cache whose specification is ours. Of a full cache on a GPU, it is vLLM's own: its kernels there read
nothing behind a sequence's end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig


@dataclass(frozen=True, kw_only=True)
class CleanSpec(FullAttentionSpec):
    """A layer that holds everything, in clean blocks."""

    @classmethod
    def of(cls, spec: FullAttentionSpec, **more: Any) -> Any:
        """The specification of a layer that vLLM has described as holding everything."""
        return cls(**{f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}, **more)


def give_out_clean_blocks() -> None:
    """Have vLLM clear the blocks of our specifications."""
    needed: Any = KVCacheConfig.needs_kv_cache_zeroing

    def needed_or_ours(self: KVCacheConfig) -> bool:
        return needed.fget(self) or any(isinstance(g.kv_cache_spec, CleanSpec) for g in self.kv_cache_groups)

    KVCacheConfig.needs_kv_cache_zeroing = property(needed_or_ours)  # type: ignore[assignment, method-assign]
