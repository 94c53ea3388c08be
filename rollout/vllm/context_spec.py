"""The scheduler's side of contexts.py: entries and blocks of a sequence that continues a compacted context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from rollout.vllm.messages import Behind
from rollout.vllm.spec import BoundedManager, BoundedSpec

# Request id -> the context that the request continues, until its blocks are freed; a process has only one scheduler
ASKED: dict[str, Behind] = {}


@dataclass(frozen=True, kw_only=True)
class ContextSpec(BoundedSpec):
    """A layer whose sequences may continue a context.

    most : maximum number of entries of a sequence; None means one entry per token
    """

    most: int | None = None

    def most_held(self, longest: int) -> int:
        return min(self.most or longest, longest)


class ContextManager(BoundedManager):
    """Allocates and frees the blocks of ContextSpec layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.full: dict[str, list[KVCacheBlock]] = {}  # name of a context -> the blocks that it fills completely
        self.users: Counter[str] = Counter()  # name of a context -> number of requests that share these blocks

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> int:
        behind, owned = ASKED.get(request_id), self.req_to_blocks.get(request_id, ())
        allocated = owned or (() if behind is None else self.full.get(behind.name, ()))
        return max(0, self.blocks_of(num_tokens - _missing_slots(request_id)) - len(allocated))

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """Give a request the blocks of its context: shared ones if they exist, and new ones for the rest."""
        behind, blocks = ASKED[request_id], self.req_to_blocks[request_id]
        shared = self.full.get(behind.name, [])
        self.block_pool.touch(shared)
        blocks += [*shared, *self.block_pool.get_new_blocks(self.blocks_of(behind.entries) - len(shared))]
        behind.shared = len(shared)
        self.full[behind.name] = blocks[: behind.entries // self.block_size]
        self.users[behind.name] += 1

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        return super().allocate_new_blocks(request_id, num_tokens - _missing_slots(request_id), num_tokens_main_model)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Return a request's blocks, which are to be freed. A context's blocks are shared until its last user ends.

        vLLM's blocks count their references themselves.
        """
        blocks, behind = super().pop_blocks_for_free(request_id), ASKED.pop(request_id, None)
        if blocks and behind is not None:
            self.users[behind.name] -= 1
            if not self.users[behind.name]:
                del self.users[behind.name], self.full[behind.name]
        return blocks


def _missing_slots(request_id: str) -> int:
    """Return the number of a request's tokens minus the number of its slots."""
    behind = ASKED.get(request_id)
    return 0 if behind is None else behind.gone
