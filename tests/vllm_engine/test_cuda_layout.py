"""The cache in the memory layout of FlashAttention and Triton, tested on the CPU without an engine: CacheState is
compared with dictionaries of the expected content of every slot. Random requests begin and end, are prefilled in
chunks, share a pool of blocks and are compacted many times. Slots that belong to no request are NaN, as they may be
after a sleep."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparse_rl.methods.config import EvictingConfig
from sparse_rl.policies import Entries, Policy

LAYERS, HEADS, GROUP, DIM, SIZE, BLOCKS, ROWS = 2, 2, 2, 4, 4, 40, 5
NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]
MEMORY_ORDERS = ("LBNHC", "LBHNC", "BLHNC")  # vLLM's memory orders; the first is its default on GPUs
BITS = {2: torch.int16, 4: torch.int32}


def allocate(order: str, blocks: int = BLOCKS, kernel_block: int = SIZE) -> dict[str, torch.Tensor]:
    """Allocate KV caches as vLLM's model runners do: per layer [blocks, Hkv, block size, 2 D], filled with NaN."""
    from vllm.v1 import kv_cache_interface as vllms
    from vllm.v1.worker.utils import allocate_kv_cache

    spec = vllms.FullAttentionSpec(block_size=SIZE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
    layout = vllms.KVCacheLayout[order]
    layer_stride, block_stride, *_ = vllms.compute_layout_strides(spec, blocks, LAYERS, layout)
    tensor = vllms.KVCacheTensor(LAYERS * blocks * spec.page_size_bytes, NAMES, layer_stride, block_stride)
    config = vllms.KVCacheConfig(blocks, [tensor], [vllms.KVCacheGroupSpec(NAMES, spec)])
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, [kernel_block])
    for cache in caches.values():
        cache.fill_(float("nan"))
    return caches


def stock_views(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return keys and values [blocks, block size, Hkv, D], viewed as in do_kv_cache_update of both backends."""
    return cache.transpose(1, 2).split(DIM, dim=-1)


def test_blocks_that_a_kernel_splits_are_refused() -> None:
    """vLLM gives connectors the kernel's blocks; requests' blocks and slots would then be counted in another unit."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from rollout.vllm.scheduler import ContextSpec, refuse_cache

    vllms = FullAttentionSpec(block_size=SIZE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=ContextSpec.of(vllms))])
    refuse_cache(config, allocate("LBNHC"))
    with pytest.raises(ValueError, match="set block_size to the kernel's 2"):
        refuse_cache(config, allocate("LBNHC", kernel_block=SIZE // 2))


@pytest.mark.parametrize("order", MEMORY_ORDERS)
def test_our_views_read_keys_and_values_where_vllms_kernels_write_them(order: str) -> None:
    from rollout.vllm.compat import paged

    for cache in allocate(order).values():
        vllm_views = stock_views(cache)
        our_views = paged.key_value_views(cache, transposed=False)
        for written, read in zip(vllm_views, our_views, strict=True):
            written.copy_(torch.arange(written.numel()).view(written.shape))
            assert read.shape == (BLOCKS, HEADS, SIZE, DIM)
            assert torch.equal(read.transpose(1, 2), written)
            assert (read.data_ptr(), read.transpose(1, 2).stride()) == (written.data_ptr(), written.stride())
        assert not bool(cache.isnan().any())


def test_keys_on_the_cpu_are_read_transposed() -> None:
    from rollout.vllm.compat import paged

    cache = torch.arange(3 * HEADS * SIZE * 2 * DIM).view(3, HEADS, SIZE, 2 * DIM)
    keys, values = paged.key_value_views(cache, transposed=True)
    flat = cache.flatten(2)
    for slot in range(SIZE):
        for dim in range(DIM):
            assert torch.equal(keys[:, :, slot, dim], flat[:, :, dim * SIZE + slot])
            assert torch.equal(values[:, :, slot, dim], flat[:, :, SIZE * DIM + slot * DIM + dim])


@pytest.mark.parametrize("transposed", [False, True])
def test_read_blocks_copies_whole_blocks(transposed: bool) -> None:
    """Also if a block is requested twice, for the views of key_value_views and the buffers beside them."""
    from rollout.vllm.compat import paged

    two_layers = torch.arange(9 * 2 * HEADS * SIZE * 2 * DIM).view(9, 2, HEADS, SIZE, 2 * DIM)
    cache = two_layers[1:, 1]  # a view whose storage begins earlier, and in which blocks are not contiguous
    beside = torch.arange(8 * HEADS * SIZE, dtype=torch.int32).view(8, HEADS, SIZE)
    blocks = torch.tensor([[5, 0, 7], [2, 2, 6]])
    for buffer in (*paged.key_value_views(cache, transposed), beside):
        read = paged.read_blocks(buffer, blocks)
        assert read.shape == (2, HEADS, 3 * SIZE, *buffer.shape[3:])
        for row in range(2):
            for n, block in enumerate(blocks[row].tolist()):
                assert torch.equal(read[row, :, n * SIZE : (n + 1) * SIZE], buffer[block])
        before = buffer.clone()
        read.zero_()
        assert torch.equal(buffer, before), "read_blocks returned a view, not a copy"


# ---- the policy and the reference -----------------------------------------------------------------------------------


class ArithmeticConfig(EvictingConfig):
    name = "arithmetic"


class Arithmetic(Policy):
    """Computes every input of a policy in whole numbers, so that ties are common and nothing is ever rounded."""

    entry_memory = {"history": -1.0, "mass": 0.0}
    every_query = True
    score_reads = ("keys", "values")

    @property
    def last_queries(self) -> int:
        return self.config.window

    def observe(self, layer: int, entries: Entries, queries: torch.Tensor, query_positions: torch.Tensor) -> None:
        assert entries.keys is not None
        content = queries.float().unflatten(1, (HEADS, GROUP)).sum((2, 4))
        real = (query_positions < entries.seen[:, None])[:, None, :, None]
        sees = real & (query_positions[:, None, :, None] >= entries.positions[:, :, None])
        entries.state["mass"] += (content[..., None] * sees).sum(2) * entries.keys[..., 0].float()

    def score(self, layer: int, entries: Entries) -> torch.Tensor:
        assert entries.keys is not None
        assert entries.values is not None
        assert entries.queries is not None
        total = entries.queries.float().unflatten(1, (HEADS, GROUP)).sum((2, 3))
        score = (entries.keys.float() * total[:, :, None]).sum(-1) + entries.values.float().sum(-1)
        score = score + entries.state["mass"] + 3 * entries.state["history"].clamp(min=0)
        older = entries.valid() & (entries.positions < (entries.seen - self.config.window)[:, None, None])
        assert bool(older[..., : entries.older].all())
        competing = entries.competing(self.config.sinks, self.config.window)
        entries.state["history"] = torch.where(competing, score.remainder(7), -1.0)
        return score.remainder(5)


@dataclass
class Entry:
    """Expected content of a slot."""

    key: list[int]
    value: list[int]
    history: int = -1
    mass: int = 0


@dataclass(eq=False)
class Request:
    """One sequence: its keys, values and queries [L, tokens, heads, D], and the expected content of its cache."""

    prompt: int
    total: int
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    seen: int = 0
    blocks: list[int] = field(default_factory=list)
    held: list[list[dict[int, Entry]]] = field(default_factory=lambda: [[{} for _ in range(HEADS)] for _ in NAMES])
    dropped: list[list[list[int]]] = field(default_factory=list)

    @classmethod
    def random(cls, rng: random.Random, peak: int) -> Request:
        prompt = rng.choice([1, 3, peak - 1, peak, peak + 1, rng.randint(1, 3 * peak)])
        total = prompt + rng.randint(1, 3 * peak)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        kv = [torch.randint(-2, 3, (LAYERS, total, HEADS, DIM), generator=generator) for _ in range(2)]
        return cls(prompt, total, *kv, torch.randint(-2, 3, (LAYERS, total, HEADS * GROUP, DIM), generator=generator))

    def feed(self, tokens: int) -> None:
        """Write the next tokens into the cache, and observe their queries."""
        for layer, heads in enumerate(self.held):
            for head, entries in enumerate(heads):
                for t in range(self.seen, self.seen + tokens):
                    entries[t] = Entry(self.keys[layer, t, head].tolist(), self.values[layer, t, head].tolist())
                    content = int(self.queries[layer, t, head * GROUP : (head + 1) * GROUP].sum())
                    for entry in entries.values():
                        entry.mass += content * entry.key[0]
        self.seen += tokens

    def compact(self, policy: Policy) -> None:
        self.dropped = []
        for layer, heads in enumerate(self.held):
            self.dropped.append([])
            for head, entries in enumerate(heads):
                group = slice(head * GROUP, (head + 1) * GROUP)
                query = self.queries[layer, self.seen - policy.config.window : self.seen, group].sum((0, 1)).tolist()
                competing = [t for t in sorted(entries) if policy.config.sinks <= t < self.seen - policy.config.window]
                worth = {}
                for t in competing:
                    entry = entries[t]
                    score = sum(k * q for k, q in zip(entry.key, query, strict=True)) + sum(entry.value)
                    score += entry.mass + 3 * max(entry.history, 0)
                    worth[t], entry.history = score % 5, score % 7
                for t in set(entries) - set(competing):
                    entries[t].history = -1
                best = sorted(competing, key=lambda t: (-worth[t], t))
                room = policy.config.budget - (len(entries) - len(competing))
                self.dropped[-1].append(sorted(best[room:]))
                for t in best[room:]:
                    del entries[t]


class Pool:
    """Requests that share one cache. Blocks are assigned as in spec.py, and CacheState does the work of each step."""

    def __init__(self, order: str, v2_runner: bool, seed: int) -> None:
        from rollout.vllm.compat.arguments import CacheConfig
        from rollout.vllm.sampling import RunRecord
        from rollout.vllm.state import CacheState

        rng = self.rng = random.Random(seed)
        self.v2_runner = v2_runner
        window = rng.choice([1, 2, 3])
        budget, sinks, period = rng.randint(window + 2, 14), rng.choice([0, 1]), rng.choice([1, 3, 6])
        self.policy = Arithmetic(ArithmeticConfig(budget=budget, sinks=sinks, window=window, period=period))
        self.peak: int = self.policy.schedule.peak  # type: ignore[assignment]
        self.caches = allocate(order)
        config = CacheConfig(self.policy, max_prompt=None, exact=False)
        vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=ROWS), model_config=SimpleNamespace(dtype=torch.bfloat16)
        )
        self.state = CacheState(vllm_config, config, self.caches)
        self.state.record = RunRecord()
        for beside in (self.state.positions, self.state.state["history"], self.state.state["mass"]):
            beside.fill_(-77)
        self.free = list(range(1, BLOCKS))
        rng.shuffle(self.free)
        self.waiting = [Request.random(rng, self.peak) for _ in range(9)]
        self.running: list[Request] = []
        self.ended: list[int] = []
        self.compactions = 0

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        rng, state = self.rng, self.state
        begun = []
        while self.waiting and len(self.running) < ROWS and rng.random() < 0.6 and self.fits(self.waiting[0]):
            begun.append(self.waiting.pop(0))
            self.running.append(begun[-1])
        batch = [r for r in self.running if r in begun or rng.random() < 0.8]
        rng.shuffle(batch)
        if not batch:
            return
        counts = [1 if r.seen >= r.prompt else rng.randint(1, r.prompt - r.seen) for r in batch]
        for r, count in zip(batch, counts, strict=True):
            r.blocks += [self.free.pop() for _ in range(self.blocks(r, r.seen + count) - len(r.blocks))]
        used_blocks = sorted({b for r in batch for b in r.blocks})
        others = [b for b in range(1, BLOCKS) if b not in used_blocks]  # block 0 takes the writes of padding
        before = self.bits(others)

        from rollout.vllm.state import Begun

        requests = [Begun(f"begins {id(r)}", r.blocks[0], r.prompt) for r in begun]
        if not self.v2_runner:
            state.begin(self.ended, requests)
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seen = torch.tensor([r.seen + c for r, c in zip(batch, counts, strict=True)], dtype=torch.int32)
        plan = state.make_plan(self.table(batch), seen, starts, starts)
        if self.v2_runner:
            state.begin(self.ended, requests)
        self.ended = []
        tokens = [(r, t) for r, c in zip(batch, counts, strict=True) for t in range(r.seen, r.seen + c)]
        for layer, name in enumerate(NAMES):
            for view, rows in zip(stock_views(self.caches[name]), ("keys", "values"), strict=True):
                new = torch.stack([getattr(r, rows)[layer, t] for r, t in tokens])
                view[plan.slots // SIZE, plan.slots % SIZE] = new.bfloat16()
            query = torch.stack([r.queries[layer, t] for r, t in tokens]).bfloat16()
            state.after_layer(name, torch.cat([query, query.new_full((3, *query.shape[1:]), torch.nan)]))  # padded
        state.after_forward()
        assert max(plan.lengths.tolist()) <= state.longest(int(seen.max()), max(counts))
        for r, count, length in zip(batch, counts, plan.lengths.tolist(), strict=True):
            r.feed(count)
            self.check(r, length)

        self.compact([r for r in batch if self.policy.schedule.due(r.prompt, r.seen)])
        for r in batch:
            self.check(r, self.policy.schedule.held(r.prompt, r.seen))
        for old, new_bits in zip(before, self.bits(others), strict=True):
            assert torch.equal(old, new_bits), "a block of another request, or a free block, was written"
        self.release(batch)

    def compact(self, due: list[Request]) -> None:
        from rollout.vllm.state import Due

        by_id = {f"begins {id(r)}": r for r in due}
        peak, left = self.peak, self.policy.config.budget
        held = {i: r.seen if r.seen <= max(r.prompt, peak) else peak for i, r in by_id.items()}
        self.state.compact([Due(r.blocks[0], r.seen, held[i], left) for i, r in by_id.items()])
        for r in due:
            r.compact(self.policy)
        record = self.state.record
        assert record is not None
        record._settle()
        assert record.dropped.keys() == by_id.keys()
        for i, (dropped,) in record.dropped.items():
            assert (dropped.at == by_id[i].seen).all()
            positions = dropped.positions.transpose(1, 2, 0).tolist()
            assert [[sorted(head) for head in layer] for layer in positions] == by_id[i].dropped
        record.dropped.clear()
        self.compactions += len(due)

    def check(self, r: Request, length: int) -> None:
        """Check that the first `length` slots hold the expected entries: key, value, position, memory of one token."""
        slots = torch.tensor(r.blocks).repeat_interleave(SIZE)[:length], torch.arange(length) % SIZE
        for layer, name in enumerate(NAMES):
            keys, values = (view[slots].tolist() for view in stock_views(self.caches[name]))
            for head in range(HEADS):
                head_slots = (slots[0], head, slots[1])
                positions = self.state.positions[layer][head_slots].tolist()
                history, mass = (self.state.state[n][layer][head_slots].tolist() for n in ("history", "mass"))
                rows = zip(positions, keys, values, history, mass, strict=True)
                entries = {p: Entry(k[head], v[head], h, m) for p, k, v, h, m in rows}
                assert len(entries) == length
                assert entries == r.held[layer][head]

    def bits(self, blocks: list[int]) -> list[torch.Tensor]:
        """Return the exact bits of these blocks of the cache and of the buffers stored beside it."""
        beside = [self.state.positions, *self.state.state.values()]
        tensors = [*self.caches.values(), *(layer for tensor in beside for layer in tensor)]
        return [t[blocks].view(BITS[t.element_size()]) for t in tensors]

    def table(self, batch: list[Request]) -> torch.Tensor:
        """Return the block table. After its own blocks, a request's row names random other blocks, as in vLLM."""
        table = torch.tensor([[self.rng.randrange(BLOCKS) for _ in range(30)] for _ in batch], dtype=torch.int32)
        for row, r in zip(table, batch, strict=True):
            row[: len(r.blocks)] = torch.tensor(r.blocks)
        return table

    def blocks(self, r: Request, tokens: int) -> int:
        compacted = r.seen >= max(r.prompt, self.peak)
        return max(len(r.blocks), -(-min(tokens, self.peak if compacted else max(r.prompt, self.peak)) // SIZE))

    def fits(self, new: Request) -> bool:
        claims = [-(-max(r.prompt, self.peak) // SIZE) - len(r.blocks) for r in [*self.running, new]]
        return sum(max(0, c) for c in claims) <= len(self.free)

    def release(self, batch: list[Request]) -> None:
        for r in batch:
            if r.seen == r.total:
                self.ended.append(r.blocks[0])
                self.running.remove(r)
            keep = 0 if r.seen == r.total else -(-self.peak // SIZE)
            if r.seen >= max(r.prompt, self.peak) or not keep:
                self.free += r.blocks[keep:]
                del r.blocks[keep:]
        self.rng.shuffle(self.free)


@pytest.fixture(autouse=True)
def cuda_layout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from rollout.vllm.compat import paged

    layer = SimpleNamespace(impl=SimpleNamespace(scale=1.0), num_heads=HEADS * GROUP)
    monkeypatch.setattr(paged, "keys_are_transposed", lambda: False)
    monkeypatch.setattr(paged, "attention_layers", lambda config, names: {name: layer for name in names})
    yield


@pytest.mark.parametrize("v2_runner", [False, True])
@pytest.mark.parametrize("order", MEMORY_ORDERS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.few(2)
def test_every_slot_holds_the_expected_entry(seed: int, order: str, v2_runner: bool) -> None:
    """Nine random requests are fed and compacted until they end; no other block is written, and all end up free."""
    pool = Pool(order, v2_runner, seed)
    pool.run()
    assert pool.compactions > 9
    assert sorted(pool.free) == list(range(1, BLOCKS))


def another_head(state: Any) -> None:
    compact, heads = state._compact_group, state.heads

    def next_head(*args: Any) -> torch.Tensor:
        state.heads = heads.roll(1)
        dropped = compact(*args)
        state.heads = heads
        return dropped

    state._compact_group = next_head


def keys_of_the_next_slot(state: Any) -> None:
    entries = state._entries

    def with_shifted_keys(*args: Any, **kwargs: Any) -> Entries:
        result = entries(*args, **kwargs)
        return replace(result, keys=result.keys.roll(1, dims=2))

    state._entries = with_shifted_keys


def one_row_of_queries(state: Any) -> None:
    begin = state.begin

    def begin_in_row_0(*args: Any) -> None:
        begin(*args)
        state.row.zero_()

    state.begin = begin_in_row_0


def rows_of_the_plan(state: Any) -> None:
    """Use the rows that were valid when the plan was made. Only vLLM's V1 runner would tolerate this fault."""
    make_plan, after_layer = state.make_plan, state.after_layer

    def early(*args: Any) -> Any:
        state.known = state.row.clone()
        return make_plan(*args)

    def stale(*args: Any) -> None:
        state.row, current = state.known, state.row
        after_layer(*args)
        state.row = current

    state.make_plan, state.after_layer = early, stale


def padding_written(state: Any) -> None:
    from rollout.vllm.state import Group

    state._group = lambda blocks, lengths, seen, most, left=0: Group(blocks[:, : -(-most // SIZE)], lengths, seen, left)


def always_older(state: Any) -> None:
    """Ignore that a window may be longer than the period: then some of its entries are in the first `left` slots."""
    entries = state._entries
    state._entries = lambda group, *args, **kwargs: replace(entries(group, *args, **kwargs), older=group.left)


@pytest.mark.parametrize(
    "sabotage",
    [another_head, keys_of_the_next_slot, one_row_of_queries, rows_of_the_plan, padding_written, always_older],
)
def test_control_faults_are_detected(sabotage: Callable[[Any], None]) -> None:
    """Each fault makes CacheState use a wrong head, key, row, block or bound; eight seeds show it."""
    with pytest.raises(AssertionError):
        for seed in range(8):
            pool = Pool(MEMORY_ORDERS[0], True, seed)
            sabotage(pool.state)
            pool.run()
