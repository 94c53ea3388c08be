"""The worker's side of eviction: our buffers next to the paged cache, and the compaction of cache and buffers.

For each slot of each layer and kv head, buffers hold the token's position and the policy's state, indexed by block like
the cache. Another buffer holds each request's last queries, if the policy scores with them. No code here loops over
tokens or heads.

A compaction only moves kept entries from beyond the first `left` slots into slots of dropped entries. So the order of a
request's slots, in which a policy receives the entries, is not the order of their positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.vllm.compat import paged
from rollout.vllm.compat.arguments import CacheConfig
from rollout.vllm.memory import most_holders
from rollout.vllm.sampling import RunRecord
from sparse_rl.clock import part
from sparse_rl.errors import UserError
from sparse_rl.methods.triattention.policy import TriAttention
from sparse_rl.models.centres import read_centres
from sparse_rl.policies.base import Entries, Policy, slots_of

# Maximum key elements per call for several layers. On a CPU, this number of elements fits into a core's cache.
AT_ONCE = {"cuda": 2**27, "cpu": 2**17}
MOST = 2**27  # maximum key elements per call for one layer
UNKNOWN = 1 << 40  # prompt length of a block without a request, so that no compaction is due

# ---- what the scheduler tells its workers (connector.py) ------------------------------------------------------------


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
class Kept:
    """The cache that the earlier turns of a conversation have left, over which a request samples the next turn.

    name : name of the entries in the workers' host memory
    seen : number of tokens that the cache has seen
    entries : number of entries per kv head
    prompt : if the schedule counts tokens, number of tokens of the conversation's prompt, and the request reads its
        tokens one by one; else 0: to the schedule, the request has a prompt of the entries and the tokens that it reads
    """

    name: int
    seen: int
    entries: int
    prompt: int = 0

    @property
    def gone(self) -> int:
        """Number of tokens that the schedule does not count."""
        return 0 if self.prompt else self.seen - self.entries


@dataclass(frozen=True)
class Begun:
    """A request that was admitted, for the first time or after a preemption. All its tokens are prefilled densely.

    block : the request's first block, by which workers identify the request until it ends
    prompt : number of tokens to prefill, with those of its context; if a conversation goes on, what the schedule counts
    behind : compacted context that the request continues, if any, whose tokens need no forward pass
    kept : cache of the conversation that the request continues, if any, likewise
    holder : id of the holder (scheduler.py) with copies of whose entries the request begins, if any, so that only the
        last token of the prompt needs a forward pass
    source, target : blocks of the holder, and as many of the request; or the request's blocks for the entries of `kept`
    """

    request_id: str
    block: int
    prompt: int
    behind: Behind | None = None
    kept: Kept | None = None
    holder: str = ""
    source: Sequence[int] = ()
    target: Sequence[int] = ()

    @property
    def gone(self) -> int:
        """Number of tokens that the schedule does not count."""
        before = self.kept or self.behind
        return 0 if before is None else before.gone


@dataclass(frozen=True)
class Finished:
    """A turn of a conversation that has ended. blocks : the blocks with its entries

    name : name under which the workers keep the entries
    """

    name: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class Due:
    """A request that is compacted after this forward pass.

    block : the request's first block
    seen : number of tokens that the request has seen
    held, left : number of entries per kv head before and after the compaction
    """

    block: int
    seen: int
    held: int
    left: int


# ---- the memory that it works on -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrangement:
    """Position of a block among the blocks of all layers: block b of layer l has index l * of_layer + b * of_block."""

    of_layer: int
    of_block: int

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> Arrangement:
        first, layers, blocks = views[0], len(views), views[0].shape[0]
        step = views[1].storage_offset() - first.storage_offset() if layers > 1 else blocks * first.stride(0)
        layouts = {
            (v.untyped_storage().data_ptr(), v.storage_offset() - layer * step, v.shape, v.stride())
            for layer, v in enumerate(views)
        }
        if len(layouts) == 1:
            if step == blocks * first.stride(0):
                return cls(blocks, 1)
            if layers * step == first.stride(0):
                return cls(1, layers)
        raise UserError("vLLM cannot evict: the caches of its layers are not at equal distances in one allocation")

    def joined(self, views: Sequence[Tensor]) -> Tensor:
        first = views[0]
        shape = (len(views) * first.shape[0], *first.shape[1:])
        return first.as_strided(shape, (first.stride(0) // self.of_block, *first.stride()[1:]), first.storage_offset())

    def apart(self, joined: Tensor, layers: int) -> Tensor:
        if self.of_block == 1:
            return joined.unflatten(0, (layers, -1))
        return joined.unflatten(0, (-1, layers)).transpose(0, 1)


@dataclass
class Slab:
    """The tensors that a compaction reads and writes, for the blocks of all L layers.

    keys, values : [L x blocks, Hkv, block size, D]
    positions : int32 [L x blocks, Hkv, block size]
    state : name -> float32 [L x blocks, Hkv, block size], the policy's memory per entry
    queries : [L x rows, W, Hq, D], the last W queries of each request, one row per request, if the policy needs them
    coordinate : [L x blocks, Hkv, block size], the keys' additional coordinate that holds biases (paged.py), if any
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    state: dict[str, Tensor]
    queries: Tensor | None
    coordinate: Tensor | None


# ---- the plan of a forward pass, which is the same for all layers ----------------------------------------------------


@dataclass
class Group:
    """R requests of a batch whose entries are passed to the policy together, padded to N entries.

    blocks : int64 [R, N / block size], blocks of each request; paged.NOBODYS after the blocks with entries
    lengths, seen : int64 [R], number of entries that each request holds, and number of tokens that it has seen
    left : number of entries that a compaction leaves in each kv head
    rows : int64 [R], rows of the query buffer; None until the group is assigned to layers (`CacheState._in`)
    """

    blocks: Tensor
    lengths: Tensor
    seen: Tensor
    left: int = 0
    rows: Tensor | None = None


@dataclass
class Plan:
    """Plan of one forward pass for B requests with T new tokens, the same for all layers.

    blocks : int64 [B, max blocks], blocks of each request
    seen : int64 [B], number of tokens that each request has seen after this pass
    lengths : int64 [B], number of entries that each request attends to
    slots : int64 [T], slots of the new tokens
    recent : three tensors about the queries to keep: indices of their tokens in the batch (int64; a slice if each
        request adds one token), first blocks of their requests (int64), places in the query buffer's row (int64)
    watch : if the policy observes every query, the requests that add several tokens, observed in each layer; indices of
        the queries' tokens in the batch, and their positions, int64 [R, T] each
    alone : then also the requests that add one token, observed after the forward pass, in several layers together
    slots_of_recent : int64, slots of the queries to keep in a layer's query buffer; None until the forward pass
    """

    blocks: Tensor
    seen: Tensor
    lengths: Tensor
    slots: Tensor
    recent: tuple[Any, Tensor, Tensor] | None
    watch: tuple[Group, Tensor, Tensor] | None = None
    alone: Group | None = None
    slots_of_recent: Tensor | None = None

    @property
    def first(self) -> Tensor:
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
        Returns the copy, which is valid until the next one.
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


# ---- the state -----------------------------------------------------------------------------------------------------


class CacheState:
    """The caches of all layers of one worker, the policy's memory of their entries, and their compactions."""

    def __init__(self, vllm_config: Any, config: CacheConfig, kv_caches: dict[str, Tensor]) -> None:
        self.config, self.policy = config, config.policy
        layers = paged.attention_layers(vllm_config, kv_caches)
        layer, count = next(iter(layers.values())), len(layers)
        self.index = {name: i for i, name in enumerate(layers)}
        self.caches = [paged.key_value_views(kv_caches[name], paged.keys_are_transposed()) for name in layers]
        self.folded: list[Tensor] = []  # for each layer, the coordinate of the keys that holds biases (`paged.widened`)
        if config.folds:
            head_size = layer.head_size
            self.folded = [keys[..., head_size] for keys, _ in self.caches]
            self.caches = [(keys[..., :head_size], values[..., :head_size]) for keys, values in self.caches]
        blocks, heads, self.block_size, dim = self.caches[0][0].shape
        self.device, self.scaling = self.caches[0][0].device, layer.impl.scale
        self.heads = torch.arange(heads, device=self.device)
        if isinstance(self.policy, TriAttention):
            group, own = layer.num_heads // heads, paged.own_heads(heads)
            centres = read_centres(vllm_config.model_config.model)
            self.policy = self.policy.with_centres(centres.of_heads(slice(group * own.start, group * own.stop)))
        rows = vllm_config.scheduler_config.max_num_seqs
        rows += most_holders(self.policy, rows)
        window = self.policy.last_queries or int(self.policy.every_query)
        self.arrangement = Arrangement.of([keys for keys, _ in self.caches])
        joined, apart = self.arrangement.joined, self.arrangement.apart
        keys, values = (joined(views) for views in zip(*self.caches, strict=True))
        empty = torch.zeros(count * blocks, heads, self.block_size, device=self.device)
        state = {name: torch.full_like(empty, start) for name, start in self.policy.entry_memory.items()}
        coordinate = joined(self.folded) if self.folded else None
        self.slab = Slab(keys, values, empty.int(), state, None, coordinate)
        self.positions = apart(self.slab.positions, count)
        self.state = {name: apart(value, count) for name, value in self.slab.state.items()}
        self.queries = None
        if window:
            size = (count, rows + 1, window, layer.num_heads, dim)  # the last row belongs to no request
            self.queries = torch.zeros(size, dtype=vllm_config.model_config.dtype, device=self.device)
            self.slab.queries = self.queries.flatten(0, 1)
        self.prompt_length = torch.full((blocks,), UNKNOWN, device=self.device)  # indexed by a request's first block
        self.row = torch.full((blocks,), rows, device=self.device)  # indexed by a request's first block
        self.free_rows = list(range(rows))
        self.row_of: dict[int, int] = {}
        # number of tokens that a request's schedule does not count (`Begun.gone`), indexed by its first block
        self.gone = torch.zeros_like(self.prompt_length)
        self.uncounted: set[int] = set()  # the first blocks for which that number is not 0
        self.kept: dict[int, list[Tensor]] = {}  # name of a conversation -> what `_parts` yields, in host memory
        # names of conversations that may go on, others are not kept; None in a server, which names those to let go
        self.live: set[int] | None = None
        # number of a request in the record, indexed by the request's first block
        self.number = torch.zeros(blocks, dtype=torch.long, device=self.device)
        self.prompts: dict[int, int] = {}  # first block -> prompt length, or 0 once the prompt is compacted
        self.failed = torch.zeros(rows + 1, dtype=torch.bool, device=self.device)  # for each row: a score was NaN
        number = torch.arange(count, device=self.device)
        self.first_block, self.first_row = number * self.arrangement.of_layer, number * (rows + 1)  # of each layer
        self.memory: dict[str, Tensor] = {}  # name -> [L, rows, ...], the policy's memory of each request
        self.plan: Plan | None = None
        self.record: RunRecord | None = None  # record of the current run; a server keeps none

    # ---- requests ---------------------------------------------------------------------------------------------------

    def keep_only(self, live: Sequence[int]) -> None:
        """Let go of all conversations with other names."""
        self.live = set(live)
        self.kept = {name: parts for name, parts in self.kept.items() if name in self.live}

    def let_go(self, names: Sequence[int]) -> None:
        for name in names:
            self.kept.pop(name, None)

    def keep(self, finished: Sequence[Finished]) -> None:
        """Copy the entries of conversations to host memory. Their blocks may have new owners, but nothing is written to
        these blocks before this call.
        """
        for turn in finished:
            if self.live is None or turn.name in self.live:
                self.kept[turn.name] = [buffer[index].cpu() for buffer, index in self._parts(turn.blocks)]

    def _parts(self, blocks: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the buffers of all layers, and where in each of them the request with these blocks has its data."""
        slab, index = self.slab, self._sent(blocks) * self.arrangement.of_block + self.first_block[:, None]
        coordinate = [] if slab.coordinate is None else [slab.coordinate]
        for buffer in (slab.keys, slab.values, slab.positions, *slab.state.values(), *coordinate):
            yield buffer, index
        by_row = [] if slab.queries is None else [slab.queries]
        for buffer in (*by_row, *(value.flatten(0, 1) for value in self.memory.values())):
            yield buffer, self.first_row + self.row_of[blocks[0]]

    def begin(self, ended: Sequence[int], begun: Sequence[Begun]) -> None:
        self._uncount(ended, begun)
        for block in ended:
            self.free_rows.append(self.row_of.pop(block))
            del self.prompts[block]
        if ended:
            self.prompt_length[self._sent(ended)] = UNKNOWN
        for request in begun:
            self.row_of[request.block] = self.free_rows.pop()
            self.prompts[request.block] = 0 if request.kept and request.kept.prompt else request.prompt
        numbers = [
            0 if self.record is None else self.record.begin(request.request_id, request.holder) for request in begun
        ]
        if begun:
            first = self._sent([request.block for request in begun])
            self.prompt_length[first] = self._sent([request.prompt for request in begun])
            self.row[first] = rows = self._sent([self.row_of[request.block] for request in begun])
            self.failed[rows] = False
            self.number[first] = self._sent(numbers)
        if forks := [request for request in begun if request.holder]:
            self.copy(forks)
        for request in begun:
            if request.kept is not None:
                parts = zip(self._parts(request.target), self.kept[request.kept.name], strict=True)
                for (buffer, index), values in parts:
                    buffer[index] = values.to(self.device)

    def _uncount(self, ended: Sequence[int], begun: Sequence[Begun]) -> None:
        """Note how many tokens of each request the schedule does not count."""
        numbers = dict.fromkeys(ended, 0) | {request.block: request.gone for request in begun}
        changed = {block: number for block, number in numbers.items() if number or block in self.uncounted}
        if changed:
            self.gone[self._sent([*changed])] = self._sent([*changed.values()])
            self.uncounted = self.uncounted - changed.keys() | {block for block, number in changed.items() if number}

    def copy(self, forks: Sequence[Begun]) -> None:
        """Copy what is in the blocks and the rows of holders to those of the samples that begin."""
        blocks = [pair for fork in forks for pair in zip(fork.source, fork.target, strict=True)]
        source, target = self._sent(blocks).unbind(1)
        for layer, caches in enumerate(self.caches):
            state = (value[layer] for value in self.state.values())
            for buffer in (*caches, self.positions[layer], *state, *self.folded[layer : layer + 1]):
                buffer[target] = buffer[source]
        source, target = self.row[self._sent([(fork.source[0], fork.target[0]) for fork in forks])].unbind(1)
        for by_row in (*self.memory.values(), *([] if self.queries is None else [self.queries])):
            by_row[:, target] = by_row[:, source]

    def _sent(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)

    # ---- before the forward -----------------------------------------------------------------------------------------

    def make_plan(self, block_table: Tensor, seq_lens: Tensor, starts: Tensor, starts_cpu: Tensor) -> Plan:
        """Compute the slots of a batch's new tokens, and write the positions and initial states of their entries.

        block_table : int32 [B, max blocks], blocks of each request
        seq_lens : int32 [B], number of tokens that each request has seen after this forward pass
        starts : int32 [B + 1], index of each request's first token in the batch, then the number of tokens
        starts_cpu : `starts` in host memory
        """
        blocks = block_table.long()
        first, tokens, seen = blocks[:, 0], int(starts_cpu[-1]), seq_lens.long()
        counted = seen - self.gone[first] if self.uncounted else seen
        lengths = self.policy.schedule.attended(self.prompt_length[first], counted)
        row, slot, logical = torch.arange(len(first), device=self.device), lengths - 1, seen - 1
        all_single = tokens == len(first) and int(starts_cpu.diff().max()) == 1
        if not all_single:
            count = (starts[1:] - starts[:-1]).long()
            row = torch.repeat_interleave(row, count, output_size=tokens)
            behind = (torch.arange(tokens, device=self.device) - starts[1:][row].long()) + 1
            slot, logical = slot[row] + behind, logical[row] + behind
        block, place = blocks[row, slot // self.block_size], slot % self.block_size
        recent = None
        if self.queries is not None:
            window = self.queries.shape[2]
            last: Any = slice(0, tokens)
            if not all_single:  # the indices of each request's last `window` tokens
                kept = starts_cpu.diff().clamp(max=window)
                last = torch.arange(int(kept.sum())) + (starts_cpu[1:] - kept.cumsum(0)).repeat_interleave(kept)
                last = last.to(self.device, non_blocking=True)
            recent = last, first[row[last]], logical[last] % window
        plan = Plan(blocks, seen, lengths, block * self.block_size + place, recent)
        self.enter(block, place, logical)
        if self.policy.every_query:
            self._watch(plan, starts, starts_cpu)
        self.plan = plan
        return plan

    def stay(self, plan: Plan, fixed: Fixed) -> None:
        """If all requests add one token, copy the plan's tensors that layers read to fixed addresses."""
        if plan.recent is not None and isinstance(plan.recent[0], slice):
            tokens, block, place = plan.recent
            plan.recent = tokens, fixed.copy("block", block, len(block)), fixed.copy("place", place, len(block))

    def enter(self, block: Tensor, place: Tensor, logical: Tensor) -> None:
        """Write the positions `logical` [T] and initial states of T new entries, the same in all layers and heads."""
        where = slice(None), block[:, None], self.heads, place[:, None]
        self.positions[where] = logical[:, None].int()
        for name, start in self.policy.entry_memory.items():
            self.state[name][where] = start

    def longest(self, logical: int, new: int) -> int:
        """Return an upper bound on the entries of each request, without waiting for the device, from upper bounds on
        the tokens that it has seen, and on those that it adds.
        """
        held = [self.policy.schedule.most_held(prompt, logical) for prompt in {*self.prompts.values()}]
        return min(logical, max(new, *held)) if held else logical  # without requests, a graph for any batch is captured

    def _watch(self, plan: Plan, starts: Tensor, starts_cpu: Tensor) -> None:
        """Plan how the policy observes queries: one group has the requests with one new token, another has the rest."""
        counts = starts_cpu.diff()
        if int(counts.max()) <= 1:
            plan.alone = self._group(plan.blocks, plan.lengths, plan.seen, self._most_held(plan.lengths))
            return
        single, several = (
            chosen.nonzero()[:, 0].to(self.device, non_blocking=True) for chosen in (counts == 1, counts > 1)
        )

        def group_of(rows: Tensor) -> Group:
            held = plan.lengths[rows]
            return self._group(plan.blocks[rows], held, plan.seen[rows], int(held.max()))

        if len(single):
            plan.alone = group_of(single)
        group = group_of(several)
        step = torch.arange(int(counts.max()), device=self.device)
        count = (starts[1:] - starts[:-1])[several].long()[:, None]
        tokens = starts[several].long()[:, None] + torch.minimum(step, count - 1)
        positions = torch.where(step < count, group.seen[:, None] - count + step, group.seen[:, None])
        plan.watch = group, tokens, positions

    def _most_held(self, held: Tensor) -> int:
        """Return an upper bound on `held`, the entries of requests that add one token, without waiting for a GPU."""
        if held.device.type == "cpu":
            return int(held.max())
        peak = self.policy.schedule.peak
        assert peak is not None
        return max([peak, *self.prompts.values()])

    def _group(self, blocks: Tensor, lengths: Tensor, seen: Tensor, most: int, left: int = 0) -> Group:
        """Make a group of R requests, whose blocks are cut to those that `most` entries need, a bound on `lengths`."""
        blocks = blocks[:, : -(-most // self.block_size)]
        start = torch.arange(0, blocks.shape[1] * self.block_size, self.block_size, device=self.device)
        return Group(blocks.masked_fill(start >= lengths[:, None], paged.NOBODYS), lengths, seen, left)

    # ---- in the forward ---------------------------------------------------------------------------------------------

    def arrive(self, name: str, key: Tensor, value: Tensor) -> bool:
        """Process the keys and values of T new tokens, [T, Hkv, D] each, before a layer attends. Returns True if they
        are then in the cache, so that vLLM need not write them.
        """
        return False

    def bias(self, name: str) -> Tensor | None:
        """Return the biases of a layer's entries, float32 [blocks, Hkv, block size]; None if the policy has none."""
        return None if self.policy.bias is None else self.state[self.policy.bias][self.index[name]]

    def after_layer(self, name: str, query: Tensor) -> None:
        """Store a layer's last queries [T, Hq, D] after it has attended; the policy observes those of `watch`."""
        plan, layer = self.plan, self.index[name]
        assert plan is not None
        if plan.recent is not None:
            assert self.queries is not None
            tokens, block, place = plan.recent
            if plan.slots_of_recent is None:
                plan.slots_of_recent = self.row[block] * self.queries.shape[2] + place
            self.queries[layer].flatten(0, 1).index_copy_(0, plan.slots_of_recent, query[tokens])
        if plan.watch is not None:
            watched, tokens, positions = plan.watch
            group = self._in(range(layer, layer + 1), watched)
            entries = self._entries(group, self.policy.observe_reads)
            self.policy.observe(layer, entries, query[tokens].transpose(1, 2), positions)
            self._remember(group, entries.state)

    # ---- after the forward ------------------------------------------------------------------------------------------

    def after_forward(self) -> None:
        """Let the policy observe the queries of requests that added one token. Called before `compact`."""
        if self.plan is None or self.plan.alone is None:
            return
        alone, self.plan.alone = self.plan.alone, None  # vLLM's V2 runner also calls this without a forward pass
        for layers, group in self._at_once(alone):
            entries = self._entries(group, self.policy.observe_reads, recent=True)
            assert entries.queries is not None
            self.policy.observe(layers[0], entries, entries.queries[:, :, -1:], group.seen[:, None] - 1)
            self._remember(group, entries.state)

    def failed_rows(self, count: int) -> Tensor:
        """Return bool [count]: True for each of the first `count` requests of this step in which a score was NaN."""
        assert self.plan is not None
        return self.failed[self.row[self.plan.first[:count]]]

    def compact(self, due: Sequence[Due]) -> None:
        """Compact requests: first those in decoding, then those at the end of a longer prefill; together those that are
        left the same number of entries.
        """
        self.prompts.update((d.block, 0) for d in due)
        peak = self.policy.schedule.peak
        _, heads, _, dim = self.slab.keys.shape
        groups: dict[tuple[bool, int], list[Due]] = {}
        for d in due:
            groups.setdefault((peak is not None and d.held > peak, d.left), []).append(d)
        for _, group in sorted(groups.items()):
            while group:
                count = max(1, MOST // (heads * dim * max(d.held for d in group)))
                with part("compaction"):
                    self._compact(group[:count])
                group = group[count:]

    def _compact(self, due: list[Due]) -> None:
        plan = self.plan
        assert plan is not None
        first, held, seen = self._sent([(d.block, d.held, d.seen) for d in due]).unbind(1)
        rows = (plan.first[None] == first[:, None]).int().argmax(1)
        whole = self._group(plan.blocks[rows], held, seen, max(d.held for d in due), due[0].left)
        dropped = [
            self._compact_group(layers[0], group).unflatten(0, (len(layers), -1))
            for layers, group in self._at_once(whole)
        ]
        if self.record is not None:
            by_entry = torch.cat(dropped).permute(1, 3, 0, 2)  # [R, entries, L, Hkv]
            count = by_entry.shape[1]
            numbers, at = (x[:, None].expand(-1, count).flatten() for x in (self.number[first], seen))
            self.record.evict(numbers, at, by_entry.flatten(0, 1))

    def _at_once(self, group: Group) -> Iterator[tuple[range, Group]]:
        """Yield (some layers, the group assigned to them)."""
        count, (_, heads, size, dim) = len(self.caches), self.slab.keys.shape
        most = max(1, AT_ONCE[self.device.type] // (group.blocks.numel() * heads * size * dim))
        most = 1 if self.policy.scores_by_layer else most
        for start in range(0, count, most):
            layers = range(start, min(start + most, count))
            yield layers, self._in(layers, group)

    def _in(self, layers: range, group: Group) -> Group:
        """Return a group with one row per layer and request, layer after layer; its blocks and rows are indices into
        the slab.
        """
        part = slice(layers.start, layers.stop)
        blocks = group.blocks * self.arrangement.of_block + self.first_block[part, None, None]
        rows = self.row[group.blocks[:, 0]] + self.first_row[part, None]
        lengths, seen = group.lengths.repeat(len(layers)), group.seen.repeat(len(layers))
        return Group(blocks.flatten(0, 1), lengths, seen, group.left, rows.flatten())

    def _compact_group(self, layer: int, group: Group) -> Tensor:
        """Compact a group that was assigned to layers, the first of which is `layer`. Returns the positions of the
        dropped entries, int32 [R, Hkv, most that a head drops], padded with -1.
        """
        slab, entries = self.slab, self._entries(group, self.policy.score_reads, recent=True)
        kept, left = self.policy.compact(layer, entries), group.left
        if type(self.policy).compact is not Policy.compact:  # whose counts are right
            kept.check_counts(entries, self.policy.name)
        if kept.failed is not None:
            assert group.rows is not None
            nobodys = len(self.failed) - 1
            self.failed.index_fill_(0, torch.where(kept.failed, group.rows % (nobodys + 1), nobodys), True)
            self.failed[nobodys] = False
        self._remember(group, kept.state)
        if kept.values is not None:
            self._write(slab.values, group, kept.values)

        # In each head, the first `left` slots have one dropped entry for each kept entry after these slots. The kept
        # entries move into the slots of these dropped entries. So that nothing waits for the device, each head moves
        # the same number of entries: those that are not kept "move" to their own slots.
        most = kept.keep.shape[2] - left
        moved = min(most, left)
        dropped, behind = slots_of(entries.valid() & ~kept.keep, most), slots_of(kept.keep[..., left:], moved) + left
        place = torch.arange(most, device=self.device)
        is_kept = place[:moved] < kept.keep[..., left:].sum(-1, keepdim=True)
        slots = torch.stack([torch.where(is_kept, dropped[..., :moved], behind), behind])
        block = group.blocks[:, None].expand(2, -1, len(self.heads), -1).gather(3, slots // self.block_size)
        to, source = ((b, self.heads[:, None], p) for b, p in zip(block, slots % self.block_size, strict=True))
        for buffer in (slab.keys, slab.values, slab.positions, *slab.state.values()):
            buffer[to] = buffer[source]
        if slab.coordinate is not None:
            assert self.policy.bias is not None
            blocks = group.blocks.flatten()
            slab.coordinate[blocks] = slab.state[self.policy.bias][blocks].to(slab.coordinate.dtype)
        padding = place >= (group.lengths - left)[:, None, None]
        return entries.positions.gather(2, dropped).masked_fill_(padding, -1).int()

    # ---- paged access -----------------------------------------------------------------------------------------------

    def _remember(self, group: Group, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            self._write(self.slab.state[name], group, value)

    def _write(self, target: Tensor, group: Group, value: Tensor) -> None:
        """Write values [R, Hkv, N, ...] to a group's blocks of a tensor of the slab; those of padding go to the null
        block.
        """
        by_block = value.unflatten(2, (-1, self.block_size)).transpose(1, 2)
        target[group.blocks.flatten()] = by_block.flatten(0, 1)

    def _entries(self, group: Group, reads: tuple[str, ...], recent: bool = False) -> Entries:
        """Return the entries of a group that was assigned to layers, with the tensors that `reads` names and, if
        `recent`, the last queries.
        """
        slab, queries = self.slab, None
        if recent and slab.queries is not None:
            assert group.rows is not None
            window = slab.queries.shape[1]
            oldest_first = (group.seen[:, None] + torch.arange(window, device=self.device)) % window
            queries = slab.queries[group.rows[:, None], oldest_first].transpose(1, 2)
        return Entries(
            keys=paged.read_blocks(slab.keys, group.blocks) if "keys" in reads else None,
            values=paged.read_blocks(slab.values, group.blocks) if "values" in reads else None,
            positions=paged.read_blocks(slab.positions, group.blocks).long(),
            lengths=group.lengths,
            seen=group.seen,
            queries=queries,
            scaling=self.scaling,
            state={name: paged.read_blocks(state, group.blocks) for name, state in slab.state.items()},
            left=[group.left] * len(group.lengths),
            # a slot after those that the last compaction left, at least `left` - period, has a newer token
            older=max(0, group.left - self.policy.last_queries)
            * (self.policy.last_queries <= self.policy.schedule.period),
            mean_over_ranks=paged.mean_over_ranks,
        )
