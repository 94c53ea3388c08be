"""What vLLM's scheduler tells its workers with every step: `Step`, as the metadata of vLLM's KV connector.

Nothing of ours goes back from a worker to the scheduler: it knows by counting what a compaction leaves. What a worker
tells our engine, once a run is over, is `Result` (record.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Behind:
    """The compacted context that a request goes on from, and what of it is to be written.

    tokens : of the context; entries : of each kv head that are left of them
    shared : how many blocks were taken over from other requests, set when blocks are allocated; blocks : the others
    """

    name: str
    tokens: int
    entries: int
    shared: int = 0
    blocks: Sequence[int] = ()

    @property
    def gone(self) -> int:
        """By how many slots fewer than its tokens the context takes: positions run ahead of slots by as many."""
        return self.tokens - self.entries


@dataclass(frozen=True)
class Begun:
    """A request that was admitted, or, after a preemption, admitted again: all its tokens are prefilled densely.

    block : its first, by which workers know it from here on; prompt: so many tokens are prefilled
    behind : but those of a context (contexts.py)
    """

    request_id: str
    block: int
    prompt: int
    behind: Behind | None = None


@dataclass(frozen=True)
class Due:
    """A request that compacts after this forward: its first block, tokens seen, entries held, and left by that."""

    request_id: str
    block: int
    seen: int
    held: int
    left: int


@dataclass
class Step(KVConnectorMetadata):
    """What the worker needs to know of one step.

    ended : first blocks of requests that no longer run; read before `begun`, which may reuse a block
    """

    ended: list[int] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    due: list[Due] = field(default_factory=list)
