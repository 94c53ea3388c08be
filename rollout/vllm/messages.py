"""Messages from vLLM's scheduler to its workers in every step: `Step`, the metadata of vLLM's KV connector.

Workers send no messages to the scheduler. After a run, they send results to our engine (record.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Behind:
    """The compacted context that a request continues.

    tokens : number of tokens of the context
    entries : number of entries per kv head after the compaction
    shared : number of the context's blocks that the request shares with earlier requests, set when blocks are allocated
    blocks : the context's other blocks, which the worker must write
    """

    name: str
    tokens: int
    entries: int
    shared: int = 0
    blocks: Sequence[int] = ()

    @property
    def gone(self) -> int:
        """Number of the context's tokens minus its entries; this is also a later token's position minus its slot."""
        return self.tokens - self.entries


@dataclass(frozen=True)
class Begun:
    """A request that was admitted, for the first time or after a preemption. All its tokens are prefilled densely.

    block : the request's first block, by which workers identify the request until it ends
    prompt : number of tokens to prefill, including its context
    behind : compacted context that the request continues, whose tokens need no forward pass; None means none
    """

    request_id: str
    block: int
    prompt: int
    behind: Behind | None = None


@dataclass(frozen=True)
class Due:
    """A request that is compacted after this forward pass.

    block : the request's first block
    seen : number of tokens that the request has seen
    held, left : number of entries per kv head before and after the compaction
    """

    request_id: str
    block: int
    seen: int
    held: int
    left: int


@dataclass
class Step(KVConnectorMetadata):
    """The messages of one step to the workers.

    ended : first blocks of requests that no longer run; read before `begun`, which may reuse a block
    """

    ended: list[int] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    due: list[Due] = field(default_factory=list)
