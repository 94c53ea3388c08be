"""The costs of FlexAttention, counted without a GPU: tiles, how evenly the programs load a GPU, and eager operators.

The schedule is a model: a GPU with 132 multiprocessors (H100, H200) runs one program on each, and starts the programs
in the order of their numbers. A program's time is its tiles, plus a constant for what it loads and stores.
"""

from __future__ import annotations

import heapq
from typing import Any

import pytest
import torch
from counting import FREE
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from traces import trace_of

from sparse_rl.attention import views
from sparse_rl.attention.views import ReplayView
from sparse_rl.kernels import flex, running_topk
from sparse_rl.kernels.flex import Tiles, flex_attend, make_tiles, segment_of, tiles_bytes
from sparse_rl.trace import batch_traces

UNITS = 132
SHAPES = [(4, 7), (2, 6), (8, 4)]  # kv heads and query heads of each: Qwen 2.5 7B and 1.5B, Llama 3 8B


def makespan(costs: list[float], units: int = UNITS) -> float:
    """Return the time until all programs have run, each on the unit that is free first."""
    free = [0.0] * units
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def balance(costs: list[float]) -> float:
    return sum(costs) / UNITS / makespan(costs)


def programs(query: torch.Tensor, key: torch.Tensor, mask: Any) -> tuple[list[float], list[float]]:
    """Return the costs of the programs of torch's Triton kernels, forward and backward, in the order of their start.

    query, key, mask : as given to flex_attention; the lists of `mask` have one row for each row of the batch

    Forward, a program has a tile of queries of one query head. Backward, it has a tile of keys of one kv head, for
    whose gradients it visits query tiles for each query head of the group (4 products of tiles each), or a tile of
    queries of one query head (3 products). If the keys are expanded, the gradients of a group's heads are summed.
    """
    (rows, heads), kv_heads = query.shape[:2], key.shape[1]
    group, expanded = heads // kv_heads, kv_heads > 1 and key.stride(1) == 0
    by_query = (mask.kv_num_blocks + mask.full_kv_num_blocks)[:, 0].tolist()
    by_key = (mask.q_num_blocks + mask.full_q_num_blocks)[:, 0].tolist()
    forward = [tiles + 1.0 for row in range(rows) for _ in range(heads) for tiles in by_query[row]]
    backward: list[float] = []
    for _ in range(kv_heads):
        for row in range(rows):
            backward += [2.0 * group * tiles + 2 + expanded for tiles in by_key[row]]
            backward += [1.5 * tiles + 1.5 for _ in range(group) for tiles in by_query[row]]
    return forward, backward


class Launched(Exception):
    """Carries what was given to flex_attention."""


def launched(
    evict_at: torch.Tensor, group: int, in_segments: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return the query, the key and the block mask that FlexAttention gets under evict_at [1, Hkv, S]."""

    def launch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: Any, **_: Any) -> Any:
        raise Launched(query, key, block_mask)

    monkeypatch.setattr(flex, "flex_attention", launch)
    query, key = (torch.zeros(1, h * evict_at.shape[1], evict_at.shape[-1], 1) for h in (group, 1))
    with pytest.raises(Launched) as raised:
        flex_attend(evict_at, query, key, key, 1.0, in_segments=in_segments, compiled=False)
    return raised.value.args


def evictions(scores: str, length: int, budget: int, heads: int) -> torch.Tensor:
    """Return evict_at [heads, S] of a running top-k, with or without scores that favour recent tokens."""
    drawn = torch.randn(1, heads, length, generator=torch.Generator().manual_seed(0))
    drawn = drawn + torch.arange(length) / budget * (scores == "recency")
    window = min(256, max(8, budget // 8))
    return running_topk(drawn, 4, window=window, k=budget - 4 - window).evict_at[0]


def test_the_schedule_equals_schedules_made_by_hand() -> None:
    assert makespan([3, 1, 1, 1, 2], units=2) == 5
    assert makespan([1, 1, 1, 2, 3], units=2) == 5
    assert makespan([2, 1, 1], units=1) == 4
    assert balance([1.0] * 3 * UNITS) == 1
    assert balance([2.0] + [1.0] * (UNITS - 1)) == (UNITS + 1) / (2 * UNITS)


@pytest.mark.parametrize(("kv_heads", "group"), SHAPES)
@pytest.mark.parametrize(("length", "most"), [(16384, 2.5), (32768, 4.0)])
def test_sorted_tiles_load_a_gpu_evenly(
    kv_heads: int, group: int, length: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one sequence with a budget of 2,048, forward and backward at least `most` times as fast as natural order.

    Control: with one program for all query heads of a key tile, the backward pass loads a GPU less than 85 %.
    """
    evict_at = evictions("uniform", length, 2048, kv_heads)[None]
    natural, in_order = (launched(evict_at, group, in_segments, monkeypatch) for in_segments in (False, True))
    forward, backward = programs(*in_order)
    assert balance(forward) > 0.94
    assert balance(backward) > 0.85
    slow, fast = (sum(map(makespan, programs(*given))) for given in (natural, in_order))
    assert slow / fast > most
    query, key, mask = in_order
    assert balance(programs(query, key[:, :1], mask)[1]) < 0.85


@pytest.mark.parametrize("width", [512, 768, 1024, 1536, 2048])
def test_keys_are_sorted_where_this_saves_tiles(width: int) -> None:
    """Rows are long enough to be sorted if sorting then divides the number of tiles by more than 1.1 on average."""
    ratios = []
    for scores in ("uniform", "recency"):
        for share in (2, 4, 8, 16):
            evict_at = evictions(scores, width, width // share, 2)
            even = -(-width // 512) * 512  # 768 is not a multiple of the segment
            natural, in_order = (make_tiles(evict_at, even, segment) for segment in (None, 512))
            ratios.append(natural.visited / in_order.visited)
    assert (sum(ratios) / len(ratios) > 1.1) == (segment_of(width) is not None)


class Counting(TorchDispatchMode):
    """Counts the operators that launch work."""

    launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launches += func.__name__.split(".")[0] not in FREE
        return func(*args, **(kwargs or {}))


class Free(torch.autograd.Function):
    """Stands for the compiled graph: nothing is launched, forward or backward."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


@pytest.mark.parametrize(("kernel", "width"), [("flex_sorted", 1500), ("flex_sorted", 700), ("flex", 1500)])
def test_operators_of_a_layer(kernel: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 12 for each of 28 layers outside the compiled graph, with checkpointing: forward twice, and backward.

    Control: if each layer's tiles are made when the layer runs, there are over 50.
    """
    layers, rows, heads = 28, 2, (4, 2, 2)
    monkeypatch.setattr(flex, "_attend", lambda *inputs: (Free.apply(*inputs[:3]), None))
    batch = batch_traces([trace_of(width, layers=layers, seed=i) for i in range(rows)], [0] * rows, width)
    q, k, v = (torch.zeros(rows, width, h, 8).bfloat16().transpose(1, 2).requires_grad_() for h in heads)

    def launches() -> float:
        view, out = ReplayView(batch, "cpu", kernel), q
        with Counting() as counting:
            for layer in range(layers):
                out = checkpoint(view.attend, layer, out, k, v, 1.0, use_reentrant=False, preserve_rng_state=False)
            adding = counting.launches
            torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
        assert adding < counting.launches
        added = 2 * (layers - 1)  # the gradients of k and v are summed over the layers
        return (counting.launches - added) / layers

    assert launches() <= 12
    monkeypatch.setattr(views, "KEPT", 0)
    assert launches() > 50


def run(kernel: str, batch: Any, width: int, layers: int) -> tuple[torch.Tensor, ...]:
    """Return output and gradients of layers of attention in a row, each checkpointed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, width, 8, generator=generator).requires_grad_() for h in (4, 2, 2))
    view, out = ReplayView(batch, "cpu", kernel), q
    for layer in range(layers):
        out = out + checkpoint(view.attend, layer, out, k, v, 0.5, use_reentrant=False)
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v))


@pytest.mark.parametrize(("at_once", "made"), [(3, 1), (2, 3), (1, 5)])
def test_layers_share_their_tiles_in_blocks_that_fit(
    at_once: int, made: int, flex_trains: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients equal sdpa's under checkpointing, however many layers' tiles fit into the memory.

    Blocks are made upwards, and all but the last again downwards. Control: another layer's tiles.
    """
    layers, width = 3, 200
    batch = batch_traces([trace_of(width, layers=layers, seed=i) for i in range(2)], [0, 0], width)
    monkeypatch.setattr(views, "KEPT", at_once * tiles_bytes(4, 256))
    blocks: list[int] = []

    def counted(evict_at: torch.Tensor, in_segments: bool, before: int) -> Tiles:
        blocks.append(len(evict_at))
        return flex.tiles_of(evict_at, in_segments, before)

    monkeypatch.setattr(views, "tiles_of", counted)
    wanted, ours = (run(kernel, batch, width, layers) for kernel in ("sdpa", "flex_sorted"))
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert flex_trains == [True] * 2 * layers
    assert len(blocks) == made
    assert max(blocks) == at_once
    layer = Tiles.layer
    monkeypatch.setattr(Tiles, "layer", lambda tiles, index, rows: layer(tiles, 0, rows))
    if at_once > 1:
        assert (run("flex_sorted", batch, width, layers)[0] - wanted[0]).abs().max() > 1e-2
