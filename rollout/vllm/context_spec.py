"""The scheduler's side of contexts.py: what a sequence behind a compacted context holds, and which blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rollout.vllm.clean import CleanSpec
from sparse_rl.errors import UserError


@dataclass
class Behind:
    """The context that a request goes on from.

    tokens : of the context; entries : of each kv head that are left of them
    shared : how many blocks were taken over from other requests; set when blocks are allocated
    """

    name: str
    tokens: int
    entries: int
    shared: int = 0

    @property
    def gone(self) -> int:
        """By how many slots fewer than its tokens the context takes: positions run ahead of slots by as many."""
        return self.tokens - self.entries


ASKED: dict[str, Behind] = {}  # by request, in the scheduler's process, which has one engine


@dataclass(frozen=True, kw_only=True)
class ContextSpec(CleanSpec):
    """A layer's cache behind contexts; most : entries that a sequence may come to hold, None: as many as tokens"""

    most: int | None = None

    @classmethod
    def bounded(cls, spec: FullAttentionSpec, most: int | None) -> ContextSpec:
        """The specification of a layer that vLLM has described as holding everything."""
        return cls.of(spec, most=most)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        longest = vllm_config.model_config.max_model_len
        entries = longest if self.most is None else min(self.most, longest)
        return -(-entries // self.block_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[ContextSpec]) -> ContextSpec:  # type: ignore[override]
        if any(spec != specs[0] for spec in specs):
            raise UserError("all layers must have the same cache: mixed attention layers are not supported")
        return specs[0]


class ContextManager(FullAttentionManager):
    """Allocates and frees the blocks of ContextSpec layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.full: dict[str, list[KVCacheBlock]] = {}  # by context, the blocks that it fills
        self.users: Counter[str] = Counter()  # by context, the requests that have them
        self.behind: dict[str, str] = {}  # request -> context, while it has blocks

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> int:
        behind, own = ASKED.get(request_id), self.req_to_blocks.get(request_id, ())
        at_hand = own or (() if behind is None else self.full.get(behind.name, ()))
        return max(0, self._blocks(num_tokens - _gone(request_id)) - len(at_hand))

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """The context's: those that are there already, and new ones for the rest."""
        behind, blocks = ASKED[request_id], self.req_to_blocks[request_id]
        shared = self.full.get(behind.name, [])
        self.block_pool.touch(shared)
        blocks += [*shared, *self.block_pool.get_new_blocks(self._blocks(behind.entries) - len(shared))]
        behind.shared = len(shared)
        self.full[behind.name] = blocks[: behind.entries // self.block_size]
        self.users[behind.name] += 1
        self.behind[request_id] = behind.name

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        return super().allocate_new_blocks(request_id, num_tokens - _gone(request_id), num_tokens_main_model)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Blocks count their users themselves; here it is forgotten where they are once the last one ends."""
        name = self.behind.pop(request_id, None)
        if name is not None:
            self.users[name] -= 1
            if not self.users[name]:
                del self.users[name], self.full[name]
        return super().pop_blocks_for_free(request_id)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0

    def _blocks(self, slots: int) -> int:
        return -(-slots // self.block_size)


def _gone(request_id: str) -> int:
    behind = ASKED.get(request_id)
    return 0 if behind is None else behind.gone
