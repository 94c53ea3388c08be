"""The messages of vLLM's scheduler to its workers in every step, over vLLM's KV connector. No cache is transferred.

A request may continue a compacted context (rollout/context); its own tokens are then never evicted. To vLLM, it seems
that the connector has loaded the context's tokens, so a request keeps its whole prompt and its logical positions. In
the cache, its own tokens follow the context's entries. Requests share the blocks that a context fills completely; each
has its own copy of the last, partly filled block.

The samples of one prompt wait for its holder (scheduler.py), a request of all its tokens but the last. To vLLM, it then
seems that the connector has loaded these tokens, which the workers copy. The holder keeps its blocks until the step in
which the last sample begins.

A conversation (conversations.py) continues the cache that its last turn has left, which the workers keep in host memory
and, to vLLM, the connector loads. To the schedule, the tokens that have left the cache never were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput

from rollout.context.cache import Context, load_context
from rollout.vllm.arrivals import ArrivalState
from rollout.vllm.compat import arguments, paged
from rollout.vllm.memory import most_holders
from rollout.vllm.scheduler import ASKED, DONE, HOLDING, KEPT, Holder, own_setting, refuse_cache, reset_after_rpc
from rollout.vllm.served import Conversations, ReadsSingly
from rollout.vllm.state import Begun, Behind, CacheState, Due, Finished, Kept
from sparse_rl.errors import UserError
from sparse_rl.methods.am.policy import BIAS


@dataclass
class Step(KVConnectorMetadata):
    """The messages of one step to the workers.

    finished : turns of conversations whose entries are to be kept; read before `ended`
    ended : first blocks of requests that no longer run; read before `begun`, which may reuse a block. All are read
        before the forward pass (worker.py), `due` after it
    released : ids of holders whose last sample begins in this step, or will never begin
    let_go : names of conversations whose entries are not kept any longer; read after `begun`
    """

    finished: list[Finished] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    due: list[Due] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    let_go: list[int] = field(default_factory=list)


class EvictionConnector(KVConnectorBase_V1):
    """Connector with one instance in the scheduler, and one in each worker."""

    kind: ClassVar[type[CacheState]] = CacheState

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = arguments.cache_config(vllm_config)
        if config is None or not config.physical:
            raise UserError(f"{type(self).__name__} needs a policy: set {arguments.KEY} in kv_connector_extra_config")
        arguments.refuse_unsupported(vllm_config, config.full_graphs)
        refuse_cache(kv_cache_config)
        self.config, self.schedule = config, config.policy.schedule
        self.most_holders = most_holders(config.policy, vllm_config.scheduler_config.max_num_seqs)
        self.step = Step()
        self.running: dict[str, Begun] = {}
        self.groups: dict[str, Holder] = {}  # name of a group of which a sample waits -> its holder
        self.state: CacheState
        self.conversations: Conversations | None = None  # of a server
        self.mixed: set[str] = set()  # running requests that began before `reset_cache`
        if role == KVConnectorRole.SCHEDULER:
            HOLDING.clear()  # an interrupted run of an engine that was closed may have left some
            KEPT.clear()
            if config.kept:
                block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
                self.conversations = Conversations(config.policy, vllm_config, block, config.kept)
                reset_after_rpc()

    # ---- the worker's side ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        refuse_cache(self._kv_cache_config, kv_caches)
        kind = ArrivalState if self.schedule.before_attending else self.kind
        self.state = kind(self._vllm_config, self.config, kv_caches)

    def wait_for_save(self) -> None:
        """Compact the requests that the scheduler named. vLLM calls this after each forward pass."""
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        self.state.after_forward()
        if step.due:
            self.state.compact(step.due)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the holders whose blocks vLLM may free after this step, and nothing for requests that load a cache."""
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return set(step.released), None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    start_load_kv = wait_for_layer_load = save_kv_layer = _nothing  # no cache is transferred

    # ---- the scheduler's side -------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return not extra_config.get(arguments.KEY, {}).get("full_graphs", False)

    def on_new_request(self, request: Any) -> None:
        if (name := own_setting(request, "group")) is not None:
            self.groups.setdefault(name, Holder(name)).waiting += 1
        elif (holder := self.groups.get(own_setting(request, "holds"))) is not None:  # else all samples were aborted
            holder.request_id, holder.tokens = request.request_id, request.num_tokens

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens that a sample copies from its holder, or whose entries a conversation has kept;
        None if the request must wait: a sample for its holder, a holder for another one to end.
        """
        KEPT.pop(request.request_id, None)  # of an earlier attempt
        if (kept := self._kept(request)) is not None:
            KEPT[request.request_id] = kept
            return kept.seen, False
        if (holder := self.groups.get(own_setting(request, "holds"))) is not None:
            if request.request_id not in HOLDING and len(HOLDING) >= self.most_holders:
                return None, False
            HOLDING[request.request_id] = holder
        elif (holder := self._awaited(request)) is not None:
            return (None if holder.blocks is None else holder.tokens), False
        return 0, False

    def _kept(self, request: Any) -> Kept | None:
        kept, owner = None, own_setting(request, "owner")
        whole = request.num_preemptions or request.skip_reading_prefix_cache
        if (named := own_setting(request, "kept")) is not None:
            kept = Kept(*named)
        elif self.conversations is not None and owner is not None and not whole:
            kept = self.conversations.longest(owner, request.prompt_token_ids)
        if kept is not None and kept.prompt:
            if request.num_preemptions:  # vLLM ends it before it samples (scheduler.py), so it reads all at once
                return replace(kept, prompt=0)
            request.__class__ = ReadsSingly
        return kept

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note that a request was admitted. After a preemption, all its tokens are prefilled again, densely."""
        owned = blocks.get_block_ids()[0]
        fork: tuple[Any, ...] = ()
        if (holder := self._awaited(request)) is not None:
            if holder.blocks:
                fork = holder.request_id, holder.blocks, owned[: len(holder.blocks)]
            self._leave(holder)
        prompt, behind, kept = request.num_tokens, self.behind(request, owned), KEPT.get(request.request_id)
        if kept is not None:
            prompt, fork = kept.prompt or prompt - kept.gone, ("", (), self._filled(owned, kept.entries))
        begun = Begun(request.request_id, owned[0], prompt, behind, kept, *fork)
        self._end(request.request_id)  # the request may have been preempted in this same step
        self.running[request.request_id] = begun
        self.step.begun.append(begun)

    def _filled(self, blocks: list[int], entries: int) -> list[int]:
        return blocks[: -(-entries // self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)]

    def behind(self, request: Any, blocks: list[int]) -> Behind | None:
        """Return the compacted context that a request with these blocks continues, if any."""
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
            counts = begun.prompt, seen - begun.gone
            if request_id not in HOLDING and self.schedule.due(*counts):
                held, kept = self.schedule.attended(*counts), self.schedule.left(*counts)
                self.step.due.append(Due(begun.block, seen, held, kept))
        step, self.step = self.step, Step()
        # each time anew: vLLM does not hear from a step that is interrupted
        step.released = [i for i, holder in HOLDING.items() if holder.blocks and not holder.waiting]
        for request_id in step.released:  # their rows are copied in this step, and free in the next
            self._end(request_id)
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if (holder := self.groups.get(own_setting(request, "holds"))) is not None:
            if request.num_output_tokens:
                holder.blocks = block_ids
                return True, None  # vLLM keeps the blocks until `get_finished` names the holder
            holder.tokens, holder.blocks = 0, []  # it failed or was aborted; samples that do not end prefill the prompt
        elif (holder := self._awaited(request)) is not None:
            self._leave(holder)
        name, owner = own_setting(request, "keep"), own_setting(request, "owner")
        if (name, owner) != (None, None) and request.status in DONE:
            begun = self.running[request.request_id]
            held = self.schedule.held(begun.prompt, request.num_tokens - 1 - begun.gone)
            if self.conversations is not None and request.request_id not in self.mixed:
                name, let_go = self.conversations.add(owner, request.all_token_ids, held, begun.prompt)
                self.step.let_go += let_go
            if name is not None:
                self.step.finished.append(Finished(name, self._filled(block_ids, held)))
        self.mixed.discard(request.request_id)
        self._end(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Let go of all conversations of a server, and keep none that has begun. vLLM calls this to clear its caches,
        and `reset_after_rpc` when the weights may have changed.
        """
        if self.conversations is not None:
            self.step.let_go += self.conversations.clear()
            self.mixed |= self.running.keys()
        return True

    def _awaited(self, request: Any) -> Holder | None:
        """Return the holder of a sample that has never begun."""
        begun = request.num_preemptions or request.request_id in self.running
        return None if begun else self.groups.get(own_setting(request, "group"))

    def _leave(self, holder: Holder) -> None:
        """Count a sample that waits no longer."""
        holder.waiting -= 1
        if not holder.waiting:
            del self.groups[holder.group]

    def _end(self, request_id: str) -> None:
        if request_id in self.running:
            self.step.ended.append(self.running.pop(request_id).block)


# ---- contexts: the worker's side ------------------------------------------------------------------------------------

UNSEEN = -3e4  # replaces a bias of -inf that is stored as a coordinate of a key: kernels may turn -inf into NaN there


class ContextState(CacheState):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.contexts: dict[str, list[tuple[Tensor, ...]]] = {}  # name -> (keys, values, bias) of each layer

    def hold(self, name: str, context: Context) -> None:
        """Keep a context's entries, for this rank's kv heads, in host memory, in place of one of the same name."""
        rank_heads = paged.own_heads(len(self.heads))
        self.contexts[name] = []
        for layer in context.layers:
            missing = context.entries - layer.keys.shape[2]  # all layers have the same blocks; a bias hides the padding
            keys, values = (F.pad(x[0, rank_heads].cpu(), (0, 0, 0, missing)) for x in (layer.keys, layer.values))
            bias = F.pad(layer.bias[0, rank_heads].cpu(), (0, missing), value=float("-inf"))
            self.contexts[name].append((keys.transpose(0, 1), values.transpose(0, 1), bias.T))

    def begin(self, ended: Sequence[int], begun: Sequence[Begun]) -> None:
        self._uncount((), begun)  # others may still run whose first block, one of a context, is the same
        for newcomer in begun:
            if newcomer.behind is not None:
                self._fill(newcomer.behind)

    def _fill(self, behind: Behind) -> None:
        start = behind.shared * self.block_size
        blocks = torch.tensor(behind.blocks, dtype=torch.long, device=self.device)  # empty if all blocks are shared
        for layer, entries in enumerate(self.contexts[behind.name]):
            for cache in self.caches[layer]:
                cache[blocks] = 0  # the last block has slots without entries, which must be zero (`CleanSpec`)
            *keys_values, bias = (x[start:].to(self.device) for x in entries)
            slots = torch.arange(len(bias), device=self.device)
            where = blocks[slots // self.block_size][:, None], self.heads, (slots % self.block_size)[:, None]
            for cache, new in zip(self.caches[layer], keys_values, strict=True):
                cache[where] = new.to(cache.dtype)
            self.state[BIAS][layer][where] = bias
            if self.folded:
                self.folded[layer][where] = bias.clamp(min=UNSEEN).to(self.folded[layer].dtype)


class ContextConnector(EvictionConnector):
    kind = ContextState
    state: ContextState

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.served: list[tuple[list[int], Behind]] = []  # in a server: (tokens, context) that prompts may begin with
        self.compared: WeakKeyDictionary[Any, Behind | None] = WeakKeyDictionary()  # request -> its context
        if role == KVConnectorRole.SCHEDULER:
            for path in self.config.contexts or ():
                context = load_context(path)
                self.served.append((context.tokens, Behind(path, len(context.tokens), context.entries)))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        for path in self.config.contexts or ():
            self.state.hold(path, load_context(path))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        behind = self._behind(request)
        if behind is None:
            return 0, False
        ASKED[request.request_id] = behind
        return behind.tokens, False

    def _behind(self, request: Any) -> Behind | None:
        if request.skip_reading_prefix_cache or request.lora_request is not None:  # its whole prompt is computed
            return None
        if not self.served:  # an engine; a server ignores the name, because a client could write any name
            named = own_setting(request, "context")
            return None if named is None else Behind(*named)
        if request not in self.compared:  # vLLM asks again at each attempt to schedule the request
            prompt = request.prompt_token_ids or ()
            begins = (b for tokens, b in self.served if len(prompt) > len(tokens) and prompt[: len(tokens)] == tokens)
            self.compared[request] = next(begins, None)
        behind = self.compared[request]
        return None if behind is None else replace(behind)

    def behind(self, request: Any, blocks: list[int]) -> Behind | None:
        behind = ASKED.get(request.request_id)
        if behind is None:
            return None
        return replace(behind, blocks=self._filled(blocks, behind.entries)[behind.shared :])
