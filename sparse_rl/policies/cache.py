"""What a cache of the hf engine is, how a policy's is made, and what one takes, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from sparse_rl.attention.interface import KVView
from sparse_rl.policies.base import Policy
from sparse_rl.trace import EvictionTrace

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Cache(KVView, Protocol):
    """The caches of all layers for B sequences, as the hf engine drives them.

    `begin_prefill` and one forward over the right-padded prompts come first; then, per token, `begin_decode` and one
    forward.

    seen : the tokens that each row has seen
    past : tokens that all rows have in common before position 0 of what is fed
    piece : tokens of a long prompt that one forward reads; None: all
    """

    past: int
    piece: int | None

    @property
    def seen(self) -> list[int]: ...

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """The next forward brings whole prompts [B, max P], right-padded; or one piece of them."""

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        """The next forward brings one token per row; rows that are not active are frozen, for good."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be taken several times (one prompt, many samples)."""

    def fork(self, rows: Sequence[int]) -> Self:
        """A cache of its own with these rows, in this order; see `select`."""
        ...

    def queries(self, layer: int) -> Tensor:
        """The last queries of each row, oldest first: [B, Hq, W, D], W = policy.last_queries."""
        ...

    def trace(self, row: int, length: int) -> EvictionTrace:
        """What one row, of `length` tokens, has recorded."""
        ...

    def allocated_bytes(self) -> int:
        """Bytes of keys and values that are really allocated, all layers."""
        ...


def make_cache(policy: Policy) -> Any:
    """The empty `Cache` of a policy that is bound to a model."""
    return policy.config.part("cache")(policy)


def cache_bytes(entries: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values of one sequence that holds `entries` per kv head."""
    return 2 * layers * kv_heads * head_dim * entries * itemsize


def state_bytes(policy: Policy, entries: int, layers: int, kv_heads: int, head_dim: int) -> int:
    """What a policy and its cache remember of one sequence beside keys and values.

    Of each entry an int64 position and float32 scores, and what the policy remembers of the sequence itself.
    """
    own = sum(value.nbytes for value in policy.sequence_memory(kv_heads, head_dim).values())
    return layers * (kv_heads * entries * (8 + 4 * len(policy.entry_memory)) + own)


def query_bytes(policy: Policy, layers: int, heads: int, head_dim: int, itemsize: int) -> int:
    """The last queries of one sequence, of all `heads` query heads, that a policy scores or fits by."""
    return layers * policy.last_queries * heads * head_dim * itemsize
