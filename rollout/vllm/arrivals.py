"""A learned policy that decides before a layer attends, on the paged cache: one token comes, and one goes, per kv head.

What can be known before the forward is found there, for all layers at once (L is folded into the rows): the worst of
the entries that compete, and the slot of the token that leaves the window. Where a token is scored as it comes, that is
the whole decision. A delayed score needs the layer's own new key: in the layer remain the scorer's step, one comparison
and the write of K and V to a slot of each head, before attention is computed. Scores of tokens that have come are
computed after the forward, of all layers at once (L is folded into the heads).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout.vllm.compat import paged
from rollout.vllm.compat.arguments import CacheConfig
from rollout.vllm.messages import Begun
from rollout.vllm.plan import Fixed, Group, Plan
from rollout.vllm.state import CacheState
from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.policy import PRIORITY, KVpop
from sparse_rl.methods.kvpop.scorers.base import Scorer
from sparse_rl.methods.kvpop.scorers.registry import sketch_scorer
from sparse_rl.policies.entries import Chunk


@dataclass
class Singles:
    """R requests that bring one token each.

    tokens : of the batch, a slice or int64 [R]; first, seen int64 [R]
    block, place : int64 [L, R, Hkv], where it goes; dropped : int64 [L, R, Hkv], the position that goes, -1: none
    came : the new keys and values [L, R, Hkv, 2 D], where they are scored as they come
    leaving : where scores are delayed, of what leaves the window
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
    """The token that leaves the window of each of R requests, which is scored as the new one meets the memory.

    positions int64 [R], < 0: none; block, place : int64 [L, R, Hkv], where it is
    competes : bool [R], it may go; candidate : float32 [L, R, Hkv], the priority of what goes unless it does, NaN where
        it may not; aged : float32 [L, R, Hkv], what its score is less than that of a token 0
    priority : float32 [L, R, Hkv], its own, layer by layer; rows : int64 [R], of the memory, known in the forward
    """

    positions: Tensor
    block: Tensor
    place: Tensor
    competes: Tensor
    candidate: Tensor
    aged: Tensor
    priority: Tensor
    rows: Tensor | None = None


class Scorers:
    """Those of all layers and of this rank's kv heads: by layer, and as one of L x Hkv heads, in the same memory."""

    def __init__(self, policy: KVpop, layers: int, heads: int, dim: int, device: torch.device) -> None:
        config = policy.config.scorer
        self.heads, self.device = heads, device
        self.log_decay: Tensor
        self.all: Scorer = sketch_scorer(config, heads=layers * heads, dim=dim).to_empty(device=device)
        self.all.requires_grad_(False)
        self.of_layer = [sketch_scorer(config, heads=heads, dim=dim) for _ in range(layers)]
        for layer, scorer in enumerate(self.of_layer):
            for name, weight in self.all.named_parameters():
                mine = weight[layer * heads : (layer + 1) * heads]
                setattr(scorer, name, nn.Parameter(mine, requires_grad=False))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """By the names of cache_scorer.safetensors: a layer's number, and the parameter's name. Heads come first.

        log_decay : [L, Hkv], from here on
        """
        own = self.by_name()
        if own.keys() != weights.keys():
            raise UserError(f"the engine has other scorers: {', '.join(sorted(own.keys() ^ weights.keys())[:3])}")
        for name, weight in own.items():
            weight.copy_(weights[name][paged.own_heads(self.heads)])
        self.log_decay = torch.stack([scorer.log_decay() for scorer in self.of_layer]).to(self.device)

    def by_name(self) -> dict[str, Tensor]:
        """This rank's, by the names of cache_scorer.safetensors."""
        return {f"{i}.{name}": w for i, scorer in enumerate(self.of_layer) for name, w in scorer.named_parameters()}


class ArrivalState(CacheState):
    """All layers of one worker, under a policy that decides before a query attends."""

    def __init__(self, vllm_config: Any, config: CacheConfig, kv_caches: dict[str, Tensor]) -> None:
        super().__init__(vllm_config, config, kv_caches)
        policy = config.policy
        assert isinstance(policy, KVpop)
        layers, heads, dim = len(self.caches), len(self.heads), self.slab.keys.shape[-1]
        self.scorers = Scorers(policy, layers, heads, dim, self.device)
        self.scorers.load(paged.stored_scorers(vllm_config))
        self.policy: KVpop = policy.with_scorers(self.scorers.of_layer)
        self.empty = {name: value.to(self.device) for name, value in policy.sequence_memory(heads, dim).items()}
        self.memory = {  # name -> [L, rows, Hkv, ...]
            name: value.repeat(layers, len(self.failed), *[1] * value.ndim) for name, value in self.empty.items()
        }
        self.singles: Singles | None = None
        self.parts: list[
            tuple[int, slice, int]
        ] = []  # of prompts: request, its tokens in the batch, so many are cached

    def begin(self, ended: Sequence[int], begun: Sequence[Begun]) -> None:
        super().begin(ended, begun)
        rows = self._sent([self.row_of[each.block] for each in begun])
        for name, value in self.memory.items():
            value[:, rows] = self.empty[name]

    # ---- before the forward -----------------------------------------------------------------------------------------

    def enter(self, block: Tensor, place: Tensor, logical: Tensor) -> None:
        """Nothing yet: slots differ between layers and heads, and `arrive` writes what enters them."""

    def make_plan(self, block_table: Tensor, seq_lens: Tensor, starts: Tensor, starts_cpu: Tensor) -> Plan:
        plan = super().make_plan(block_table, seq_lens, starts, starts_cpu)
        counts = starts_cpu.diff()
        many = (counts > 1).nonzero()[:, 0].tolist()
        lengths = plan.lengths.tolist() if many else []  # a prompt is held whole while it is read
        self.parts = [(r, slice(int(starts_cpu[r]), int(starts_cpu[r + 1])), lengths[r] - int(counts[r])) for r in many]
        alone = (counts == 1).nonzero()[:, 0]
        self.singles = self._singles(plan, alone, starts) if len(alone) else None
        return plan

    def _singles(self, plan: Plan, alone: Tensor, starts: Tensor) -> Singles:
        every = len(alone) == len(plan.seen)
        rows: Any = slice(None) if every else alone.to(self.device)
        tokens: Any = slice(0, len(alone)) if every else starts[rows].long()
        first, seen = plan.first[rows], plan.seen[rows]
        prompt, schedule = self.prompt_length[first], self.policy.schedule
        held = schedule.held(prompt, seen - 1)
        full = (seen > prompt) & (held >= schedule.budget)
        blocks = plan.blocks[rows][:, : -(-(self._most_held(held) + 1) // self.block_size)]
        layers, heads, count = len(self.caches), len(self.heads), len(alone)
        entries = self._entries(self._in(range(layers), Group(blocks, held, seen)), reads=())
        slot, candidate, is_nan = self.policy.worst(entries, but=1 if self.policy.delay else 0)
        goes = full.repeat(layers)[:, None]
        self._fail(first, (is_nan & goes).view(layers, count, heads))
        dropped = entries.positions.gather(-1, slot[..., None])[..., 0]
        block, place = self._at(blocks, torch.where(goes, slot, entries.lengths[:, None]))
        dropped = torch.where(goes, dropped, -1).view(layers, count, heads)
        singles = Singles(tokens, first, seen, block, place, dropped)
        if not self.policy.delay:
            keys = self.slab.keys
            singles.came = keys.new_empty(layers, count, heads, 2 * keys.shape[-1])
            return singles
        positions = seen - 1 - self.policy.delay
        competes = (positions >= self.policy.config.sinks) & full
        candidate = candidate.view(layers, count, heads).masked_fill(~competes[:, None], torch.nan)
        aged = self.policy.aged(self.scorers.log_decay[:, None], positions.clamp(min=0)[:, None])
        left = self._at(blocks, entries.at(positions.repeat(layers)))
        singles.leaving = Leaving(positions, *left, competes, candidate, aged, torch.empty_like(candidate))
        return singles

    def stay(self, plan: Plan, fixed: Fixed) -> None:
        super().stay(plan, fixed)
        if self.singles is not None and not self.parts:
            fixed.copy_fields(self.singles, len(self.singles.first))

    def _at(self, blocks: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """(block, place in it) of slots [L x R, Hkv] of requests whose blocks are [R, n]: [L, R, Hkv] each."""
        slot = slot.view(len(self.caches), len(blocks), -1)
        block = blocks.expand(len(slot), -1, -1).gather(2, slot // self.block_size)
        return block, slot % self.block_size

    # ---- in the forward, before a layer attends ---------------------------------------------------------------------

    def arrive(self, name: str, key: Tensor, value: Tensor) -> bool:
        """A layer's new keys and values [T, Hkv, D]: all of it that is written to the cache is written here."""
        layer, singles = self.index[name], self.singles
        if singles is not None:
            new = key[singles.tokens], value[singles.tokens]
            if singles.came is None:
                self._decide(layer, singles, *new)
            else:
                torch.cat(new, dim=-1, out=singles.came[layer])
            where = singles.block[layer], self.heads, singles.place[layer]
            for cache, one in zip(self.caches[layer], new, strict=True):
                cache[where] = one
        for request, tokens, before in self.parts:
            self._take_in(layer, request, before, key[tokens], value[tokens])
        return True

    def _decide(self, layer: int, singles: Singles, key: Tensor, value: Tensor) -> None:
        """Score the token that leaves the window, now that the memory meets the layer's new one: who goes?"""
        leaving = singles.leaving
        assert leaving is not None
        if leaving.rows is None:
            leaving.rows = self.row[singles.first]
        block, place = leaving.block[layer], leaving.place[layer]
        asked = torch.cat([cache[block, self.heads, place] for cache in self.caches[layer]], dim=-1)[:, :, None]
        memory = {name: value[layer, leaving.rows] for name, value in self.memory.items()}
        x, positions = torch.cat([key, value], dim=-1)[:, :, None], leaving.positions[:, None]
        scores = self.scorers.of_layer[layer].follow(memory, x, asked, positions)[:, :, 0]
        for name, after in memory.items():
            self.memory[name][layer, leaving.rows] = after
        priority = torch.sub(scores, leaving.aged[layer], out=leaving.priority[layer])
        goes = priority <= leaving.candidate[layer]  # of equal ones the latest goes, and this is the latest
        for at, left in ((singles.block[layer], block), (singles.place[layer], place)):
            torch.where(goes, left, at, out=at)

    def _take_in(self, layer: int, request: int, before: int, key: Tensor, value: Tensor) -> None:
        """A chunk of a prompt [T, Hkv, D], which is held whole, in order of position, until its end."""
        plan, delay = self.plan, self.policy.delay
        assert plan is not None
        blocks, row = plan.blocks[request], self.row[plan.first[request]]
        memory = {name: m[layer, row][None] for name, m in self.memory.items()}

        def where(positions: Tensor) -> tuple[Tensor, ...]:
            return blocks[positions // self.block_size][:, None], self.heads, (positions % self.block_size)[:, None]

        back = where(torch.arange(before - delay, before, device=self.device).clamp(min=0))
        earlier = (cache[back] for cache in self.caches[layer])
        k, v, earlier_k, earlier_v = (one.transpose(0, 1)[None] for one in (key, value, *earlier))
        start = torch.tensor([before], device=self.device)
        found = self.policy.take_in(layer, Chunk(k, v, earlier_k, earlier_v, start, None, memory))
        for name, after in memory.items():
            self.memory[name][layer, row] = after[0]
        positions = torch.arange(before, before + len(key), device=self.device)
        now = where(positions)
        for cache, one in zip(self.caches[layer], (key, value), strict=True):
            cache[now] = one
        self.positions[layer][now] = positions.int()[:, None]
        scored = positions - delay
        real = scored >= 0
        for name, state in found.items():
            self.state[name][layer][where(scored[real])] = state[0].transpose(0, 1)[real]

    # ---- after the forward ------------------------------------------------------------------------------------------

    def after_forward(self) -> None:
        """Positions, and the scores of tokens that are scored as they come; and write down what was dropped."""
        singles, self.singles, self.parts = self.singles, None, []
        if singles is None:
            return
        now = singles.seen - 1
        layers = torch.arange(len(self.caches), device=self.device)[:, None, None]
        where = layers, singles.block, self.heads, singles.place
        self.positions[where] = now.int()[:, None]
        if singles.leaving is not None:
            self._settle(singles, singles.leaving, layers)
            self.state[PRIORITY][where] = 0.0
        else:
            self.state[PRIORITY][where] = self._score(singles, now)
        if self.record is not None:
            self.record.arrive(self.number[singles.first], now, singles.dropped)

    def _settle(self, singles: Singles, leaving: Leaving, layers: Tensor) -> None:
        """Write down the priorities of what has left the window, and where it was this that went."""
        goes = leaving.priority <= leaving.candidate
        singles.dropped = torch.where(goes, leaving.positions[:, None], singles.dropped)
        self._fail(singles.first, leaving.priority.isnan() & leaving.competes[:, None])
        left, priorities = (layers, leaving.block, self.heads, leaving.place), self.state[PRIORITY]
        priorities[left] = torch.where((leaving.positions >= 0)[:, None], leaving.priority, priorities[left])

    def _score(self, singles: Singles, now: Tensor) -> Tensor:
        """The priorities float32 [L, R, Hkv] of the tokens that have come."""
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
        """Requests, by first block, int64 [R], of which a priority is NaN, bool [L, R, Hkv]."""
        rows = self.row[first]
        self.failed[rows] = self.failed[rows] | is_nan.any((0, -1))
