"""Messages from vLLM's scheduler to its workers in every step: `Step`, the metadata of vLLM's KV connector.

We send nothing back from a worker to the scheduler, which computes by itself the number of entries that a compaction
leaves. After a run, a worker sends `Result` (record.py) to our engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Behind:
    """The compacted context that a request continues, and the blocks of it that the worker must write.

    tokens : number of tokens of the context
    entries : number of entries per kv head that its compaction left
    shared : number of blocks shared with earlier requests, set when blocks are allocated
    blocks : the context's other blocks
    """

    name: str
    tokens: int
    entries: int
    shared: int = 0
    blocks: Sequence[int] = ()

    @property
    def gone(self) -> int:
        """Number of slots that the context takes less than it has tokens: the offset of positions from slots."""
        return self.tokens - self.entries


@dataclass(frozen=True)
class Begun:
    """A request that was admitted, for the first time or after a preemption: all its tokens are prefilled densely.

    block : its first block, by which workers identify it from now on
    prompt : number of tokens to prefill, including its context
    behind : compacted context, if any, whose tokens need no forward pass (contexts.py)
    """

    request_id: str
    block: int
    prompt: int
    behind: Behind | None = None


@dataclass(frozen=True)
class Due:
    """A request that is compacted after this forward pass.

    block : its first block
    seen : tokens seen
    held : entries per kv head before the compaction
    left : entries per kv head after it
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
    begun : requests that were admitted
    due : requests that are compacted after the forward pass
    """

    ended: list[int] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    due: list[Due] = field(default_factory=list)
