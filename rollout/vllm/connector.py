"""The channel between scheduler and worker, over vLLM's KV connector interface. No cache is transferred.

To the worker, with every step: which requests begin, which end, and which are due to compact after this forward.
From the worker: which tokens each compaction dropped, one rank's heads each. When a request finishes, its record leaves
with its output as `kv_transfer_params`.

The scheduler frees finished requests before it reads a step's record. Nothing is lost: a compaction of the last step
drops tokens that no query can miss any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput

from rollout.vllm import compat
from sparse_rl.trace import NEVER


@dataclass(frozen=True)
class Due:
    """A request that compacts after this forward: its first block, tokens seen, entries held, and left by that."""

    request_id: str
    block: int
    seen: int
    held: int
    left: int


@dataclass
class Running:
    """A request that was admitted: its first block, the tokens prefilled densely, `seen` at its next compaction."""

    block: int
    prompt: int
    due: int


@dataclass
class Step(KVConnectorMetadata):
    """What the worker needs to know of one step.

    ended : first blocks of requests that no longer run; read before `begun`, which may reuse a block
    begun : (first block, tokens that are prefilled densely)
    """

    ended: list[int] = field(default_factory=list)
    begun: list[tuple[int, int]] = field(default_factory=list)
    due: list[Due] = field(default_factory=list)


@dataclass
class Dropped:
    """What one compaction dropped of R requests: counts[r] of each head of request r.

    positions int32 [L, the sum of Hkv x counts], request by request, head by head
    """

    request_ids: list[str]
    at: list[int]
    counts: list[int]
    positions: np.ndarray

    def of_each(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """(request, at, positions [L, Hkv, count]) of each request."""
        heads = self.positions.shape[1] // sum(self.counts)
        ends = heads * np.cumsum(self.counts)
        for request_id, at, count, end in zip(self.request_ids, self.at, self.counts, ends, strict=True):
            mine = self.positions[:, end - heads * count : end]
            yield request_id, at, mine.reshape(len(mine), heads, count)


@dataclass
class Record(KVConnectorWorkerMetadata):
    """Tensor-parallel rank -> what its heads dropped in this step."""

    ranks: dict[int, list[Dropped]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Record:
        assert isinstance(other, Record)
        return Record({**self.ranks, **other.ranks})


class TraceConnector(KVConnectorBase_V1):
    """One object on the scheduler's side, one on each worker's."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = compat.cache_config(vllm_config)
        if config is None or not config.evicts:
            raise ValueError(f"TraceConnector needs a cache policy in additional_config.{compat.KEY}")
        compat.refuse_unsupported(vllm_config)
        compat.refuse_cache(kv_cache_config)
        self.config, self.schedule = config, config.policy.schedule
        self.step = Step()
        self.running: dict[str, Running] = {}
        self.dropped: dict[str, dict[int, list[tuple[int, np.ndarray]]]] = {}
        self.preempted: set[str] = set()
        self.admitted: set[str] = set()  # in the step that is being scheduled
        self.state: Any = None

    # ---- the worker's side ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from rollout.vllm.state import CacheState

        compat.refuse_cache(self._kv_cache_config, kv_caches)
        self.state = CacheState(self._vllm_config, self.config, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called in every step before the forward: before attention metadata is built (V1 runner) or after it (V2)."""
        assert isinstance(kv_connector_metadata, Step)
        self.step = kv_connector_metadata
        self.state.begin(self.step.ended, self.step.begun)

    def wait_for_save(self) -> None:
        """Called after the forward of every step."""
        if self.step.due:
            self.state.compact(self.step.due)
        self.step = Step()

    def build_connector_worker_meta(self) -> Record | None:
        record = self.state.take_record()
        return Record({compat.tensor_parallel_rank(): record}) if record else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    # ---- the scheduler's side -------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # queries are captured, and attention observed, by Python between the layers

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request was admitted; after a preemption, again, and all that it had sampled is prefilled densely."""
        first, prompt = blocks.get_block_ids()[0][0], request.num_tokens
        self._end(request.request_id)  # preempted in this very step
        self.admitted.add(request.request_id)
        self.running[request.request_id] = Running(first, prompt, self.schedule.next_due(prompt, 0))
        self.step.begun.append((first, prompt))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        for request_id in scheduler_output.preempted_req_ids or ():
            self.preempted.add(request_id)
            self.dropped.pop(request_id, None)
            if request_id not in self.admitted:
                self._end(request_id)
        self.admitted.clear()
        count = scheduler_output.num_scheduled_tokens
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        before = {r.req_id: r.num_computed_tokens for r in new}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, computed in before.items():
            running, seen = self.running[request_id], computed + count[request_id]
            if seen == running.due:
                held, left = self.schedule.attended(running.prompt, seen), self.schedule.left(running.prompt, seen)
                self.step.due.append(Due(request_id, running.block, seen, held, left))
                running.due = self.schedule.next_due(running.prompt, seen)
        step, self.step = self.step, Step()
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if meta is None:
            return
        for rank, record in meta.ranks.items():
            for dropped in record:
                for request_id, at, positions in dropped.of_each():
                    if request_id in self.running:
                        mine = self.dropped.setdefault(request_id, {}).setdefault(rank, [])
                        mine.append((at, positions))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Its record: {"evict_at": int32 bytes or None where nothing was dropped, "shape": [L, Hkv, S]}."""
        request_id = request.request_id
        self._end(request_id)
        preempted = request_id in self.preempted
        self.preempted.discard(request_id)
        ranks = self.dropped.pop(request_id, {})
        if not self.config.record:
            return False, None
        if preempted:
            return False, {"preempted": True}
        if not ranks:
            return False, {"evict_at": None}
        evict_at = np.concatenate([_evict_at(ranks[r], request.num_tokens) for r in sorted(ranks)], axis=1)
        return False, {"evict_at": evict_at.tobytes(), "shape": list(evict_at.shape)}

    def _end(self, request_id: str) -> None:
        if request_id in self.running:
            self.step.ended.append(self.running.pop(request_id).block)


def _evict_at(events: list[tuple[int, np.ndarray]], length: int) -> np.ndarray:
    """int32 [L, Hkv, length] of one rank's heads."""
    positions = np.concatenate([dropped for _, dropped in events], axis=-1)
    at = np.repeat([at for at, _ in events], [dropped.shape[-1] for _, dropped in events]).astype(np.int32)
    evict_at = np.full((*positions.shape[:2], length), NEVER, dtype=np.int32)
    np.put_along_axis(evict_at, positions.astype(np.int64), at[None, None], axis=-1)
    return evict_at
