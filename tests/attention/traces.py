"""Random traces and row starts of padded batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from sparse_rl.trace import NEVER, EvictionTrace


def trace_of(
    length: int, *, layers: int = 3, kv_heads: int = 2, seed: int = 0, causal: Collection[int] = ()
) -> EvictionTrace:
    """Return a trace in which each token is evicted at a random later time, or never, and none in `causal` layers."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    lifetime = torch.randint(1, max(length, 2), (layers, kv_heads, length), generator=generator)
    evict_at = torch.arange(length) + lifetime
    evict_at[list(causal)] = NEVER
    return EvictionTrace.recorded(evict_at)


def starts_of(side: str, lengths: Sequence[int]) -> list[int]:
    """Return the first real column of each row of a batch that is padded on the "left" or the "right"."""
    return [max(lengths) - n if side == "left" else 0 for n in lengths]
