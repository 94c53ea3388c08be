"""The paged cache under a learned policy. If a kv head holds `budget` entries when a new token comes, one entry is
evicted before the layer attends. The new token's key and value take the slot of the evicted entry.

Before the forward pass, a candidate for eviction is found in each kv head, for all layers together: the entry of lowest
priority that is neither a sink nor in the window. If tokens are scored on arrival, the candidate is evicted, and the
new tokens are scored after the forward pass, again for all layers together.

If scores are delayed, a token is scored when it leaves the window. The score depends on the new token's key in the
layer, so each layer runs one step of its scorer before it attends. If the leaving token's priority is at most that of
the candidate, the leaving token is evicted; otherwise the candidate is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.vllm.compat import paged
from rollout.vllm.compat.arguments import CacheConfig
from rollout.vllm.state import Begun, CacheState, Fixed, Group, Plan
from sparse_rl.methods.kvpop.policy import PRIORITY, KVpop
from sparse_rl.methods.kvpop.scorers import StackedScorers
from sparse_rl.models.directory import stored_scorers
from sparse_rl.policies.base import Chunk


@dataclass
class Singles:
    """R requests that add one token each.

    tokens : indices of these tokens in the batch, a slice or int64 [R]
    first, seen : int64 [R], first block of each request, and number of tokens that it has seen
    block, place : int64 [L, R, Hkv], slot of the new token: block, and place in the block
    dropped : int64 [L, R, Hkv], position of the evicted token; -1 means none
    came : [L, R, Hkv, 2 D], new keys and values; None if scores are delayed
    leaving : tokens that leave the window; None if tokens are scored on arrival
    """

    tokens: Any
    first: Tensor
    seen: Tensor
    block: Tensor
    place: Tensor
    dropped: Tensor
    came: Tensor | None = None
    leaving: Leaving | None = None


@dataclass
class Leaving:
    """The tokens that leave the window of recent tokens, one for each of R requests ("leaving tokens").

    positions : int64 [R]; a negative position means that no token leaves
    block, place : int64 [L, R, Hkv], slot of the leaving token: block, and place in the block
    competes : bool [R], True if the leaving token may be evicted
    candidate : float32 [L, R, Hkv], priority of the candidate for eviction; NaN if `competes` is False
    aged : float32 [L, R, Hkv], number that is subtracted from the leaving token's score to give its priority
    priority : float32 [L, R, Hkv], priority of the leaving token, filled in layer by layer
    rows : int64 [R], rows of the scorers' memory, set in the forward pass
    """

    positions: Tensor
    block: Tensor
    place: Tensor
    competes: Tensor
    candidate: Tensor
    aged: Tensor
    priority: Tensor
    rows: Tensor | None = None


class ArrivalState(CacheState):
    def __init__(self, vllm_config: Any, config: CacheConfig, kv_caches: dict[str, Tensor]) -> None:
        super().__init__(vllm_config, config, kv_caches)
        policy = config.policy
        assert isinstance(policy, KVpop)
        layers, heads, dim = len(self.caches), len(self.heads), self.slab.keys.shape[-1]
        self.scorers = StackedScorers(policy.config.scorer, layers, heads, dim, self.device)
        self.scorers.load(stored_scorers(vllm_config.model_config.model), paged.own_heads(heads))
        self.policy: KVpop = policy.with_scorers(self.scorers.of_layer)
        self.empty = {name: value.to(self.device) for name, value in policy.sequence_memory(heads, dim).items()}
        self.memory = {
            name: value.repeat(layers, len(self.failed), *[1] * value.ndim) for name, value in self.empty.items()
        }
        self.singles: Singles | None = None
        # chunks of prompts: index of the request, tokens of the chunk in the batch, number of tokens cached before
        self.parts: list[tuple[int, slice, int]] = []

    def begin(self, ended: Sequence[int], begun: Sequence[Begun]) -> None:
        rows = self._sent([self.row_of[block] for block in ended])
        for name, value in self.memory.items():
            value[:, rows] = self.empty[name]
        super().begin(ended, begun)

    # ---- before the forward -----------------------------------------------------------------------------------------

    def enter(self, block: Tensor, place: Tensor, logical: Tensor) -> None:
        """Do nothing: slots differ between layers and heads; `arrive` and `after_forward` write the entries."""

    def make_plan(self, block_table: Tensor, seq_lens: Tensor, starts: Tensor, starts_cpu: Tensor) -> Plan:
        plan = super().make_plan(block_table, seq_lens, starts, starts_cpu)
        counts = starts_cpu.diff()
        chunks = (counts > 1).nonzero()[:, 0].tolist()
        lengths = plan.lengths.tolist() if chunks else []  # all tokens of a prompt are held while it is prefilled
        self.parts = [
            (r, slice(int(starts_cpu[r]), int(starts_cpu[r + 1])), lengths[r] - int(counts[r])) for r in chunks
        ]
        single = (counts == 1).nonzero()[:, 0]
        self.singles = self._singles(plan, single, starts) if len(single) else None
        return plan

    def _singles(self, plan: Plan, single: Tensor, starts: Tensor) -> Singles:
        all_single = len(single) == len(plan.seen)
        rows: Any = slice(None) if all_single else single.to(self.device)
        tokens: Any = slice(0, len(single)) if all_single else starts[rows].long()
        first, seen = plan.first[rows], plan.seen[rows]
        prompt, schedule = self.prompt_length[first], self.policy.schedule
        held = schedule.held(prompt, seen - 1)
        full = (seen > prompt) & (held >= schedule.budget)
        blocks = plan.blocks[rows][:, : -(-(self._most_held(held) + 1) // self.block_size)]
        layers, heads, count = len(self.caches), len(self.heads), len(single)
        entries = self._entries(self._in(range(layers), Group(blocks, held, seen)), reads=())
        slot, candidate, is_nan = self.policy.worst(entries, but=1 if self.policy.delay else 0)
        evicted = full.repeat(layers)[:, None]
        self._fail(first, (is_nan & evicted).view(layers, count, heads))
        dropped = entries.positions.gather(-1, slot[..., None])[..., 0]
        block, place = self._at(blocks, torch.where(evicted, slot, entries.lengths[:, None]))
        dropped = torch.where(evicted, dropped, -1).view(layers, count, heads)
        singles = Singles(tokens, first, seen, block, place, dropped)
        if not self.policy.delay:
            keys = self.slab.keys
            singles.came = keys.new_empty(layers, count, heads, 2 * keys.shape[-1])
            return singles
        positions = seen - 1 - self.policy.delay
        competes = (positions >= self.policy.config.sinks) & full
        candidate = candidate.view(layers, count, heads).masked_fill(~competes[:, None], torch.nan)
        aged = self.policy.aged(self.scorers.log_decay[:, None], positions.clamp(min=0)[:, None])
        leaving_slot = self._at(blocks, entries.at(positions.repeat(layers)))
        singles.leaving = Leaving(positions, *leaving_slot, competes, candidate, aged, torch.empty_like(candidate))
        return singles

    def stay(self, plan: Plan, fixed: Fixed) -> None:
        super().stay(plan, fixed)
        if self.singles is not None and not self.parts:
            fixed.copy_fields(self.singles, len(self.singles.first))

    def _at(self, blocks: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return (block, place in the block), [L, R, Hkv] each, of slots [L x R, Hkv], counted from the first of each
        request's `blocks` [R, max blocks].
        """
        slot = slot.view(len(self.caches), len(blocks), -1)
        block = blocks.expand(len(slot), -1, -1).gather(2, slot // self.block_size)
        return block, slot % self.block_size

    # ---- in the forward, before a layer attends ---------------------------------------------------------------------

    def arrive(self, name: str, key: Tensor, value: Tensor) -> bool:
        """Write the keys and values of T new tokens, [T, Hkv, D] each, to one layer's cache. Returns True."""
        layer, singles = self.index[name], self.singles
        if singles is not None:
            new = key[singles.tokens], value[singles.tokens]
            if singles.came is None:
                self._decide(layer, singles, *new)
            else:
                torch.cat(new, dim=-1, out=singles.came[layer])
            where = singles.block[layer], self.heads, singles.place[layer]
            for cache, entry in zip(self.caches[layer], new, strict=True):
                cache[where] = entry
        for request, tokens, cached in self.parts:
            self._take_in(layer, request, cached, key[tokens], value[tokens])
        return True

    def _decide(self, layer: int, singles: Singles, key: Tensor, value: Tensor) -> None:
        """Score a layer's leaving tokens, and choose the evicted tokens. key, value : [R, Hkv, D], of new tokens"""
        leaving = singles.leaving
        assert leaving is not None
        if leaving.rows is None:
            leaving.rows = self.row[singles.first]
        block, place = leaving.block[layer], leaving.place[layer]
        leaving_entry = torch.cat([cache[block, self.heads, place] for cache in self.caches[layer]], dim=-1)[:, :, None]
        memory = {name: value[layer, leaving.rows] for name, value in self.memory.items()}
        x, positions = torch.cat([key, value], dim=-1)[:, :, None], leaving.positions[:, None]
        scores = self.scorers.of_layer[layer].follow(memory, x, leaving_entry, positions)[:, :, 0]
        for name, after in memory.items():
            self.memory[name][layer, leaving.rows] = after
        priority = torch.sub(scores, leaving.aged[layer], out=leaving.priority[layer])
        evicted = priority <= leaving.candidate[layer]  # if equal, the later token is evicted: the leaving one
        for target, leaving_slot in ((singles.block[layer], block), (singles.place[layer], place)):
            torch.where(evicted, leaving_slot, target, out=target)

    def _take_in(self, layer: int, request: int, cached: int, key: Tensor, value: Tensor) -> None:
        """Write a chunk of a prompt, [T, Hkv, D] each, after `cached` tokens, to one layer's cache. During prefill,
        slots are in the order of positions.
        """
        plan, delay = self.plan, self.policy.delay
        assert plan is not None
        blocks, row = plan.blocks[request], self.row[plan.first[request]]
        memory = {name: m[layer, row][None] for name, m in self.memory.items()}

        def where(positions: Tensor) -> tuple[Tensor, ...]:
            return blocks[positions // self.block_size][:, None], self.heads, (positions % self.block_size)[:, None]

        delayed = where(torch.arange(cached - delay, cached, device=self.device).clamp(min=0))
        earlier = (cache[delayed] for cache in self.caches[layer])
        k, v, earlier_k, earlier_v = (entry.transpose(0, 1)[None] for entry in (key, value, *earlier))
        start = torch.tensor([cached], device=self.device)
        states = self.policy.take_in(layer, Chunk(k, v, earlier_k, earlier_v, start, None, memory))
        for name, after in memory.items():
            self.memory[name][layer, row] = after[0]
        positions = torch.arange(cached, cached + len(key), device=self.device)
        now = where(positions)
        for cache, entry in zip(self.caches[layer], (key, value), strict=True):
            cache[now] = entry
        self.positions[layer][now] = positions.int()[:, None]
        scored = positions - delay
        real = scored >= 0
        for name, state in states.items():
            self.state[name][layer][where(scored[real])] = state[0].transpose(0, 1)[real]

    # ---- after the forward ------------------------------------------------------------------------------------------

    def after_forward(self) -> None:
        """Write positions and priorities of the new tokens, and record the evicted tokens."""
        singles, self.singles, self.parts = self.singles, None, []
        if singles is None:
            return
        now = singles.seen - 1
        layers = torch.arange(len(self.caches), device=self.device)[:, None, None]
        where = layers, singles.block, self.heads, singles.place
        self.positions[where] = now.int()[:, None]
        if (leaving := singles.leaving) is None:
            self.state[PRIORITY][where] = self._score(singles, now)
        else:
            evicted = leaving.priority <= leaving.candidate
            singles.dropped = torch.where(evicted, leaving.positions[:, None], singles.dropped)
            self._fail(singles.first, leaving.priority.isnan() & leaving.competes[:, None])
            slot, priorities = (layers, leaving.block, self.heads, leaving.place), self.state[PRIORITY]
            left = (leaving.positions >= 0)[:, None]
            priorities[slot] = torch.where(left, leaving.priority, priorities[slot])
            priorities[where] = 0.0
        if self.record is not None:
            self.record.evict(self.number[singles.first], now, singles.dropped.transpose(0, 1))

    def _score(self, singles: Singles, now: Tensor) -> Tensor:
        """Score the new tokens, at the positions `now` [R]. Returns their priorities, float32 [L, R, Hkv]."""
        assert singles.came is not None
        x = singles.came.transpose(0, 1).flatten(1, 2)[:, :, None]  # L x Hkv heads
        rows = self.row[singles.first]
        memory = {name: m[:, rows].transpose(0, 1).flatten(1, 2) for name, m in self.memory.items()}
        scores = self.scorers.all.follow(memory, x, x, now[:, None])
        for name, value in memory.items():
            self.memory[name][:, rows] = value.unflatten(1, (len(self.caches), -1)).transpose(0, 1)
        priority = self.policy.priority(scores, self.scorers.log_decay.flatten(), now[:, None])[:, :, 0]
        return priority.unflatten(1, (len(self.caches), -1)).transpose(0, 1)

    def _fail(self, first: Tensor, is_nan: Tensor) -> None:
        rows = self.row[first]
        self.failed[rows] = self.failed[rows] | is_nan.any((0, -1))
