"""The worker's side of eviction: our buffers next to the paged cache, and the compaction of cache and buffers.

For each slot of each layer and kv head, buffers hold the token's position and the policy's state; they are indexed by
block, like the cache. Another buffer holds each request's last queries, if the policy scores with them. No code in this
module loops over tokens or heads.

A compaction leaves the kept entries in the first `left` slots. It only moves kept entries that are in later slots, into
slots of dropped entries. So the order of a request's slots, in which a policy receives the entries, is not the order of
their positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout.vllm import compacting
from rollout.vllm.compat import paged
from rollout.vllm.compat.arguments import CacheConfig
from rollout.vllm.messages import Begun, Due
from rollout.vllm.plan import NOBODYS, Fixed, Group, Plan, Watch, last_of_each
from rollout.vllm.record import RunRecord
from rollout.vllm.slabs import Arrangement, Slab
from sparse_rl.clock import part
from sparse_rl.errors import NotFiniteError
from sparse_rl.policies.entries import Entries

UNKNOWN = 1 << 40  # prompt length of a block without a request, so that no compaction is due


class CacheState:
    """The caches of all layers of one worker, the policy's memory of their entries, and their compactions."""

    def __init__(self, vllm_config: Any, config: CacheConfig, kv_caches: dict[str, Tensor]) -> None:
        self.config, self.policy = config, config.policy
        layers = paged.attention_layers(vllm_config, kv_caches)
        layer, count = next(iter(layers.values())), len(layers)
        self.index = {name: i for i, name in enumerate(layers)}
        self.caches = [paged.key_value_views(kv_caches[name], paged.keys_are_transposed()) for name in layers]
        self.folded: list[Tensor] = []  # for each layer, the coordinate of the keys that holds biases (folded.py)
        if config.folds:
            head_size = layer.head_size
            self.folded = [keys[..., head_size] for keys, _ in self.caches]
            self.caches = [(keys[..., :head_size], values[..., :head_size]) for keys, values in self.caches]
        blocks, heads, self.block_size, dim = self.caches[0][0].shape
        self.device, self.scaling = self.caches[0][0].device, layer.impl.scale
        self.heads = torch.arange(heads, device=self.device)
        rows, window = (
            vllm_config.scheduler_config.max_num_seqs,
            self.policy.last_queries or int(self.policy.every_query),
        )

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
        # number of a request in the record, indexed by the request's first block
        self.number = torch.zeros(blocks, dtype=torch.long, device=self.device)
        self.prompts: dict[int, int] = {}  # first block -> prompt length, or 0 once the prompt is compacted
        self.failed = torch.zeros(rows + 1, dtype=torch.bool, device=self.device)  # for each row: a score was NaN
        number = torch.arange(count, device=self.device)
        self.first_block, self.first_row = number * self.arrangement.of_layer, number * (rows + 1)  # of each layer
        self.plan: Plan | None = None
        self.record: RunRecord | None = None  # record of the current run; a server keeps none

    # ---- requests ---------------------------------------------------------------------------------------------------

    def begin(self, ended: Sequence[int], begun: Sequence[Begun]) -> None:
        """Remove the requests with the first blocks `ended`, and add the requests `begun`."""
        for block in ended:
            self.free_rows.append(self.row_of.pop(block))
            del self.prompts[block]
        if ended:
            self.prompt_length[self._sent(ended)] = UNKNOWN
        for request in begun:
            self.row_of[request.block] = self.free_rows.pop()
            self.prompts[request.block] = request.prompt
        numbers = [0 if self.record is None else self.record.begin(request.request_id) for request in begun]
        if begun:
            first = self._sent([request.block for request in begun])
            self.prompt_length[first] = self._sent([request.prompt for request in begun])
            self.row[first] = rows = self._sent([self.row_of[request.block] for request in begun])
            self.failed[rows] = False
            self.number[first] = self._sent(numbers)

    def _sent(self, numbers: Sequence[Any]) -> Tensor:
        """Copy integers to the device, as int64, without waiting for the device."""
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
        lengths = self.policy.schedule.attended(self.prompt_length[first], seen)
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
            if not all_single:
                last = last_of_each(starts_cpu, window).to(self.device, non_blocking=True)
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
        """Return an upper bound on the entries of each request in a batch, without waiting for the device.

        logical, new : upper bounds on the tokens that a request has seen, and on those that it adds
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
        plan.watch = Watch(group, tokens, positions)

    def _most_held(self, held: Tensor) -> int:
        """Return an upper bound on `held`, the entries of requests that add one token, without waiting for a GPU."""
        if held.device.type == "cpu":
            return int(held.max())
        peak = self.policy.schedule.peak
        assert peak is not None
        return max([peak, *self.prompts.values()])

    def _group(self, blocks: Tensor, lengths: Tensor, seen: Tensor, most: int, left: int = 0) -> Group:
        """Make a group of R requests, whose number of blocks is cut to those that `most` entries need.

        blocks : int64 [R, max blocks], blocks of each request
        most : upper bound on `lengths`
        """
        blocks = blocks[:, : -(-most // self.block_size)]
        start = torch.arange(0, blocks.shape[1] * self.block_size, self.block_size, device=self.device)
        return Group(blocks.masked_fill(start >= lengths[:, None], NOBODYS), lengths, seen, left)

    # ---- in the forward ---------------------------------------------------------------------------------------------

    def arrive(self, name: str, key: Tensor, value: Tensor) -> bool:
        """Process the keys and values of T new tokens, [T, Hkv, D] each, before a layer attends.

        Returns True if this method writes keys and values to the cache, so that vLLM need not write them.
        """
        return False

    def bias(self, name: str) -> Tensor | None:
        """Return the biases of a layer's entries, float32 [blocks, Hkv, block size]; None if the policy has none."""
        return None if self.policy.bias is None else self.state[self.policy.bias][self.index[name]]

    def after_layer(self, name: str, query: Tensor) -> None:
        """Store a layer's last queries after it has attended, and let the policy observe the queries of `Plan.watch`.

        query : [T, Hq, D], queries of the batch's T tokens
        """
        plan, layer = self.plan, self.index[name]
        assert plan is not None
        if plan.recent is not None:
            assert self.queries is not None
            tokens, block, place = plan.recent
            if plan.slots_of_recent is None:
                plan.slots_of_recent = self.row[block] * self.queries.shape[2] + place
            self.queries[layer].flatten(0, 1).index_copy_(0, plan.slots_of_recent, query[tokens])
        if (watch := plan.watch) is not None:
            group = self._in(range(layer, layer + 1), watch.group)
            entries = self._entries(group, self.policy.observe_reads)
            self.policy.observe(layer, entries, query[watch.tokens].transpose(1, 2), watch.positions)
            self._remember(group, entries.state)

    # ---- after the forward ------------------------------------------------------------------------------------------

    def after_forward(self) -> None:
        """Let the policy observe the queries of requests that added one token. Called before `compact`."""
        if self.plan is None or self.plan.alone is None:
            return
        for layers, group in self._at_once(self.plan.alone):
            self._observe_last(layers[0], group)

    def _observe_last(self, layer: int, group: Group) -> None:
        entries = self._entries(group, self.policy.observe_reads, recent=True)
        assert entries.queries is not None
        self.policy.observe(layer, entries, entries.queries[:, :, -1:], group.seen[:, None] - 1)
        self._remember(group, entries.state)

    def failed_rows(self, count: int) -> Tensor:
        """Return bool [count]: True for each of the first `count` requests of this step in which a score was NaN."""
        assert self.plan is not None
        return self.failed[self.row[self.plan.first[:count]]]

    def check_finite(self) -> None:
        """Raise NotFiniteError if a score was NaN on this rank: vLLM's tokens only show the NaN scores of rank 0."""
        if bool(self.failed.any()):
            raise NotFiniteError(f"{self.policy.name}: a NaN score; the model's keys or queries are not finite")

    def compact(self, due: Sequence[Due]) -> None:
        """Compact requests: first those in decoding, then those at the end of their prefill."""
        self.prompts.update((d.block, 0) for d in due)
        peak = self.policy.schedule.peak
        _, heads, _, dim = self.slab.keys.shape
        for group in ([d for d in due if d.held == peak], [d for d in due if d.held != peak]):
            while group:
                count = max(1, compacting.MOST // (heads * dim * max(d.held for d in group)))
                with part("compaction"):
                    self._compact(group[:count])
                group = group[count:]

    def _compact(self, due: list[Due]) -> None:
        plan = self.plan
        assert plan is not None
        first, held, seen = self._sent([(d.block, d.held, d.seen) for d in due]).unbind(1)
        rows = (plan.first[None] == first[:, None]).int().argmax(1)
        whole = self._group(plan.blocks[rows], held, seen, max(d.held for d in due), due[0].left)
        dropped = []
        for layers, group in self._at_once(whole):
            try:
                evicted = self._compact_group(layers[0], group)
            except NotFiniteError:
                evicted = torch.cat([self._compact_alone(layers[0], row_group) for row_group in group.apart()])
            dropped.append(evicted.view(len(layers), len(evicted) // len(layers)))
        if self.record is not None:
            self.record.drop(
                [d.request_id for d in due],
                [d.seen for d in due],
                [d.held - d.left for d in due],
                torch.cat(dropped).cpu().numpy(),
            )

    def _compact_alone(self, layer: int, row_group: Group) -> Tensor:
        """Compact one request in one layer. If a score is NaN, the request has failed and keeps its entries."""
        try:
            return self._compact_group(layer, row_group)
        except NotFiniteError:
            assert row_group.rows is not None
            self.failed[row_group.rows % len(self.failed)] = True
            count = 0 if self.record is None else len(self.heads) * (int(row_group.lengths) - row_group.left)
            return self.positions.new_zeros(count)

    def _at_once(self, group: Group) -> Iterator[tuple[range, Group]]:
        """Yield (indices of layers, the group assigned to these layers); AT_ONCE limits the number of these layers."""
        count, (_, heads, size, dim) = len(self.caches), self.slab.keys.shape
        most = max(1, compacting.AT_ONCE[self.device.type] // (group.blocks.numel() * heads * size * dim))
        for start in range(0, count, most):
            layers = range(start, min(start + most, count))
            yield layers, self._in(layers, group)

    def _in(self, layers: range, group: Group) -> Group:
        """Assign a group to layers: return a group with one row per layer and request, layer after layer.

        Blocks and rows of the returned group are indices into the slab.
        """
        part = slice(layers.start, layers.stop)
        blocks = group.blocks * self.arrangement.of_block + self.first_block[part, None, None]
        rows = self.row[group.blocks[:, 0]] + self.first_row[part, None]
        lengths, seen = group.lengths.repeat(len(layers)), group.seen.repeat(len(layers))
        return Group(blocks.flatten(0, 1), lengths, seen, group.left, rows.flatten())

    def _compact_group(self, layer: int, group: Group) -> Tensor:
        """Compact a group that was assigned to layers; `layer` is the first of these layers.

        Returns the positions of the dropped entries, row by row, int32 [sum of Hkv x (length - left)]; empty if the run
        has no record.
        """
        slab, entries = self.slab, self._entries(group, self.policy.score_reads, recent=True)
        kept, left = self.policy.compact(layer, entries), group.left
        kept.check_counts(entries, self.policy.name)
        self._remember(group, kept.state)
        if kept.values is not None:
            self._write(slab.values, group, kept.values)
        dropped = torch.empty(0)
        if self.record is not None:
            dropped = entries.positions[entries.valid() & ~kept.keep].int()

        # In each head, the first `left` slots have one dropped entry for each kept entry after these slots. The kept
        # entries move into the slots of these dropped entries.
        behind = self._listed(group.blocks, kept.keep[..., left:], left)
        freed = self._listed(group.blocks, ~kept.keep[..., :left], 0)
        for buffer in (slab.keys, slab.values, slab.positions, *slab.state.values()):
            buffer[freed] = buffer[behind]
        if slab.coordinate is not None:
            assert self.policy.bias is not None
            blocks = group.blocks.flatten()
            slab.coordinate[blocks] = slab.state[self.policy.bias][blocks].to(slab.coordinate.dtype)
        return dropped

    # ---- paged access -----------------------------------------------------------------------------------------------

    def _remember(self, group: Group, state: dict[str, Tensor]) -> None:
        """Write a policy's state of a group's entries, name -> [R, Hkv, N], back to the slab."""
        for name, value in state.items():
            self._write(self.slab.state[name], group, value)

    def _write(self, target: Tensor, group: Group, value: Tensor) -> None:
        """Write values [R, Hkv, N, ...] to a group's blocks. Values of padding go to the null block.

        target : [number of blocks, Hkv, block size, ...], tensor of the slab
        """
        by_block = value.unflatten(2, (-1, self.block_size)).transpose(1, 2)
        target[group.blocks.flatten()] = by_block.flatten(0, 1)

    def _listed(self, blocks: Tensor, mask: Tensor, start: int) -> tuple[Tensor, ...]:
        """Return (blocks, heads, places in the block) of the slots for which a mask is True.

        mask : bool [R, Hkv, K], for the K slots from slot `start` on
        """
        row, head, slot = mask.nonzero(as_tuple=True)
        slot = slot + start
        return blocks[row, slot // self.block_size], head, slot % self.block_size

    def _entries(self, group: Group, reads: tuple[str, ...], recent: bool = False) -> Entries:
        """Return the entries of a group that was assigned to layers, with the tensors that `reads` names.

        recent : True to include the last queries
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
            mean_over_ranks=paged.mean_over_ranks,
        )
