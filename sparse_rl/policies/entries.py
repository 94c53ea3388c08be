"""Inputs and outputs of a policy: the entries of a cache, arriving tokens, and the entries that stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_rl.errors import StoppedError


def one_rank(value: Tensor) -> Tensor:
    """Return `value`: with one tensor-parallel rank, the mean over the ranks is the value itself."""
    return value


@dataclass
class Entries:
    """The entries of one layer's cache for R sequences, right-padded to N entries, in any order.

    `valid` marks the real entries; the contents of padding are meaningless. Several layers may be stacked along R.
    The layer has Hkv kv heads, with G query heads each, and head dimension D.

    keys, values : [R, Hkv, N, D], keys after RoPE; None if `Policy.score_reads` (in `observe`: `observe_reads`) does
        not name them
    positions : int64 [R, Hkv, N], positions of the entries' tokens in prompt and completion
    lengths : int64 [R], number of entries held; the slots after them are padding
    seen : int64 [R], number of tokens seen so far; the last query is at position seen - 1
    queries : [R, Hq, W, D], the last W queries after RoPE, oldest first (W = policy.last_queries); None if W is 0
    scaling : the factor on q . k, usually D ** -0.5
    state : name -> float32 [R, Hkv, N], the policy's memory per entry
    left : number of entries that a compaction leaves in each kv head, per row (ints, so that reading them needs no
        synchronization with a device)
    mean_over_ranks : function that averages a tensor over the tensor-parallel ranks, each of which holds Hkv of the
        layer's kv heads
    """

    keys: Tensor | None
    values: Tensor | None
    positions: Tensor
    lengths: Tensor
    seen: Tensor
    queries: Tensor | None
    scaling: float
    state: dict[str, Tensor]
    left: Sequence[int] = ()
    mean_over_ranks: Callable[[Tensor], Tensor] = one_rank

    def valid(self) -> Tensor:
        """Return a mask that is True for slots that hold an entry, and False for padding: bool [R, 1, N]."""
        slots = torch.arange(self.positions.shape[2], device=self.positions.device)
        return (slots < self.lengths[:, None])[:, None]

    def left_tensor(self) -> Tensor:
        """Return `left` as a tensor on the entries' device: int64 [R]."""
        return torch.tensor(self.left).to(self.positions.device, non_blocking=True)

    def by_position(self) -> Tensor:
        """Return the slots sorted by the positions of their entries, with padding last: int64 [R, Hkv, N]."""
        return self.positions.masked_fill(~self.valid(), torch.iinfo(torch.int64).max).argsort(-1)

    def at(self, positions: Tensor) -> Tensor:
        """Return the slot of the entry at a position: int64 [R, Hkv], 0 in kv heads that do not hold the position.

        positions : int64 [R], one position for each row
        """
        return ((self.positions == positions[:, None, None]) & self.valid()).int().argmax(-1)

    def read(self, slots: Tensor) -> Tensor:
        """Return the key and value of one entry of each kv head, concatenated: [R, Hkv, 2 D].

        slots : int64 [R, Hkv], slots of the entries
        """
        assert self.keys is not None and self.values is not None
        at = slots[..., None, None].expand(-1, -1, 1, self.keys.shape[-1])
        return torch.cat([self.keys.gather(2, at), self.values.gather(2, at)], dim=-1)[:, :, 0]

    def competing(self, sinks: int, window: int) -> Tensor:
        """Return a mask that is True for entries that may be dropped: bool [R, Hkv, N].

        The mask is False for padding, the first `sinks` tokens and the last `window` tokens.
        """
        older = self.positions < (self.seen - window)[:, None, None]
        return self.valid() & (self.positions >= sinks) & older

    def attention(self, queries: Tensor, query_positions: Tensor, seen_by_all: int = 0) -> Tensor:
        """Return the attention softmax(`scaling` q K^T) of T queries over the entries: float32 [R, Hkv, G, T, N].

        The attention to padding, and to entries later than the query, is 0.

        queries : [R, Hq, T, D], after RoPE, of all Hq query heads
        query_positions : int64 [R, T], positions of the queries
        seen_by_all : number of first slots that need no mask: their entries are real, and not later than any query
        """
        assert self.keys is not None
        rows, q_heads, count, dim = queries.shape
        kv_heads = self.keys.shape[1]
        grouped = queries.reshape(rows, kv_heads, -1, dim).float() * self.scaling  # G x T queries: no key is repeated
        logits = (grouped @ self.keys.float().transpose(-1, -2)).view(rows, kv_heads, q_heads // kv_heads, count, -1)
        rest = slice(seen_by_all, None)
        seen = self.positions[:, :, None, rest] <= query_positions[:, None, :, None]  # [R, Hkv, T, N - seen_by_all]
        hidden = ~(seen & self.valid()[:, :, None, rest]).unsqueeze(2)
        logits[..., rest].masked_fill_(hidden, float("-inf"))
        return logits.softmax(-1)

    def window_attention(self, window: int) -> Tensor:
        """Return the attention of the last `window` queries over the entries: float32 [R, Hkv, G, window, N]."""
        assert self.queries is not None and self.queries.shape[2] >= window
        query_positions = self.seen[:, None] + torch.arange(-window, 0, device=self.seen.device)
        needs_mask = ~self.valid() | (
            self.positions >= query_positions[:, :1, None]
        )  # the window's own entries and padding
        seen_by_all = int(needs_mask.flatten(0, 1).any(0).int().argmax())  # the first entry that needs a mask
        return self.attention(self.queries[:, :, -window:], query_positions, seen_by_all)


@dataclass
class Arriving:
    """The arriving token of each of R rows, at position `Entries.seen` - 1, before it is one of the entries.

    keys, values : [R, Hkv, D], keys after RoPE
    state : name -> float32 [R, Hkv], the policy's memory of the new entries; the policy may write to it
    memory : name -> [R, Hkv, ...], the policy's memory of these sequences; the policy updates it in place
    """

    keys: Tensor
    values: Tensor
    state: dict[str, Tensor]
    memory: dict[str, Tensor]


@dataclass
class Chunk:
    """T consecutive tokens of R prompts; a prompt is read in one chunk or in several.

    keys, values : [R, Hkv, T, D], keys after RoPE
    earlier_keys, earlier_values : [R, Hkv, `Policy.delay`, D], keys and values of the tokens right before the chunk;
        meaningless before position 0
    start : int64 [R], position of the first token
    lengths : int64 [R], number of real tokens of each row; the rest is padding. None means T tokens in every row
    memory : name -> [R, Hkv, ...], the policy's memory of these sequences; the policy updates it in place
    """

    keys: Tensor
    values: Tensor
    earlier_keys: Tensor
    earlier_values: Tensor
    start: Tensor
    lengths: Tensor | None
    memory: dict[str, Tensor]


@dataclass
class Kept:
    """The outcome of a compaction: the entries that stay, and the policy's memory of them.

    keep : bool [R, Hkv, N], True for entries that stay: `Entries.left` in each kv head, or another number if the engine
        can hold such a cache (`check_counts`)
    state : name -> float32 [R, Hkv, N], the policy's memory after the compaction
    values : [R, Hkv, N, D], the values of the kept entries after the compaction; None means unchanged
    """

    keep: Tensor
    state: dict[str, Tensor]
    values: Tensor | None = None

    def counts(self) -> Tensor:
        """Return the number of entries that stay in each kv head: int64 [R, Hkv]."""
        return self.keep.sum(-1)

    def check_counts(self, entries: Entries, policy: str) -> None:
        """Raise StoppedError, with the policy's name, if a kv head does not keep `Entries.left` entries."""
        left = entries.left_tensor()[:, None]
        if bool((counts := self.counts()).ne(left).any()):
            row = int(counts.ne(left).any(1).nonzero()[0, 0])
            raise StoppedError(
                f"{policy}: a compaction left {counts[row].tolist()} entries in the kv heads of a sequence, but the "
                f"schedule says {entries.left[row]}; this engine needs exactly that number in every kv head"
            )

    def slots(self, most: int) -> Tensor:
        """Return the slots of the entries that stay, ascending: int64 [R, Hkv, most], padded with 0 if fewer stay."""
        rank = (self.keep.cumsum(-1) - 1).masked_fill_(~self.keep, most)  # dropped entries come after the others
        slot = torch.arange(self.keep.shape[-1], device=rank.device).expand_as(rank)
        return rank.new_zeros(*rank.shape[:2], most + 1).scatter_(-1, rank, slot)[..., :most]
