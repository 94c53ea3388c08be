"""The conversations of a server: which kept cache a request goes on from, and for how long a cache is kept.

A client of the OpenAI API sends the whole conversation at each turn. So the scheduler's side of the connector holds the
tokens of each request that has ended, and the workers its entries (`CacheState.keep`). A request whose prompt begins
with all of these tokens goes on from the entries, as a turn in the engine does (conversations.py); the longest such
conversation counts. Any number of requests may go on from one conversation.

Requests of different owners share nothing (compat/server.py). All bytes together have a limit, beyond which those
conversations are let go that were not used for the longest time.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from itertools import count
from typing import Any

from vllm.v1.request import Request

from rollout.vllm.memory import conversation_bytes
from rollout.vllm.scheduler import KEPT
from rollout.vllm.state import Kept
from sparse_rl.policies.base import Policy

LOG = logging.getLogger("vllm.sparse_rl")


class Conversations:
    """The requests that have ended, the least recently used first; their entries may take `most` bytes."""

    def __init__(self, policy: Policy, vllm_config: Any, block: int, most: int) -> None:
        self.policy, self.block, self.most = policy, block, most
        self.model_config = vllm_config.model_config
        self.ended: dict[tuple[str, bytes], tuple[Kept, int]] = {}  # (owner, tokens) -> what is kept, and its bytes
        self.bytes = 0
        self.names = count(1)

    def longest(self, owner: str, prompt: Sequence[int]) -> Kept | None:
        """Return the cache of the longest conversation with all of whose tokens a prompt begins, if there is one."""
        tokens = _bytes(prompt)
        begins = [key for key in self.ended if key[0] == owner and tokens.startswith(key[1])]
        if not begins:
            return None
        key = max(begins, key=lambda key: len(key[1]))
        self.ended[key] = self.ended.pop(key)  # now the most recently used one
        return self.ended[key][0]

    def add(self, owner: str, tokens: Sequence[int], entries: int, prompt: int) -> tuple[int | None, list[int]]:
        """Add a request with `entries` per kv head, and with the prompt length `prompt` in the schedule. Returns its
        name, None if it is too large, and the names of the conversations that workers must let go.
        """
        key, config = (owner, _bytes(tokens)), self.model_config
        size = len(key[1]) + conversation_bytes(
            self.policy, config.hf_text_config, entries, itemsize=config.dtype.itemsize, block=self.block
        )
        if size > self.most:
            return None, []
        let_go = self._drop(key) if key in self.ended else []
        while self.bytes + size > self.most:
            let_go += self._drop(next(iter(self.ended)))
        kept = Kept(next(self.names), len(tokens) - 1, entries, 0 if self.policy.reads_chunks else prompt)
        self.ended[key] = kept, size
        self.bytes += size
        LOG.info("conversations: %d kept, in %.1f MiB", len(self.ended), self.bytes / 2**20)
        return kept.name, let_go

    def _drop(self, key: tuple[str, bytes]) -> list[int]:
        kept, size = self.ended.pop(key)
        self.bytes -= size
        return [kept.name]

    def clear(self) -> list[int]:
        """Forget all. Returns the names of the conversations that workers must let go."""
        return [name for key in list(self.ended) for name in self._drop(key)]


def _bytes(tokens: Sequence[int]) -> bytes:
    """Return equal bytes for equal tokens, all of one size, so that a beginning of them is one of the tokens."""
    return array("i", tokens).tobytes()


class ReadsSingly(Request):
    """A request that goes on under a schedule that counts tokens: each step computes one of its tokens."""

    @property
    def num_tokens(self) -> int:
        tokens, kept = super().num_tokens, KEPT.get(self.request_id)
        if kept is None or not kept.prompt:
            return tokens
        return min(tokens, max(self.num_computed_tokens, kept.seen) + 1)

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens
