"""Caches of the hf engine: their interface `Cache`, EvictingCache, and sizes in bytes.

EvictingCache holds physical KV caches that really shrink, for a batch of sequences of different lengths. It is a
`kv_view` (sparse_rl/attention/interface.py): it stores each layer's new keys and values, attends, lets the policy
observe the attention, and compacts. It depends on tensors and a policy, not on models or sampling.

The entries of row b fill the first lengths[b] slots of every buffer, in every kv head. They are in order of position,
unless the policy evicts before a query attends. An entry that a compaction drops after query q is recorded as
evict_at = q + 1; an entry that is dropped when query q arrives is recorded as evict_at = q.

Sizes in shapes: B rows, L layers, Hkv kv heads, Hq query heads, C slots, N slots that queries attend to, S columns of
the prompts or of the record, W recent queries that the policy reads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.attention.families import cache_shape, windows_of
from sparse_rl.attention.interface import KVView
from sparse_rl.attention.windows import side_by_side
from sparse_rl.clock import part
from sparse_rl.errors import StoppedError
from sparse_rl.kernels.exact import sdpa
from sparse_rl.kernels.masked import masked_attention
from sparse_rl.policies.base import Arriving, Chunk, Entries, Policy, slots_of
from sparse_rl.trace import NEVER, EvictionTrace

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Cache(KVView, Protocol):
    """The caches of all layers for B sequences, as the hf engine drives them.

    The engine first calls `begin_prefill` and runs one forward pass over the right-padded prompts. Then, per token, it
    calls `begin_decode` and runs one forward pass. Between two turns of a conversation, its row is `taken`. For the
    next turn, rows are `joined`, and what came in between is read after `begin_chunk`, or token by token.

    seen : number of tokens that each row has seen
    past : number of tokens of a compacted context, which all rows share; tokens that are fed have positions >= past
    piece : maximum number of prompt tokens in a forward pass, which splits long prompts; None means no limit
    """

    past: int
    piece: int | None

    @property
    def seen(self) -> list[int]: ...

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """Prepare for a forward pass over right-padded prompts, or over one piece of them."""

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        """Prepare for a forward pass over one token per row. A row that is not active has ended and changes no more."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in this order. A row may be repeated, to sample several completions of one prompt."""

    def begin_chunk(self, counts: Sequence[int], device: torch.device) -> None:
        """Prepare for a forward pass over the next `counts` tokens of each row, right-padded, in mid-sequence. Called
        only under a policy that reads chunks (`Policy.reads_chunks`).
        """

    def fork(self, rows: Sequence[int]) -> Self: ...  # a separate cache with `rows`, in this order

    def taken(self, row: int) -> Self: ...  # a separate cache with one row, without spare memory

    @classmethod
    def joined(cls, caches: Sequence[Self]) -> Self: ...  # one cache with the rows of all `caches`

    def trace(self, row: int, length: int) -> EvictionTrace: ...  # of one row, a sequence of `length` tokens

    def allocated_bytes(self) -> int: ...  # for keys and values of all layers


def make_cache(policy: Policy) -> Any:
    """Make an empty `Cache` for a policy that is bound to a model."""
    return policy.config.part("cache")(policy)


def cache_bytes(entries: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of one sequence with `entries` entries per kv head."""
    return 2 * layers * kv_heads * head_dim * entries * itemsize


def window_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of one sequence of `tokens` tokens in the layers with a sliding window.

    A layer with the window W holds the last W tokens, under any policy.
    """
    _, kv_heads, head_dim = cache_shape(config)
    return sum(cache_bytes(min(window, tokens), 1, kv_heads, head_dim, itemsize) for window in windows_of(config))


def state_bytes(policy: Policy, entries: int, layers: int, kv_heads: int, head_dim: int) -> int:
    """Return the bytes that a policy and its cache store for one sequence, without keys, values and queries.

    Each entry has an int64 position and the policy's float32 memory of it; the sequence has `Policy.sequence_memory`.
    """
    sequence_memory_bytes = sum(value.nbytes for value in policy.sequence_memory(kv_heads, head_dim).values())
    return layers * (kv_heads * entries * (8 + 4 * len(policy.entry_memory)) + sequence_memory_bytes)


def query_bytes(policy: Policy, layers: int, heads: int, head_dim: int, itemsize: int) -> int:
    """Return the bytes of the last queries of one sequence, over `heads` query heads, that a cache stores."""
    return layers * policy.last_queries * heads * head_dim * itemsize


GROW = 128  # slots, or positions of the record, added at a time
COUNTS = ("prompt_lengths", "seen", "lengths", "chunk_ends", "uncounted")  # lists of one number for each row


@dataclass
class Layer:
    """The buffers of one layer. The buffers of keys, values, positions and state have C slots per kv head."""

    keys: Tensor  # [B, Hkv, C, D]
    values: Tensor  # [B, Hkv, C, D]
    positions: Tensor  # int64 [B, Hkv, C], positions of the tokens in their sequences
    queries: Tensor | None  # [B, Hq, W, D], the last W queries; the query at position p is in slot p % W
    evict_at: Tensor  # int32 [B, Hkv, S], the record of evictions
    state: dict[str, Tensor] = field(default_factory=dict)  # name -> float32 [B, Hkv, C], memory of each entry
    memory: dict[str, Tensor] = field(default_factory=dict)  # name -> [B, Hkv, ...], memory of each sequence

    def slotted(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values, "positions": self.positions, **self.state}

    def replace(self, buffers: dict[str, Tensor]) -> None:
        self.keys, self.values, self.positions = buffers["keys"], buffers["values"], buffers["positions"]
        self.state = {name: buffers[name] for name in self.state}


class EvictingCache(KVView):
    """The cache of a batch under one policy: `begin_prefill` or `begin_decode`, then a forward pass, for each step."""

    past = 0
    piece: int | None = None
    fillers: ClassVar[Mapping[str, int]] = {}  # for memory of sequences that grows: name -> what it is padded with

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.layers: dict[int, Layer] = {}
        self.prompt_lengths: list[int] = []
        self.seen: list[int] = []  # number of tokens seen per row
        self.lengths: list[int] = []  # for each row, number of entries per kv head after the pass and its compaction
        # for each row, number of tokens up to the end of its prompt, or of the last chunk that it has read
        self.chunk_ends: list[int] = []
        self.uncounted: list[int] = []  # number of them, evicted before that chunk, that the schedule does not count
        self._chunk: Tensor | None = None  # int64 [B], number of each row's tokens in this pass, if it reads a chunk
        self._due: list[bool] = []  # True for rows that compact after this forward pass

    # ---- the engine's side ----------------------------------------------------------------------------------------

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        self.prompt_lengths = self.seen = self.chunk_ends = list(prompt_lengths)
        self.uncounted = [0] * len(prompt_lengths)
        self._plan(list(prompt_lengths), device)

    def begin_chunk(self, counts: Sequence[int], device: torch.device) -> None:
        assert self.policy.reads_chunks
        before = self.lengths
        attended = [held + count for held, count in zip(before, counts, strict=True)]
        self.seen = [seen + count for seen, count in zip(self.seen, counts, strict=True)]
        self.chunk_ends, self.uncounted = self.seen, [n - held for n, held in zip(self.seen, attended, strict=True)]
        self._plan(attended, device)
        self._slots, self._chunk = (torch.tensor(list(x), device=device) for x in (before, counts))
        if max(attended) > self.capacity:
            self._grow(max(attended))
        self._extend_records()

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        self.seen = [n + a for n, a in zip(self.seen, active, strict=True)]
        before, schedule, counts, self._chunk = self.lengths, self.policy.schedule, self._counted(), None
        attended = [schedule.attended(p, n) if a else b for (p, n), a, b in zip(counts, active, before, strict=True)]
        self._plan(attended, device)
        self._slots, self._active = torch.tensor(before, device=device), torch.tensor(active, device=device)
        needed = max(attended) if schedule.before_attending else max(before) + 1
        if needed > self.capacity:
            upper_bound = max(schedule.most_decoding(p, n + GROW) for p, n in counts)
            self._grow(max(needed, min(self.capacity + GROW, upper_bound)))
        self._due = [due and a for due, a in zip(self._due, active, strict=True)]
        held = torch.arange(max(self._attended), device=device) < self._attended_tensor[:, None]
        self._mask = None if bool(held.all()) else held[:, None, None]
        self._extend_records()

    def _extend_records(self) -> None:
        record = max(self.seen)
        for layer in self.layers.values():
            if (missing := record - layer.evict_at.shape[-1]) > 0:
                layer.evict_at = F.pad(layer.evict_at, (0, max(missing, GROW)), value=NEVER)

    def _counted(self) -> list[tuple[int, int]]:
        """Return each row's numbers of tokens of the prompt, and of tokens seen, as the schedule counts them."""
        rows = zip(self.chunk_ends, self.seen, self.uncounted, strict=True)
        return [(end - uncounted, seen - uncounted) for end, seen, uncounted in rows]

    def _plan(self, attended: list[int], device: torch.device) -> None:
        """Prepare a forward pass for all layers, in which row b holds attended[b] entries while its queries attend."""
        self._attended = attended
        self._attended_tensor, self._seen_tensor = (torch.tensor(x, device=device) for x in (attended, self.seen))
        counts, schedule = self._counted(), self.policy.schedule
        self._due = [schedule.due(p, n) for p, n in counts]
        self.lengths = [schedule.held(p, n) for p, n in counts]

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(list(rows), device=next(iter(self.layers.values())).keys.device)
        for layer in self.layers.values():
            layer.replace({name: buffer[index] for name, buffer in layer.slotted().items()})
            layer.evict_at = layer.evict_at[index]
            layer.queries = None if layer.queries is None else layer.queries[index]
            layer.memory = {name: value[index] for name, value in layer.memory.items()}
        for name in COUNTS:
            setattr(self, name, [getattr(self, name)[i] for i in rows])

    def fork(self, rows: Sequence[int]) -> Self:
        forked = type(self)(self.policy)
        forked.layers = {index: replace(layer) for index, layer in self.layers.items()}
        for name in COUNTS:
            setattr(forked, name, getattr(self, name))
        forked.select(rows)
        return forked

    def taken(self, row: int) -> Self:
        own = self.fork([row])
        for layer in own.layers.values():
            layer.replace({name: buffer[:, :, : own.lengths[0]].clone() for name, buffer in layer.slotted().items()})
        return own

    @classmethod
    def joined(cls, caches: Sequence[Self]) -> Self:
        whole = cls(caches[0].policy)
        for name in COUNTS:
            setattr(whole, name, [count for cache in caches for count in getattr(cache, name)])
        for index in caches[0].layers:
            parts = [cache.layers[index] for cache in caches]
            slotted = {name: side_by_side([part.slotted()[name] for part in parts]) for name in parts[0].slotted()}
            keys, values, positions = (slotted.pop(name) for name in ("keys", "values", "positions"))
            rings = [part.queries for part in parts if part.queries is not None]
            queries = torch.cat(rings) if rings else None
            evict_at = side_by_side([part.evict_at for part in parts], NEVER)
            memory = {
                name: side_by_side([part.memory[name] for part in parts], cls.fillers.get(name, 0))
                for name in parts[0].memory
            }
            whole.layers[index] = Layer(keys, values, positions, queries, evict_at, slotted, memory)
        return whole

    def trace(self, row: int, length: int) -> EvictionTrace:
        return EvictionTrace.recorded(self.evict_at(row, length), self.further(row, length))

    def evict_at(self, row: int, length: int) -> Tensor:
        """Return the evictions of one row's first `length` tokens: int32 [L, Hkv, length]."""
        record = torch.stack([self.layers[i].evict_at[row] for i in sorted(self.layers)])
        missing = length - record.shape[-1]
        return F.pad(record, (0, missing), value=NEVER) if missing > 0 else record[..., :length]

    def further(self, row: int, length: int) -> dict[str, Tensor]:
        return self.policy.further(self.prompt_lengths[row], length)

    @property
    def capacity(self) -> int:
        """Number of slots allocated for each kv head (C in the shapes)."""
        return next(iter(self.layers.values())).keys.shape[2]

    def allocated_bytes(self) -> int:
        kv = [t.untyped_storage() for layer in self.layers.values() for t in (layer.keys, layer.values)]
        return sum(storage.nbytes() for storage in kv)

    # ---- the attention's side ---------------------------------------------------------------------------------------

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if layer not in self.layers:
            return self._prefill(layer, query, key, value, scaling)
        if self._chunk is not None:
            return self._read_chunk(layer, query, key, value, scaling, self._chunk)
        return self._decode(layer, query, key, value, scaling)

    def _prefill(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        batch, kv_heads, width, _ = key.shape
        positions = torch.arange(width, device=key.device).repeat(batch, kv_heads, 1)
        evict_at = torch.full((batch, kv_heads, width), NEVER, dtype=torch.int32, device=key.device)
        state = self._new_state((batch, kv_heads, width), key.device)
        memory: dict[str, Tensor] = {}
        masked = None
        if self.policy.schedule.before_attending:
            memory = self._empty_memory(key)
            state |= self._take_in(index, key.to(value.dtype), value, memory)
            masked = self.policy.masks(index, state, self._seen_tensor)
        if masked is None:
            out = sdpa(query, key, value, scaling, causal=width > 1)
        else:
            out = masked_attention(lambda: masked, query, key, value, scaling)
            evict_at = masked
        key, value = key.to(value.dtype, copy=True), value.clone()  # copies, because a compaction writes into them
        layer = Layer(key, value, positions, self._last_queries(query), evict_at, state, memory)
        if self.policy.every_query:
            rows = torch.arange(width, device=key.device).expand(batch, width)
            entries = self._entries(layer, slice(None), width, scaling, self.policy.observe_reads)
            self.policy.observe(index, entries, query, rows)
        self._compact_due(index, layer, scaling)
        # The prompt's buffers are freed, because only the kept entries are copied.
        capacity = max(self.lengths)
        layer.replace({name: buffer[:, :, :capacity].clone() for name, buffer in layer.slotted().items()})
        self.layers[index] = layer
        return out

    def _new_state(self, shape: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        memory = self.policy.entry_memory.items()
        return {name: torch.full(tuple(shape), start, dtype=torch.float32, device=device) for name, start in memory}

    def _empty_memory(self, key: Tensor) -> dict[str, Tensor]:
        empty = self.policy.sequence_memory(key.shape[1], key.shape[3])
        return {name: value.to(key.device).repeat(len(key), *[1] * value.ndim) for name, value in empty.items()}

    def _take_in(self, index: int, key: Tensor, value: Tensor, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        delay = self.policy.delay
        no_earlier = key.new_zeros(*key.shape[:2], delay, key.shape[3])
        start = torch.zeros(len(key), dtype=torch.long, device=key.device)
        state = self.policy.take_in(index, Chunk(key, value, no_earlier, no_earlier, start, self._seen_tensor, memory))
        return {name: F.pad(values[..., delay:], (0, min(delay, key.shape[2]))) for name, values in state.items()}

    def _last_queries(self, query: Tensor) -> Tensor | None:
        """Return the last W queries of each prompt, [B, Hq, W, D], with the query at position p in slot p % W.

        Returns None if the policy reads no queries.
        """
        window = self.policy.last_queries
        if not window:
            return None
        back = torch.arange(window, device=query.device)
        last = self._attended_tensor[:, None] - 1
        # the latest position that belongs to each slot; in a prompt of fewer than W tokens, some slots have no meaning
        positions = (last - (last - back) % window).clamp(min=0)
        index = positions[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        return query.gather(2, index)

    def _decode(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        layer = self.layers[index]
        batch, kv_heads, _, dim = key.shape
        rows = torch.arange(batch, device=key.device)
        now = self._seen_tensor - 1
        if self.policy.schedule.before_attending:
            self._arrive(index, layer, key[:, :, 0].to(layer.keys.dtype), value[:, :, 0], scaling)
        else:
            layer.keys[rows, :, self._slots] = key[:, :, 0].to(layer.keys.dtype)
            layer.values[rows, :, self._slots] = value[:, :, 0]
            layer.positions[rows, :, self._slots] = now[:, None]
            for name, start in self.policy.entry_memory.items():
                layer.state[name][rows, :, self._slots] = start
        if layer.queries is not None:
            layer.queries[rows, :, now % layer.queries.shape[2]] = query[:, :, 0]

        held, mask = self._slots_seen(layer)
        if self.policy.bias is not None:
            bias = layer.state[self.policy.bias][:, :, None, :held]
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        # The G query heads of a group attend as G "queries" to their kv head, so that no key is repeated.
        grouped = query.reshape(batch, kv_heads, -1, dim)
        with part("attention", detail=True):
            out = sdpa(grouped, layer.keys[:, :, :held], layer.values[:, :, :held], scaling, mask).reshape(query.shape)

        if self.policy.every_query:
            entries = self._entries(layer, slice(None), held, scaling, self.policy.observe_reads)
            self.policy.observe(index, entries, query, now[:, None])
        self._compact_due(index, layer, scaling, held)
        return out

    def _read_chunk(
        self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, counts: Tensor
    ) -> Tensor:
        """Append `counts` tokens of each row, int64 [B]. A query sees the entries held and the chunk up to itself."""
        layer, held = self.layers[index], max(self._attended)
        step = torch.arange(key.shape[2], device=key.device)
        positions = (self._seen_tensor - counts)[:, None] + step
        row, column = (step < counts[:, None]).nonzero(as_tuple=True)
        slot = self._slots[row] + column
        layer.keys[row, :, slot] = key[row, :, column].to(layer.keys.dtype)
        layer.values[row, :, slot] = value[row, :, column]
        layer.positions[row, :, slot] = positions[row, column, None]
        for name, start in self.policy.entry_memory.items():
            layer.state[name][row, :, slot] = start
        if layer.queries is not None:
            window = layer.queries.shape[2]
            last = column >= counts[row] - window
            layer.queries[row[last], :, positions[row, column][last] % window] = query[row[last], :, column[last]]
        seen = torch.arange(held, device=key.device) <= (self._slots[:, None] + step)[..., None]
        out = sdpa(query, layer.keys[:, :, :held], layer.values[:, :, :held], scaling, seen[:, None])
        if self.policy.every_query:
            entries = self._entries(layer, slice(None), held, scaling, self.policy.observe_reads)
            self.policy.observe(index, entries, query, positions)
        self._compact_due(index, layer, scaling, held)
        return out

    def _slots_seen(self, layer: Layer) -> tuple[int, Tensor | None]:
        """Return N, the number of slots that queries attend to, and a mask of those that hold entries, bool [B, 1 or
        Hkv, 1, N], or None if all do.
        """
        return max(self._attended), self._mask

    def _arrive(self, index: int, layer: Layer, key: Tensor, value: Tensor, scaling: float) -> None:
        """Put each row's new token into the slot of the entry that is dropped for it, or into a free slot."""
        held, now = min(int(self._slots.max()), self.capacity), self._seen_tensor - 1
        entries = self._entries(layer, slice(None), held, scaling, ("keys", "values"), lengths=self._slots)
        state = self._new_state(key.shape[:2], key.device)
        stays = self.policy.before_attending(index, entries, Arriving(key, value, state, layer.memory))
        dropped = entries.valid() & ~stays & self._active[:, None, None]
        spare = (self._slots + self._active - self._attended_tensor)[:, None]
        if bool(dropped.sum(-1).ne(spare).any()):
            were = f"{dropped.sum(-1).tolist()} entries were dropped from the kv heads of each sequence"
            planned = f"but the schedule says {spare[:, 0].tolist()}"
            raise StoppedError(f"{self.policy.name}: for a new token, {were}, {planned}")
        dropped_at = torch.where(dropped, now[:, None, None], NEVER).to(torch.int32)
        # amin: a free slot may repeat the position of a dropped entry, and its NEVER must not overwrite the record
        layer.evict_at.scatter_reduce_(-1, entries.positions, dropped_at, reduce="amin")
        free = self._slots.clamp(max=self.capacity - 1)[:, None]
        slot = torch.where(spare > 0, dropped.int().argmax(-1), free)
        self._write(layer, slot, key, value, state)

    def _write(self, layer: Layer, slot: Tensor, key: Tensor, value: Tensor, state: dict[str, Tensor]) -> None:
        """Write the new token of each active row into `slot`, int64 [B, Hkv]."""
        batch, heads = slot.shape
        where = torch.arange(batch, device=slot.device)[:, None], torch.arange(heads, device=slot.device), slot
        active, now = self._active[:, None], (self._seen_tensor - 1)[:, None].expand(slot.shape)
        for buffer, new in (
            (layer.keys, key),
            (layer.values, value),
            (layer.positions, now),
            *((layer.state[name], new) for name, new in state.items()),
        ):
            frozen = buffer[where]
            buffer[where] = torch.where(active if new.ndim == 2 else active[..., None], new, frozen)

    def _entries(
        self, layer: Layer, rows: Any, held: int, scaling: float, reads: Sequence[str], lengths: Tensor | None = None
    ) -> Entries:
        """Return the entries of some rows, as a policy reads them.

        rows : with a slice, the result holds views of the buffers; with an index tensor, copies
        lengths : int64 [B], number of entries of each row; None means the number that the row attends to
        """
        queries = None
        if layer.queries is not None:
            queries = _oldest_first(layer.queries[rows], self._seen_tensor[rows])
        return Entries(
            keys=layer.keys[rows, :, :held] if "keys" in reads else None,
            values=layer.values[rows, :, :held] if "values" in reads else None,
            positions=layer.positions[rows, :, :held],
            lengths=(self._attended_tensor if lengths is None else lengths)[rows],
            seen=self._seen_tensor[rows],
            queries=queries,
            scaling=scaling,
            state={name: buffer[rows, :, :held] for name, buffer in layer.state.items()},
        )

    def _compact_due(self, index: int, layer: Layer, scaling: float, held: int | None = None) -> None:
        if due := [row for row, is_due in enumerate(self._due) if is_due]:
            self._compact(index, layer, due, held or max(self._attended[row] for row in due), scaling)

    @part("compaction")
    def _compact(self, index: int, layer: Layer, due: list[int], held: int, scaling: float) -> None:
        """Let the policy choose entries of the rows `due`, whose first `held` slots may be in use; record the
        evictions; move kept entries to the front.
        """
        left = [self.lengths[row] for row in due]
        all_rows = len(due) == layer.keys.shape[0]
        rows = slice(None) if all_rows else torch.tensor(due, device=layer.keys.device)
        entries = self._entries(layer, rows, held, scaling, self.policy.score_reads)
        entries.left = left
        # entries are in the order of their positions
        entries.older = max(0, min(self._attended[row] for row in due) - self.policy.last_queries)
        kept = self.policy.compact(index, entries)
        kept.check_finite(index, self.policy.name)
        kept.check_counts(entries, self.policy.name)
        keep, count = slots_of(kept.keep, max(left)), max(left)

        dropped = entries.valid() & ~kept.keep
        dropped_at = torch.where(dropped, entries.seen[:, None, None], NEVER).to(torch.int32)
        # amin: a padding slot may repeat the position of a dropped entry, and its NEVER must not overwrite the record
        record = layer.evict_at[rows].scatter_reduce(-1, entries.positions, dropped_at, reduce="amin")
        layer.evict_at[rows] = record

        wide_keep = keep[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys[rows, :, :count] = layer.keys[rows, :, :held].gather(2, wide_keep)
        values = layer.values[rows, :, :held] if kept.values is None else kept.values
        layer.values[rows, :, :count] = values.gather(2, wide_keep)
        layer.positions[rows, :, :count] = entries.positions.gather(2, keep)
        for name, value in kept.state.items():
            layer.state[name][rows, :, :count] = value.gather(2, keep)

    def _grow(self, capacity: int) -> None:
        for layer in self.layers.values():
            extra = capacity - layer.keys.shape[2]
            grown = {n: F.pad(b, (0, 0, 0, extra) if b.ndim == 4 else (0, extra)) for n, b in layer.slotted().items()}
            layer.replace(grown)


def _oldest_first(queries: Tensor, seen: Tensor) -> Tensor:
    """Return queries [B, Hq, W, D] in order of position. In the input, the query at position p is in slot p % W."""
    order = (seen[:, None] + torch.arange(queries.shape[2], device=seen.device)) % queries.shape[2]
    return queries.gather(2, order[:, None, :, None].expand_as(queries))


@part("gather", detail=True)
def at_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Gather the slots int64 [B, Hkv, N] of keys or values x [B, Hkv, C, D]. Returns [B, Hkv, N, D]."""
    return x.gather(2, slots[..., None].expand(*slots.shape, x.shape[-1]))
