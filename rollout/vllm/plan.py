"""Plan of one forward pass, which is the same for all layers. It is computed by state.py before the pass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NOBODYS = 0  # vLLM's null block, which no request ever owns: padding is written to it


@dataclass
class Group:
    """R requests of a batch whose entries are passed to the policy together, padded to N entries.

    blocks : int64 [R, N / block size], blocks of each request; NOBODYS after the blocks with entries
    lengths, seen : int64 [R], number of entries that each request holds, and number of tokens that it has seen
    left : number of entries that a compaction leaves in each kv head; policies that leave different numbers are refused
    rows : int64 [R], rows of the query buffer; None until the group is assigned to layers (`CacheState._in`)
    """

    blocks: Tensor
    lengths: Tensor
    seen: Tensor
    left: int = 0
    rows: Tensor | None = None

    def apart(self) -> list[Group]:
        """Return one group per row."""
        assert self.rows is not None
        tensors = (tensor.split(1) for tensor in (self.blocks, self.lengths, self.seen, self.rows))
        return [Group(blocks, held, seen, self.left, row) for blocks, held, seen, row in zip(*tensors, strict=True)]


@dataclass
class Watch:
    """A group of R requests whose queries of this forward pass the policy observes.

    tokens, positions : int64 [R, T], indices of the queries' tokens in the batch, and their positions
    """

    group: Group
    tokens: Tensor
    positions: Tensor


@dataclass
class Plan:
    """Plan of one forward pass for B requests with T new tokens, the same for all layers.

    blocks : int64 [B, max blocks], blocks of each request
    seen : int64 [B], number of tokens that each request has seen after this pass
    lengths : int64 [B], number of entries that each request attends to
    slots : int64 [T], slots of the new tokens
    recent : three tensors about the queries to keep: indices of their tokens in the batch (int64; a slice if each
        request adds one token), first blocks of their requests (int64), places in the query buffer's row (int64)
    slots_of_recent : int64, slots of the queries to keep in a layer's query buffer; None until the forward pass,
        because vLLM's V2 runner makes the plan before a request that begins gets its row
    watch : requests that add several tokens, if the policy observes every query; observed in each layer
    alone : requests that add one token, if the policy observes every query; observed after the forward pass, in several
        layers together
    """

    blocks: Tensor
    seen: Tensor
    lengths: Tensor
    slots: Tensor
    recent: tuple[Any, Tensor, Tensor] | None
    watch: Watch | None = None
    alone: Group | None = None
    slots_of_recent: Tensor | None = None

    @property
    def first(self) -> Tensor:
        """First block of each request: int64 [B]."""
        return self.blocks[:, 0]


class Fixed:
    """Buffers for the data of each step, for up to `rows` requests, one buffer per name. Their addresses never change,
    because a CUDA graph always reads the addresses with which it was captured.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.memory: dict[str, Tensor] = {}

    def copy(self, name: str, value: Tensor, count: int) -> Tensor:
        """Copy `value`, with the same number of elements for each of `count` requests, to the buffer of this name.

        Returns the copy, which is valid until the next copy to this buffer.
        """
        if name not in self.memory:
            self.memory[name] = value.new_empty(value.numel() // count * self.rows)
        return self.memory[name][: value.numel()].view(value.shape).copy_(value)

    def copy_fields(self, record: Any, count: int) -> None:
        """Replace each tensor of a dataclass, and of dataclasses in its fields, by a copy in the buffers."""
        for f in dataclasses.fields(record):
            value = getattr(record, f.name)
            if isinstance(value, Tensor):
                setattr(record, f.name, self.copy(f"{type(record).__name__}.{f.name}", value, count))
            elif dataclasses.is_dataclass(value):
                self.copy_fields(value, count)


def last_of_each(starts: Tensor, window: int) -> Tensor:
    """Return the indices in the batch, int64, of each request's last `window` tokens, or of all if it has fewer.

    starts : int [B + 1], index of each request's first token in the batch, then the number of tokens; in host memory
    """
    count = starts.diff().clamp(max=window)
    tokens = torch.arange(int(count.sum()))
    return tokens + (starts[1:] - count.cumsum(0)).repeat_interleave(count)
