"""The scheduler's side of eviction: a sequence owns only the blocks that its entries need; freed blocks return to vLLM.

After its first compaction, a sequence needs at most `schedule.peak` slots. If the budget grows, it gets blocks as it
grows, but room up to the peak stays reserved for it. One that continues a compacted context has a
slot for each entry of the context, and one for each token of its own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

from torch import Tensor
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode
from vllm.v1.request import RequestStatus

from rollout.vllm.compat.arguments import KEY
from rollout.vllm.sampling import NOT_FINITE
from rollout.vllm.state import Behind, Kept
from sparse_rl.errors import UserError
from sparse_rl.policies.schedule import NEVER, GrowingSchedule, Schedule

FAILED, PREEMPTED = "not finite", "preempted"  # the stop_reason of a request that `end_failed_requests` ends
DONE = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED
WHY = {
    FAILED: "its log-probabilities are not finite: the model's weights or activations are NaN or infinite; serve an "
    "undamaged checkpoint, or use another dtype",
    PREEMPTED: "it was preempted, and a cache that evicts cannot be filled again from the text",
}
# Request id -> the context that the request continues, until its blocks are freed; a process has only one scheduler
ASKED: dict[str, Behind] = {}


@dataclass(eq=False)
class Holder:
    """A request of a group's prompt without the last token, which is never compacted. The samples of the group begin
    with copies of its entries (connector.py), so that the prompt is prefilled once.

    request_id, tokens : id of the request and number of its tokens; it comes after the samples
    waiting : number of samples that have not begun
    blocks : its blocks, once all its tokens are in the cache; None before; empty if it failed
    """

    group: str
    request_id: str = ""
    tokens: int = 0
    waiting: int = 0
    blocks: list[int] | None = None


# Request id -> holder, from its first attempt to begin until its blocks are freed
HOLDING: dict[str, Holder] = {}
KEPT: dict[str, Kept] = {}  # request id -> the cache of the conversation that it continues, likewise


def own_setting(request: Any, name: str) -> Any:
    """Return a setting that the engine has given to a request (`VLLMEngine._sample`), if it has."""
    return (request.sampling_params.extra_args or {}).get(KEY, {}).get(name)


@dataclass(frozen=True, kw_only=True)
class CleanSpec(FullAttentionSpec):
    """A layer whose blocks are set to zero when they are allocated (compat/plugin.py).

    Attention multiplies values that a query does not attend to by zero, and 0 x NaN is NaN. So NaN of a failed sequence
    would reach the next owner of the block. vLLM's kernels on a GPU read nothing after a sequence's end, so a full
    cache there keeps vLLM's own specification.
    """

    @classmethod
    def of(cls, spec: FullAttentionSpec, **more: Any) -> Any:
        """Return a specification with the fields of `spec`. more : fields that FullAttentionSpec does not have"""
        return cls(**{f.name: getattr(spec, f.name) for f in fields(FullAttentionSpec)}, **more)


class BoundedSpec(CleanSpec):
    """A layer in which a sequence may hold fewer entries than it has tokens."""

    def most_held(self, longest: int) -> int:
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
    """A layer under a policy that evicts; `max_prompt` as in CacheConfig, `longest` tokens in a sequence."""

    schedule: Schedule
    max_prompt: int | None = None
    longest: int = NEVER

    def most_held(self, longest: int) -> int:
        return self.schedule.most_held(min(self.max_prompt or longest, longest), longest)


class BoundedManager(FullAttentionManager):
    def blocks_of(self, slots: int) -> int:
        return -(-slots // self.block_size)


class EvictingManager(BoundedManager):
    def __init__(self, kv_cache_spec: EvictingSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.schedule, self.longest = kv_cache_spec.schedule, kv_cache_spec.longest
        self.grows = isinstance(self.schedule, GrowingSchedule)
        # Computed at admission, because vLLM asks for each running request in each step:
        self.claims: dict[str, int] = {}  # request id -> maximum number of blocks that it will need
        self.firsts: dict[str, int] = {}  # request id -> number of tokens at its first compaction, until that has run
        self.prompts: dict[str, int] = {}  # request id -> number of tokens that are prefilled

    def claim(self, prompt: int) -> int:
        """Return the maximum number of blocks that a sequence of any length needs, if `prompt` tokens are prefilled."""
        return self.blocks_of(self.schedule.most_held(prompt, self.longest))

    def counted(self, request_id: str, tokens: int) -> int:
        """Return how many of a request's tokens the schedule counts."""
        kept = KEPT.get(request_id)
        return tokens if kept is None else tokens - kept.gone

    def needed(self, request_id: str, tokens: int) -> int:
        """Return the number of slots that a request needs while its last of `tokens` tokens is computed."""
        prompt, most = self.prompts[request_id], self.claims[request_id] * self.block_size
        tokens = self.counted(request_id, tokens)
        if self.grows and tokens > prompt:
            tokens = self.schedule.most_decoding(prompt, tokens)
        return min(tokens, most)

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
            num_tokens, kept = self.counted(request_id, num_tokens), KEPT.get(request_id)
            if kept is not None and kept.prompt:
                num_tokens = 0  # its tokens are read one by one
            self.claims[request_id], self.firsts[request_id] = self.claim(num_tokens), self.schedule.first(num_tokens)
            self.prompts[request_id] = num_tokens
            if request_id in HOLDING:
                self.claims[request_id] = self.blocks_of(num_tokens)
                del self.firsts[request_id]
                # holders that fill the pool would wait forever: beside all of them, a sample of each must fit
                most = sum(self.blocks_of(h.tokens) + self.claim(h.tokens + 1) for h in HOLDING.values())
                if most >= self.block_pool.num_gpu_blocks:
                    return most
            others = ((r, blocks) for r, blocks in self.req_to_blocks.items() if r != request_id and blocks)
            return self.claims[request_id] + sum(self.claims[r] - len(blocks) for r, blocks in others)
        need = self.blocks_of(self.needed(request_id, num_tokens))
        return max(0, need - len(self.req_to_blocks.get(request_id, ())))

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int, *_: Any, **__: Any
    ) -> None:
        """Give a sample the blocks for its holder's entries, or a conversation those for its kept entries, which vLLM
        must not clear: it would clear the copies.
        """
        entries = KEPT[request_id].entries if request_id in KEPT else num_external_computed_tokens
        super().allocate_external_computed_blocks(request_id, num_local_computed_tokens, entries, False)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        return super().allocate_new_blocks(request_id, self.needed(request_id, num_tokens), num_tokens_main_model)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that a request will not need again once its first compaction has run."""
        if self.counted(request_id, processed_computed_tokens) < self.firsts.get(request_id, NEVER):
            return
        del self.firsts[request_id]
        self.claims[request_id] = keep = self.claim(0)
        blocks = self.req_to_blocks[request_id]
        if tail := blocks[keep:]:
            del blocks[keep:]
            self.block_pool.free_blocks(reversed(tail))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        for numbers in (self.claims, self.firsts, self.prompts):
            numbers.pop(request_id, None)
        for requests in (HOLDING, KEPT):
            requests.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)


@dataclass(frozen=True, kw_only=True)
class ContextSpec(BoundedSpec):
    """A layer whose sequences may continue a context, with at most `most` entries; None means one entry per token."""

    most: int | None = None

    def most_held(self, longest: int) -> int:
        return min(self.most or longest, longest)


class ContextManager(BoundedManager):
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
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        """Give a request the blocks of its context: shared ones if they exist, and new ones for the rest. None is set
        to zero by vLLM: `ContextState` fills them.
        """
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
        """Return a request's blocks, which are to be freed. A context's are shared until its last user ends."""
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


def refuse_spec(spec: Any) -> None:
    """Raise UserError for a layer that is not full attention: other caches may drop or pack entries."""
    if type(spec) is not FullAttentionSpec or spec.head_size_v != spec.head_size:
        raise UserError(f"vLLM cannot evict from layers with a {type(spec).__name__}; use a full cache")
    if spec.kv_quant_mode != KVQuantMode.NONE:
        raise UserError("vLLM cannot evict from a quantized cache; set --kv-cache-dtype auto")


def refuse_cache(kv_cache_config: Any, kv_caches: dict[str, Tensor] | None = None) -> None:
    """Raise UserError for a cache with layers that are not BoundedSpec layers, or with blocks that a kernel splits."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], BoundedSpec):
        raise UserError("vLLM cannot evict: the attention backend is not ours; set --attention-backend CUSTOM")
    for cache in (kv_caches or {}).values():
        if (cache.shape[0], cache.shape[2]) != (kv_cache_config.num_blocks, specs[0].block_size):
            raise UserError(f"vLLM cannot evict from split blocks; set block_size to the kernel's {cache.shape[2]}")


def reset_after_rpc() -> None:
    """Make a server forget its conversations when methods of its workers are called, which may replace weights."""
    from vllm.v1.engine.core import EngineCore

    call: Any = EngineCore.collective_rpc
    if hasattr(call, "__wrapped__"):
        return

    @wraps(call)
    def call_and_reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = call(self, *args, **kwargs)
        if hasattr(self, "scheduler"):  # which is made after the cache
            self.scheduler.reset_connector_cache()
        return results

    EngineCore.collective_rpc = call_and_reset  # type: ignore[method-assign]


# ---- requests that cannot continue ----------------------------------------------------------------------------------


def end_failed_requests() -> None:
    """Make vLLM's scheduler end a request, with finish_reason "error", if its log-probs are not finite or if it lost an
    evicting cache: its prompt and its sampled tokens have been prefilled again, densely. Tokens of earlier steps stay.
    """
    update: Any = Scheduler._update_request_with_output

    @wraps(update)
    def update_or_end(self: Any, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        specs = (group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups)
        if NOT_FINITE in new_token_ids:
            why = FAILED
        elif request.num_preemptions and any(isinstance(spec, EvictingSpec) for spec in specs):
            why = PREEMPTED
        else:
            return update(self, request, new_token_ids, *args, **kwargs)
        request.status, request.stop_reason, request.resumable = RequestStatus.FINISHED_ERROR, why, False
        logging.getLogger("vllm.sparse_rl").error("request %s ended: %s", request.request_id, WHY[why])
        return [], True

    Scheduler._update_request_with_output = update_or_end  # type: ignore[method-assign]
