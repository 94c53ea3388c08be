"""Requests that continue a compacted context (rollout/context). Their own tokens, after the context, are never evicted.

To vLLM, it seems that a KV connector has loaded the context's tokens, so a request keeps its whole prompt and its
logical positions. In the cache, the request has the context's entries, with biases, followed by its own tokens.
Requests share the blocks that a context fills completely; each has its own copy of the last, partly filled block.

An engine names the context in a request's extra_args; a server compares the first tokens of the prompt. In the
scheduler, `ContextConnector` finds a request's context, and `ContextManager` (context_spec.py) allocates its blocks. In
a worker, `ContextState` keeps the entries of each context, and writes them to the cache when a request begins.
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

UNSEEN = -3e4  # replaces a bias of -inf that is stored as a coordinate of a key: kernels may turn -inf into NaN there


# ---- the worker's side ----------------------------------------------------------------------------------------------


class ContextState(CacheState):
    """The caches of all layers of one worker, and the contexts that requests may continue."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gone = torch.zeros_like(self.prompt_length)  # `Behind.gone` of each request, indexed by its first block
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
        for newcomer in begun:
            self.gone[newcomer.block] = 0 if newcomer.behind is None else newcomer.behind.gone
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

    def make_plan(self, block_table: Tensor, seq_lens: Tensor, starts: Tensor, starts_cpu: Tensor) -> Plan:
        missing_slots = self.gone[block_table[:, 0].long()].to(seq_lens.dtype)
        return super().make_plan(block_table, seq_lens - missing_slots, starts, starts_cpu)


# ---- the scheduler's side, and the messages between the two ----------------------------------------------------------


class ContextConnector(EvictionConnector):
    """Connector that also tells the workers the context of each request."""

    kind = ContextState
    state: ContextState

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.served: list[tuple[list[int], Behind]] = []  # in a server: (tokens, context) that prompts may begin with
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
        """Return the context that a request continues; None if there is none.

        A request with an adapter or prompt_logprobs continues no context, because its whole prompt must be computed.
        """
        if request.skip_reading_prefix_cache or request.lora_request is not None:
            return None
        if not self.served:  # an engine; a server ignores the name, because a client could write any name
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
