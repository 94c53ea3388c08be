"""Fixtures of the attention tests: random traces and row starts of padded batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pytest
import torch

from sparse_rl.trace import NEVER, EvictionTrace


def random_trace(
    length: int, *, layers: int = 3, kv_heads: int = 2, seed: int = 0, causal: Collection[int] = ()
) -> EvictionTrace:
    """Return a trace in which each token is evicted at a random later time, or never; the layers in `causal` evict
    nothing.
    """
    generator = torch.Generator().manual_seed(1000 * seed + length)
    lifetime = torch.randint(1, max(length, 2), (layers, kv_heads, length), generator=generator)
    evict_at = torch.arange(length) + lifetime
    evict_at[list(causal)] = NEVER
    return EvictionTrace.recorded(evict_at)


@pytest.fixture(scope="session")
def trace_of() -> Callable[..., EvictionTrace]:
    """trace_of(length, layers=3, kv_heads=2, seed=0, causal=()) -> a random trace."""
    return random_trace


@pytest.fixture(scope="session")
def starts_of() -> Callable[[str, Sequence[int]], list[int]]:
    """starts_of("left" | "right", lengths) -> the first real column of each row of a padded batch."""
    return lambda side, lengths: [max(lengths) - n if side == "left" else 0 for n in lengths]
