"""Requests that go on from a compacted context (rollout/context): nothing is evicted behind it.

To vLLM the context's tokens were computed by somebody else, as a KV connector's are: a request has its whole prompt,
and its logical positions. In the cache it has the context's entries, with their biases, and behind them its own
tokens: `gone` entries fewer than tokens. Requests behind one context share the blocks that it fills; what it leaves in
its last block each of them has for itself.

asked for   by the engine, which names the context in a request's extra_args; in a server by the prompt's first tokens
worker      `ContextState` keeps the entries of each context, and writes them when a request begins
scheduler   `ContextConnector` says which context, `ContextManager` (context_spec.py) allocates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from rollout.context.cache import Context
from rollout.context.files import load_context
from rollout.vllm.compat import paged
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.connector import EvictionConnector
from rollout.vllm.context_spec import ASKED
from rollout.vllm.messages import Begun, Behind
from rollout.vllm.plan import Plan
from rollout.vllm.state import CacheState
from sparse_rl.methods.am.policy import BIAS

UNSEEN = -3e4  # instead of a bias of -inf, where it is a coordinate of a key: a kernel may make NaN of -inf there


# ---- the worker's side ----------------------------------------------------------------------------------------------


class ContextState(CacheState):
    """All layers of one worker, and the contexts that requests may go on from."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gone = torch.zeros_like(self.prompt_length)  # by first block
        self.contexts: dict[str, list[tuple[Tensor, ...]]] = {}  # by layer: keys, values, bias

    def hold(self, name: str, context: Context) -> None:
        """Keep a context's entries of this rank's heads, in host memory, under a name; what had it before is let go."""
        mine = paged.own_heads(len(self.heads))
        self.contexts[name] = []
        for layer in context.layers:
            missing = context.entries - layer.keys.shape[2]  # all layers have the same blocks; nobody sees what pads
            keys, values = (F.pad(x[0, mine].cpu(), (0, 0, 0, missing)) for x in (layer.keys, layer.values))
            bias = F.pad(layer.bias[0, mine].cpu(), (0, missing), value=float("-inf"))
            self.contexts[name].append((keys.transpose(0, 1), values.transpose(0, 1), bias.T))

    def begin(self, ended: Sequence[int], begun: Sequence[Begun]) -> None:
        for each in begun:
            self.gone[each.block] = 0 if each.behind is None else each.behind.gone
            if each.behind is not None:
                self._fill(each.behind)

    def _fill(self, behind: Behind) -> None:
        start = behind.shared * self.block_size
        blocks = torch.tensor(behind.blocks, dtype=torch.long, device=self.device)  # none, where all are shared
        for layer, entries in enumerate(self.contexts[behind.name]):
            for cache in self.caches[layer]:
                cache[blocks] = 0  # `CleanSpec`: the last one has room behind the entries
            *given, bias = (x[start:].to(self.device) for x in entries)
            slots = torch.arange(len(bias), device=self.device)
            where = blocks[slots // self.block_size][:, None], self.heads, (slots % self.block_size)[:, None]
            for cache, new in zip(self.caches[layer], given, strict=True):
                cache[where] = new.to(cache.dtype)
            self.state[BIAS][layer][where] = bias
            if self.folded:
                self.folded[layer][where] = bias.clamp(min=UNSEEN).to(self.folded[layer].dtype)

    def make_plan(self, block_table: Tensor, seq_lens: Tensor, starts: Tensor, starts_cpu: Tensor) -> Plan:
        gone = self.gone[block_table[:, 0].long()].to(seq_lens.dtype)
        return super().make_plan(block_table, seq_lens - gone, starts, starts_cpu)


# ---- the scheduler's side, and what passes between the two -----------------------------------------------------------


class ContextConnector(EvictionConnector):
    """What scheduler and workers are told with every step. A context's tokens count as loaded from elsewhere."""

    kind = ContextState
    state: ContextState

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.served: list[tuple[list[int], Behind]] = []  # of a server: what prompts may begin with
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
        """None too for a request that wants its whole prompt computed (prompt_logprobs), or by an adapter."""
        if request.skip_reading_prefix_cache or request.lora_request is not None:
            return None
        if not self.served:  # of an engine; a server's clients could name what they like
            named = (request.sampling_params.extra_args or {}).get(KEY, {}).get("context")
            return None if named is None else Behind(*named)
        prompt = request.prompt_token_ids or ()
        for tokens, behind in self.served:
            if len(prompt) > len(tokens) and prompt[: len(tokens)] == tokens:
                return replace(behind)
        return None

    def behind(self, request: Any, blocks: list[int]) -> Behind | None:
        behind = ASKED.get(request.request_id)
        if behind is None:
            return None
        size = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return replace(behind, blocks=blocks[behind.shared : -(-behind.entries // size)])
