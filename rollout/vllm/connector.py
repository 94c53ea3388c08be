"""Messages from scheduler to workers in every step (messages.py), over vLLM's KV connector. No cache is transferred."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.core.sched.output import SchedulerOutput

from rollout.vllm.arrivals import ArrivalState
from rollout.vllm.compat import arguments, refusals
from rollout.vllm.messages import Begun, Behind, Due, Step
from rollout.vllm.state import CacheState
from sparse_rl.errors import UserError


class EvictionConnector(KVConnectorBase_V1):
    """Connector with one instance in the scheduler, and one in each worker."""

    kind: ClassVar[type[CacheState]] = CacheState

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = arguments.cache_config(vllm_config)
        if config is None or not config.physical:
            raise UserError(f"{type(self).__name__} needs a policy: set {arguments.KEY} in kv_connector_extra_config")
        refusals.refuse_unsupported(vllm_config, config.full_graphs)
        refusals.refuse_cache(kv_cache_config)
        self.config, self.schedule = config, config.policy.schedule
        self.step = Step()
        self.running: dict[str, Begun] = {}
        self.state: CacheState

    # ---- the worker's side ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        refusals.refuse_cache(self._kv_cache_config, kv_caches)
        kind = ArrivalState if self.schedule.before_attending else self.kind
        self.state = kind(self._vllm_config, self.config, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Remove requests that have ended, and add requests that begin. vLLM calls this before each forward pass.

        The V1 runner builds the attention metadata after this call, the V2 runner before it.
        """
        assert isinstance(kv_connector_metadata, Step)
        self.step = kv_connector_metadata
        self.state.begin(self.step.ended, self.step.begun)

    def wait_for_save(self) -> None:
        """Compact the requests that the scheduler named. vLLM calls this after each forward pass."""
        self.state.after_forward()
        if self.step.due:
            self.state.compact(self.step.due)
        self.step = Step()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    start_load_kv = wait_for_layer_load = save_kv_layer = _nothing  # no cache is transferred

    # ---- the scheduler's side -------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True unless the engine was started with `full_graphs`."""
        return not extra_config.get(arguments.KEY, {}).get("full_graphs", False)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note that a request was admitted. After a preemption, all its tokens are prefilled again, densely."""
        owned = blocks.get_block_ids()[0]
        begun = Begun(request.request_id, owned[0], request.num_tokens, self.behind(request, owned))
        self._end(request.request_id)  # the request may have been preempted in this same step
        self.running[request.request_id] = begun
        self.step.begun.append(begun)

    def behind(self, request: Any, blocks: list[int]) -> Behind | None:
        """Return the compacted context that a request with these blocks continues, if any (contexts.py)."""
        return None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        admitted = {begun.request_id for begun in self.step.begun}
        for request_id in set(scheduler_output.preempted_req_ids or ()) - admitted:
            self._end(request_id)
        count = scheduler_output.num_scheduled_tokens
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        before = {r.req_id: r.num_computed_tokens for r in new}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, computed in before.items():
            begun, seen = self.running[request_id], computed + count[request_id]
            if self.schedule.due(begun.prompt, seen):
                held, kept = self.schedule.attended(begun.prompt, seen), self.schedule.left(begun.prompt, seen)
                self.step.due.append(Due(request_id, begun.block, seen, held, kept))
        step, self.step = self.step, Step()
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._end(request.request_id)
        return False, None

    def _end(self, request_id: str) -> None:
        if request_id in self.running:
            self.step.ended.append(self.running.pop(request_id).block)
