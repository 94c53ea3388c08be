"""Future attention mass by FlexAttention with queries and keys exchanged ("transposed") equals the loop of future.py,
and the lists of tiles equal torch's. As in test_flex, the plain operator ignores these lists, and the one compiled for
a CPU has no log-sum-exp, so that its test compares attention outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sparse_rl.kernels import flex, future
from sparse_rl.kernels import parity as future_parity
from sparse_rl.kernels.flex import TILE, padded, transposed_options, transposed_tiles
from sparse_rl.kernels.future import LARGEST, attention_lse, future_attention_mass, future_bytes
from sparse_rl.kernels.parity import Parity, check_future, target_kernel
from sparse_rl.methods.kvpop.config import TargetConfig
from sparse_rl.methods.kvpop.target import FutureTarget

B, HQ, HKV, S, D, SCALE = 2, 4, 2, 700, 32, 0.3
WHOLE = [[S] * S, [S] * S]
RIGHT = [[S] * S, [450] * 450 + [0] * 250]
LEFT = [[S] * S, [0] * 200 + [S] * 500]
PACKED = [[130] * 130 + [131] + [S] * (S - 131), [256] * 256 + [640] * 384 + [0] * 60]
LAYOUTS = {"whole": WHOLE, "right": RIGHT, "left": LEFT, "packed": PACKED}
SPANS = [(1, None), (100, None), (256, None), (40, 60), (900, None)]  # window, lookahead


def random_qk(length: int = S, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(B, heads, length, D, generator=generator) for heads in (HQ, HKV))
    return 2 * query, key


def spans(layout: str, window: int, lookahead: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first and last int32 [B, padded]: for each token, the range of the queries that count."""
    first = torch.arange(S) + window
    last = torch.tensor(LAYOUTS[layout])
    if lookahead is not None:
        last = torch.minimum(last, first + lookahead + 1)
    padding = (0, padded(S) - S)
    return tuple(torch.nn.functional.pad(x, padding).int().contiguous() for x in (first.expand(B, -1), last))  # type: ignore[return-value]


def counted(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return bool [B, N, N] for N tokens: entry (token, query) is True if the pair counts."""
    query = torch.arange(first.shape[1])
    return (query >= first[..., None]) & (query < last[..., None])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.few(2)
def test_transposed_flex_equals_the_loop(layout: str) -> None:
    """Over all keys or the visible keys; then some log-mass exceeds 0, as evicted tokens may have large logits."""
    query, key = random_qk()
    ends = torch.tensor(LAYOUTS[layout])
    evict_at = future_parity.random_evictions(B, HKV, S, 90, torch.Generator().manual_seed(1))
    evict_at[1] = evict_at[0]
    for evictions_seen in (None, evict_at):
        common: dict[str, Any] = {"scaling": SCALE, "ends": ends}
        lse, loop = (
            attention_lse(query, key, evict_at=evictions_seen, kernel=kernel, **common) for kernel in ("flex", "torch")
        )
        assert lse.dtype == torch.float32
        assert torch.equal(lse.isinf(), loop.isinf())
        torch.testing.assert_close(lse, loop, rtol=0, atol=1e-5)
        for window, lookahead in ((100, None), (40, 60)):
            options = {**common, "window": window, "lookahead": lookahead, "log_sum_exp": lse}
            computed, expected = (
                future_attention_mass(query, key, kernel=kernel, **options) for kernel in ("flex", "torch")
            )
            exact = future_attention_mass(query.double(), key.double(), **options)
            assert computed.dtype == torch.float32
            assert exact.dtype == torch.float64
            assert torch.equal(computed.isinf(), exact.isinf())
            torch.testing.assert_close(computed, expected, rtol=0, atol=2e-5)
            torch.testing.assert_close(computed.double(), exact, rtol=0, atol=2e-5)
        assert (computed > 0).any() == (evictions_seen is not None)


def test_log_probabilities_are_bounded_as_in_the_loop() -> None:
    """As in the loop, a log-probability above LARGEST = 40 counts as 40, and a query that sees no token adds 0."""
    query, key = random_qk()
    lse = attention_lse(query, key, scaling=SCALE)
    lse[:, :, 300:320] -= 100
    lse[1, :, 600:] = float("-inf")
    ends = torch.tensor([[S] * S, [600] * 600 + [0] * 100])
    options: dict[str, Any] = {"window": 5, "scaling": SCALE, "ends": ends, "log_sum_exp": lse}
    mass, expected = (future_attention_mass(query, key, kernel=kernel, **options) for kernel in ("flex", "torch"))
    assert torch.equal(mass.isinf(), expected.isinf())
    assert not mass.isnan().any()
    torch.testing.assert_close(mass, expected, rtol=0, atol=2e-5)
    assert mass.max() > LARGEST - 7  # a mean over up to 695 queries


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("window", "lookahead"), SPANS)
def test_lists_of_tiles_cover_all_pairs_that_count(layout: str, window: int, lookahead: int | None) -> None:
    """Lists equal torch's; for packed rows, at most 1 + window // TILE other tiles in each row of tiles are visited."""
    first, last = spans(layout, window, lookahead)
    truth, width = counted(first, last), first.shape[1]
    theirs = create_block_mask(lambda b, _, t, d: truth[b, t, d], B, None, width, width, device="cpu", BLOCK_SIZE=TILE)
    ours = transposed_tiles(first, last)
    assert all(result.is_contiguous() for result in ours)  # the kernels do not read the last stride
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    if layout != "packed":
        for name, result in zip(names, ours, strict=True):
            assert torch.equal(result, getattr(theirs, name)), name
        return
    assert torch.equal(ours[2], theirs.full_kv_num_blocks)
    assert torch.equal(ours[3], theirs.full_kv_indices)
    for b in range(B):
        for tile in range(width // TILE):
            needed, visited = (
                set(which[b, 0, tile, : int(count[b, 0, tile])].tolist())
                for count, which in ((theirs.kv_num_blocks, theirs.kv_indices), ours[:2])
            )
            assert needed <= visited
            assert len(visited - needed) <= 1 + window // TILE


def compiled_sum(tiles: tuple[torch.Tensor, ...], first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the output of the compiled operator for random values under these lists, [B, Hq, N, D] for N tokens."""
    query, key = (torch.nn.functional.pad(x, (0, 0, 0, padded(S) - S)) for x in random_qk())
    value, lse = torch.randn(query.shape, generator=torch.Generator().manual_seed(2)), query.sum(-1)

    def attend(keys: torch.Tensor, queries: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
        return flex_attention(keys, queries, value, **transposed_options(*rest, SCALE, LARGEST))

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)
    return compiled(key.repeat_interleave(2, 1), query, value, lse, first, last, *tiles)


@pytest.mark.slow  # runs a C++ compiler
def test_the_compiled_operator_visits_the_listed_tiles() -> None:
    """The operator's output is right with the real lists of tiles. Control: with damaged lists the output is wrong."""
    for layout, window, lookahead in (("right", 100, None), ("packed", 40, 60)):
        first, last = spans(layout, window, lookahead)
        tiles = transposed_tiles(first, last)
        output = compiled_sum(tiles, first, last)
        query, key = (torch.nn.functional.pad(x, (0, 0, 0, padded(S) - S)).double() for x in random_qk())
        value = torch.randn(query.shape, generator=torch.Generator().manual_seed(2)).double()
        logits = key.repeat_interleave(2, 1) @ query.transpose(-1, -2) * SCALE - query.sum(-1)[:, :, None]
        truth = counted(first, last)[:, None]
        any_counts = truth.any(-1, keepdim=True)
        weights = logits.clamp(max=LARGEST).masked_fill(~truth, float("-inf")).softmax(-1)
        expected = (weights.masked_fill(~any_counts, 0) @ value).float()
        torch.testing.assert_close(output * any_counts, expected, rtol=0, atol=1e-5)
    fewer = ((tiles[0] - 1).clamp(min=0), *tiles[1:])
    without_mask = (torch.zeros_like(tiles[0]), tiles[1].clone(), *tiles[:2])
    for damaged in (fewer, without_mask):  # controls
        assert ((compiled_sum(damaged, first, last) - expected) * any_counts).abs().max() > 1e-2


def test_all_steps_share_one_graph_for_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the log-sum-exp and one for the mass serve all lengths, windows and ends."""
    traced = {
        function: torch.compile(function, backend="aot_eager", dynamic=False, fullgraph=True)
        for function in (flex._attend, flex._log_mass)
    }
    monkeypatch.setattr(flex, "_compiled", traced.__getitem__)
    for called in ("flex_attend", "mass_by_flex"):
        call = getattr(flex, called)
        monkeypatch.setattr(
            future, called, lambda *args, call=call, **kwargs: call(*args, **{**kwargs, "compiled": True})
        )
    torch._dynamo.reset()
    counters.clear()
    evictions = torch.Generator().manual_seed(1)
    for step, length in enumerate((384, 300, 257)):
        query, key = random_qk(length, step)
        common: dict[str, Any] = {"scaling": SCALE, "ends": torch.full((B, length), length - 20 * step)}
        evictions_seen = future_parity.random_evictions(1, HKV, length, 90, evictions).expand(B, -1, -1)
        lse, loop = (
            attention_lse(query, key, evict_at=evictions_seen, kernel=kernel, **common) for kernel in ("flex", "torch")
        )
        torch.testing.assert_close(lse, loop, rtol=0, atol=1e-5)
        options = {**common, "window": 5 + 30 * step, "log_sum_exp": lse, "group": "max", "floor": 1e-6}
        mass, expected = (future_attention_mass(query, key, kernel=kernel, **options) for kernel in ("flex", "torch"))
        torch.testing.assert_close(mass, expected, rtol=0, atol=2e-5)
        assert counters["stats"]["unique_graphs"] == 2


def test_held_bytes_equal_the_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes held for one layer, queries and keys repeated for each query head, equal the memory plan's."""
    held = []

    def compiled(keys: torch.Tensor, queries: torch.Tensor, _: torch.Tensor, lse: torch.Tensor, *__: Any) -> Any:
        held.append(keys.nbytes + queries.nbytes)
        return lse

    monkeypatch.setattr(flex, "_compiled", lambda _: compiled)
    query, key = (x.bfloat16() for x in random_qk())
    spans = torch.zeros(2, B, S, dtype=torch.long)
    flex.mass_by_flex(query, key, torch.zeros(B, HQ, S), *spans, SCALE, LARGEST)
    assert held == [future_bytes(B, HQ, D, S, 2, cuda=True)]


def test_the_check_passes_exact_kernels_and_refuses_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log-mass that is wrong by 0.01, a missing query, a NaN, and a kernel that raises."""
    for dtype in (torch.float32, torch.bfloat16):
        at = torch.device("cpu"), dtype, (HQ, HKV, D)
        parity = check_future.__wrapped__(*at, 256)
        assert parity.failure is None
        assert set(parity.errors) == {"sparse", "dense"}
    right = flex.mass_by_flex

    def raises(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("\nno triton\nat all")

    for fault in (
        lambda *args, **kwargs: right(*args, **kwargs) + 0.01,
        lambda q, k, lse, first, last, *rest, **kwargs: right(q, k, lse, first, last - 1, *rest, **kwargs),
        lambda *args, **kwargs: right(*args, **kwargs).index_fill(2, torch.tensor(9), torch.nan),
        raises,
    ):
        monkeypatch.setattr("sparse_rl.kernels.future.mass_by_flex", fault)
        failure = check_future.__wrapped__(*at, 256).failure
        assert failure is not None
        assert failure.startswith("it is not exact on this machine (error / allowed: sparse ") or fault is raises
    assert failure == "RuntimeError: no triton"


def test_flex_is_used_only_on_a_gpu_that_passes_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the loop. Both agree up to 0.2 in bfloat16, and up to 1e-4 from bfloat16 queries and keys."""
    shape, gpu = (HQ, HKV, D), torch.device("cuda", 0)
    for failure, kernel in ((None, "flex"), ("no", "torch")):
        monkeypatch.setattr(future_parity, "check_future", lambda *_, failure=failure: Parity("flex", failure=failure))
        assert target_kernel(gpu, torch.bfloat16, shape) == kernel
        assert target_kernel(torch.device("cpu"), torch.bfloat16, shape) == "torch"

    query, key = random_qk(300)
    ends, evict_at = torch.full((B, 300), 300), torch.full((B, HKV, 300), 1000, dtype=torch.int32)
    evict_at[:, :, 10:50] = 60
    checked_for: list[Any] = []

    def target(kernel: str) -> torch.Tensor:
        monkeypatch.setattr(
            "sparse_rl.methods.kvpop.target.target_kernel", lambda *args: checked_for.append(args) or kernel
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return FutureTarget(TargetConfig())(query, key, SCALE, 5, ends, evict_at)

    by_flex, by_loop = target("flex"), target("torch")
    assert checked_for == [(torch.device("cpu"), torch.bfloat16, shape)] * 2
    assert 0 < (by_flex - by_loop).abs().max() < 0.2  # keys and queries are rounded in one of them
    query, key = query.bfloat16(), key.bfloat16()
    torch.testing.assert_close(by_flex, target("torch"), rtol=0, atol=1e-4)
