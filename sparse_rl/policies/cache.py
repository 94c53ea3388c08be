"""The interface of the hf engine's caches, and sizes of caches in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from sparse_rl.attention.families import cache_shape, windows_of
from sparse_rl.attention.interface import KVView
from sparse_rl.policies.base import Policy
from sparse_rl.trace import EvictionTrace

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Cache(KVView, Protocol):
    """The caches of all layers for B sequences, as the hf engine drives them.

    The engine first calls `begin_prefill` and runs one forward pass over the right-padded prompts. Then, per token, it
    calls `begin_decode` and runs one forward pass.

    seen : number of tokens that each row has seen
    past : number of tokens of a compacted context, which all rows share; tokens that are fed have positions >= past
    piece : maximum number of prompt tokens in a forward pass, which splits long prompts; None means no limit
    """

    past: int
    piece: int | None

    @property
    def seen(self) -> list[int]: ...

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """Prepare for a forward pass over right-padded prompts, or over one piece of them."""

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        """Prepare for a forward pass over one token per row. A row that is not active has ended and changes no more."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in this order. A row may be repeated, to sample several completions of one prompt."""

    def fork(self, rows: Sequence[int]) -> Self:
        """Return a separate cache with `rows`, in this order; see `select`."""
        ...

    def queries(self, layer: int) -> Tensor:
        """Return the last queries of each row, oldest first: [B, query heads, policy.last_queries, head_dim].

        layer : counted from 0 among the layers without a sliding window
        """
        ...

    def trace(self, row: int, length: int) -> EvictionTrace:
        """Return the recorded trace of one row, a sequence of `length` tokens."""
        ...

    def allocated_bytes(self) -> int:
        """Return the number of bytes allocated for keys and values of all layers."""
        ...


def make_cache(policy: Policy) -> Any:
    """Make an empty `Cache` for a policy that is bound to a model."""
    return policy.config.part("cache")(policy)


def cache_bytes(entries: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of one sequence with `entries` entries per kv head."""
    return 2 * layers * kv_heads * head_dim * entries * itemsize


def window_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of one sequence of `tokens` tokens in the layers with a sliding window.

    A layer with the window W holds the last W tokens, under any policy.

    config : the model's configuration, from transformers
    """
    _, kv_heads, head_dim = cache_shape(config)
    return sum(cache_bytes(min(window, tokens), 1, kv_heads, head_dim, itemsize) for window in windows_of(config))


def state_bytes(policy: Policy, entries: int, layers: int, kv_heads: int, head_dim: int) -> int:
    """Return the bytes that a policy and its cache store for one sequence, without keys, values and queries.

    Each entry has an int64 position and the policy's float32 memory of it; the sequence has `Policy.sequence_memory`.
    """
    sequence_memory_bytes = sum(value.nbytes for value in policy.sequence_memory(kv_heads, head_dim).values())
    return layers * (kv_heads * entries * (8 + 4 * len(policy.entry_memory)) + sequence_memory_bytes)


def query_bytes(policy: Policy, layers: int, heads: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes of the last queries of one sequence, over `heads` query heads, that a cache stores."""
    return layers * policy.last_queries * heads * head_dim * itemsize
