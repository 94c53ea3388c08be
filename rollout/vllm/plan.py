"""What is the same for every layer of one forward: state.py computes it before it, and each layer carries it out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NOBODYS = 0  # vLLM's null block: no request ever has it, so what is written for padding goes there


@dataclass
class Group:
    """Requests of a batch whose entries are shown to the policy together, padded to N entries.

    blocks int64 [R, N / block size], NOBODYS behind those that hold entries of their row; lengths, seen int64 [R]
    left : how many entries a compaction leaves in each kv head, the same in all: other policies are refused
    rows : int64 [R], their rows of the query buffer; None of one that is not yet of a layer (`CacheState._in`)
    """

    blocks: Tensor
    lengths: Tensor
    seen: Tensor
    left: int = 0
    rows: Tensor | None = None

    def apart(self) -> list[Group]:
        """Each of its rows, padded as it is here."""
        assert self.rows is not None
        tensors = (each.split(1) for each in (self.blocks, self.lengths, self.seen, self.rows))
        return [Group(blocks, held, seen, self.left, row) for blocks, held, seen, row in zip(*tensors, strict=True)]


@dataclass
class Watch:
    """A group whose queries of this forward are observed: tokens (of the batch) and positions, int64 [R, T]."""

    group: Group
    tokens: Tensor
    positions: Tensor


@dataclass
class Plan:
    """What a forward does to every layer alike: where tokens go, and what they attend to.

    blocks int64 [B, max blocks] of each request; seen int64 [B], its tokens; lengths int64 [B], entries attended to
    slots int64 [T]: where each token's entry goes
    recent: (tokens, their requests' first blocks, places): the queries to remember. The tokens are a slice where each
        request brings one, else int64, as the others are.
    slots_of_recent: int64, where those go in a layer's query buffer. The block's row is known only in the forward:
        vLLM's V2 runner makes the plan before it says which requests begin.
    watch: the requests that bring several tokens, under a policy that observes every query: observed in each layer
    alone: those that bring one: observed after the forward, in all layers at once
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
        """The first block of each request: int64 [B]."""
        return self.blocks[:, 0]


class Fixed:
    """Memory at addresses that never change, for what is new in each step: a CUDA graph reads those it was made with.

    One buffer for each name, with room for `rows` requests, allocated when the name is first used.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.memory: dict[str, Tensor] = {}

    def copy(self, name: str, value: Tensor, count: int) -> Tensor:
        """A copy of `value`, of one size for each of `count` requests, in the name's buffer, until its next copy."""
        if name not in self.memory:
            self.memory[name] = value.new_empty(value.numel() // count * self.rows)
        return self.memory[name][: value.numel()].view(value.shape).copy_(value)

    def copy_fields(self, record: Any, count: int) -> None:
        """Put a `copy` in the place of each tensor of a dataclass, and of dataclasses in it."""
        for f in dataclasses.fields(record):
            value = getattr(record, f.name)
            if isinstance(value, Tensor):
                setattr(record, f.name, self.copy(f"{type(record).__name__}.{f.name}", value, count))
            elif dataclasses.is_dataclass(value):
                self.copy_fields(value, count)


def last_of_each(starts: Tensor, window: int) -> Tensor:
    """The last `window` tokens of each request of a batch: int64, from int [B + 1] in host memory."""
    count = starts.diff().clamp(max=window)
    tokens = torch.arange(int(count.sum()))
    return tokens + (starts[1:] - count.cumsum(0)).repeat_interleave(count)
