"""The scheduler's side of eviction: a sequence owns only the blocks that its entries need; freed blocks return to vLLM.

A compaction runs right after the forward pass that made it due (connector.py). After its first compaction, a sequence
never needs more than `schedule.peak` slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from sparse_rl.errors import UserError
from sparse_rl.policies.schedule import NEVER, Schedule


@dataclass(frozen=True, kw_only=True)
class CleanSpec(FullAttentionSpec):
    """A layer whose blocks are set to zero when they are allocated (compat/plugin.py).

    Attention multiplies values that a query does not attend to by zero, and 0 x NaN is NaN. So NaN of a failed sequence
    would reach the next sequence that gets the block, through unused slots. A full cache on a GPU keeps vLLM's own
    specification, because vLLM's kernels on a GPU read nothing after a sequence's end.
    """

    @classmethod
    def of(cls, spec: FullAttentionSpec, **more: Any) -> Any:
        """Return a specification with the fields of `spec`. more : fields that FullAttentionSpec does not have"""
        return cls(**{f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}, **more)


class BoundedSpec(CleanSpec):
    """A layer in which a sequence may hold fewer entries than it has tokens."""

    def most_held(self, longest: int) -> int:
        """Return the maximum number of entries that a sequence of at most `longest` tokens holds."""
        raise NotImplementedError

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        entries = self.most_held(vllm_config.model_config.max_model_len)
        return -(-entries // self.block_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        if any(spec != specs[0] for spec in specs):
            raise UserError("all layers must have the same cache: mixed attention layers are not supported")
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class EvictingSpec(BoundedSpec):
    """A layer under a policy that evicts.

    max_prompt : length of the longest prompt that the cache must hold whole; None means the model's context length
    longest : maximum number of tokens in a sequence
    """

    schedule: Schedule
    max_prompt: int | None = None
    longest: int = NEVER

    def most_held(self, longest: int) -> int:
        return self.schedule.most_held(min(self.max_prompt or longest, longest), longest)


class BoundedManager(FullAttentionManager):
    """Allocates and frees the blocks of BoundedSpec layers."""

    def blocks_of(self, slots: int) -> int:
        """Return the number of blocks for `slots` slots."""
        return -(-slots // self.block_size)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0


class EvictingManager(BoundedManager):
    """Allocates and frees the blocks of EvictingSpec layers."""

    def __init__(self, kv_cache_spec: EvictingSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.schedule, self.longest = kv_cache_spec.schedule, kv_cache_spec.longest
        # request id -> number of tokens that are prefilled densely, or 0 once these tokens are compacted
        self.prompts: dict[str, int] = {}

    def slots(self, request_id: str, tokens: int) -> int:
        """Return the number of slots that a request needs until `tokens` of its tokens have been processed."""
        return self.schedule.most_held(self.prompts[request_id], tokens)

    def claim(self, prompt: int) -> int:
        """Return the maximum number of blocks that a sequence of any length needs, if `prompt` tokens are prefilled."""
        return self.blocks_of(self.schedule.most_held(prompt, self.longest))

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        if apply_admission_cap:
            # At admission `num_tokens` counts all tokens to prefill, after a preemption also sampled ones. Blocks that
            # running sequences may still need stay reserved, so that no sequence is ever preempted.
            self.prompts[request_id] = num_tokens
            others = ((r, blocks) for r, blocks in self.req_to_blocks.items() if r != request_id and blocks)
            return self.claim(num_tokens) + sum(self.claim(self.prompts[r]) - len(blocks) for r, blocks in others)
        need = self.blocks_of(self.slots(request_id, num_tokens))
        return max(0, need - len(self.req_to_blocks.get(request_id, ())))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        return super().allocate_new_blocks(request_id, self.slots(request_id, num_tokens), num_tokens_main_model)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that a request no longer needs once its first compaction has run."""
        prompt = self.prompts.get(request_id)
        if prompt is None or processed_computed_tokens < self.schedule.first(prompt):
            return
        self.prompts[request_id] = 0
        blocks, keep = self.req_to_blocks[request_id], self.claim(0)
        if tail := blocks[keep:]:
            del blocks[keep:]
            self.block_pool.free_blocks(reversed(tail))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self.prompts.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)
