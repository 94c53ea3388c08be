"""The FlexAttention kernel against the dense reference. Lists say which tiles (128 queries by 128 keys) it visits.

On a CPU torch has two partial versions: the compiled one honours the lists but has no backward pass; the plain operator
has gradients and the log-sum-exp (LSE) but ignores the lists, and the fixture `flex_trains` must permit its backward
pass. Both together run all of our own code; tests/gpu runs the complete kernel. Kernel `flex` keeps keys in natural
order; `flex_sorted` sorts them by evict_at within segments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import new_model
from torch._dynamo.utils import counters
from traces import trace_of

from sparse_rl.attention.interface import NO_MASK, adopt, attention_forward
from sparse_rl.attention.views import ReplayView, make_view
from sparse_rl.kernels import flex
from sparse_rl.kernels.flex import Tiles, flex_attend
from sparse_rl.kernels.masked import dense_attention, visible_mask
from sparse_rl.trace import EvictionTrace, batch_traces, pack_traces

DIM, KV_HEADS, GROUP, SCALE = 16, 2, 3, 0.4  # SCALE differs from torch's default scaling, 0.25
LENGTHS = (300, 1, 197)
DOCUMENTS = ((150, 1, 149), (300,), (30, 197, 60))  # lengths of the documents in each packed row
WIDTH = 300
ORDERS = pytest.mark.parametrize("in_segments", [False, True], ids=["natural", "sorted"])


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten segments, so that a few hundred tokens have several."""
    monkeypatch.setattr(flex, "segment_of", lambda _: 128)


def random_qkv(rows: int, width: int, group: int = GROUP, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, heads, width, DIM) for heads in (group * KV_HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def batched(layout: str) -> torch.Tensor:
    """Return evict_at int32 [B, Hkv, S] of ragged traces, padded or packed."""
    if layout == "packed":
        rows = [pack_traces([trace_of(n, layers=1) for n in row]) for row in DOCUMENTS]
        return batch_traces(rows, [0] * 3, WIDTH)["evict_at"][0]
    traces = [trace_of(n, layers=1) for n in LENGTHS]
    return batch_traces(traces, [WIDTH - n if layout == "left" else 0 for n in LENGTHS], WIDTH)["evict_at"][0]


def log_sum_exp(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return the reference's log-sum-exp of each query's logits over its visible keys, float64 [B, Hq, S]."""
    scores = q.double() @ k.double().repeat_interleave(GROUP, 1).transpose(-1, -2) * SCALE
    return scores.masked_fill(~visible.repeat_interleave(GROUP, 1), float("-inf")).logsumexp(-1)


@ORDERS
@pytest.mark.parametrize("layout", ["right", "left", "packed"])
@pytest.mark.few(2)
def test_flex_output_lse_and_gradients_equal_the_dense_reference(
    layout: str, in_segments: bool, flex_trains: list[bool]
) -> None:
    """Ragged batches with groups of query heads; padding has output 0. Control: no evictions."""
    evict_at = batched(layout)
    q, k, v = random_qkv(3, WIDTH)
    real = (evict_at[:, :1] > 0).float()  # 1 for tokens, 0 for padding
    visible = visible_mask(evict_at)
    expected = dense_attention(q, k, v, visible, SCALE)
    out, lse = flex_attend(evict_at, q, k, v, SCALE, in_segments=in_segments, compiled=False, want_lse=True)
    assert out.dtype == q.dtype
    assert lse is not None
    expected_lse = log_sum_exp(q, k, visible)
    real_lse = lse.where(real > 0, 0.0)
    torch.testing.assert_close(out * real[..., None], expected * real[..., None], rtol=0, atol=1e-5)
    torch.testing.assert_close(real_lse.double(), expected_lse * real, rtol=0, atol=1e-5)
    assert not out.detach()[(real == 0).expand_as(lse)].any()

    # the gradients of a random weighted sum of outputs and log-sum-exps
    weight, lse_weight = torch.randn_like(expected) * real[..., None], torch.randn_like(lse) * real
    ours = torch.autograd.grad((out * weight).sum() + (real_lse * lse_weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum() + (expected_lse * lse_weight).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0, atol=1e-5)

    causal = dense_attention(q, k, v, visible_mask(evict_at.clamp(max=1) * (1 << 20)), SCALE)  # control
    assert ((causal - expected) * real[..., None]).abs().max() > 1e-2


@pytest.mark.slow  # torch's first compilation takes 20 s; fast tests compare the lists of tiles with plain ones
@ORDERS
@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_compiled_forward_pass_equals_the_dense_reference(layout: str, in_segments: bool) -> None:
    evict_at = batched(layout)
    q, k, v = (x.detach() for x in random_qkv(3, WIDTH))
    real = (evict_at[:, :1, :, None] > 0).float()
    expected = dense_attention(q, k, v, visible_mask(evict_at), SCALE)
    out = flex_attend(evict_at, q, k, v, SCALE, in_segments=in_segments)[0]
    torch.testing.assert_close(out * real, expected * real, rtol=0, atol=1e-5)


@ORDERS
def test_traced_training_graph_equals_the_dense_reference(
    in_segments: bool, flex_trains: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph that a GPU trains with, forward and backward, run with torch's own operators."""
    traced = torch.compile(flex._attend, backend="aot_eager", dynamic=False, fullgraph=True)
    monkeypatch.setattr(flex, "_compiled", lambda _: traced)
    evict_at = batched("right")
    q, k, v = random_qkv(3, WIDTH)
    real = (evict_at[:, :1] > 0).float()
    visible = visible_mask(evict_at)
    out, lse = flex_attend(evict_at, q, k, v, SCALE, in_segments=in_segments, want_lse=True)
    assert out.dtype == torch.float32
    assert lse is not None
    expected, expected_lse = dense_attention(q, k, v, visible, SCALE), log_sum_exp(q, k, visible)
    loss = (out * real[..., None]).square().sum() + lse.where(real > 0, 0.0).square().sum()
    reference_loss = (expected * real[..., None]).square().sum() + (expected_lse * real).square().sum()
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v)) for x in (loss, reference_loss)), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=0, atol=1e-5 * float(b.abs().max()))


def a_tile_less(tiles: Tiles) -> None:
    """Leave out one partly visible tile of each row of tiles."""
    tiles.counts[0] = (tiles.counts[0] - 1).clamp(min=0)


def a_full_tile_that_is_not(tiles: Tiles) -> None:
    """List partly visible tiles as fully visible."""
    tiles.counts[1], tiles.indices[1] = tiles.counts[0], tiles.indices[0]
    tiles.counts[0] = 0


def other_tiles(tiles: Tiles) -> None:
    tiles.indices[0] = tiles.indices[0].roll(1, -1)


def another_order(tiles: Tiles) -> None:
    assert tiles.order is not None
    tiles.order[0] = tiles.order[0].roll(1, -1)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [a_tile_less, a_full_tile_that_is_not, other_tiles, another_order])
def test_control_damaged_tiles_change_the_output(damage: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    make = flex.make_tiles

    def damaged(*args: Any) -> Tiles:
        tiles = make(*args)
        damage(tiles)
        return tiles

    evict_at = batched("right")
    q, k, v = (x.detach() for x in random_qkv(3, WIDTH))
    right = flex_attend(evict_at, q, k, v, SCALE, in_segments=True)[0]
    monkeypatch.setattr(flex, "make_tiles", damaged)
    assert (flex_attend(evict_at, q, k, v, SCALE, in_segments=True)[0] - right).abs().max() > 1e-2


class Compiled(ReplayView):
    """Stands in for the compiled operator, which the kernels use only on a GPU."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return flex_attend(self.evict_at[layer], query, key, value, scaling, in_segments=layer % 2 == 0)[0]


@pytest.mark.slow
def test_all_layers_and_steps_share_one_graph() -> None:
    """28 layers and 20 steps of varying lengths; batches of a single row share a second graph. Logits equal sdpa's."""
    layers = 28
    model = adopt(new_model("qwen3", num_hidden_layers=layers, head_dim=DIM))
    torch._dynamo.reset()
    counters.clear()

    @torch.no_grad()
    def step(lengths: tuple[int, ...]) -> None:
        traces = [trace_of(n, layers=layers, seed=lengths[0]) for n in lengths]
        ids = torch.full((len(lengths), max(lengths)), 5)
        batch = batch_traces(traces, [0] * len(lengths), max(lengths))
        inputs = {"input_ids": ids, "attention_mask": NO_MASK, "use_cache": False}
        ours, theirs = (model(kv_view=view(batch, "cpu"), **inputs).logits for view in (Compiled, ReplayView))
        for row, n in enumerate(lengths):
            torch.testing.assert_close(ours[row, :n], theirs[row, :n], rtol=0, atol=1e-4)

    for number in range(20):
        step((257 + 6 * number, 40 + 11 * number))
        assert counters["stats"]["unique_graphs"] == 1, number
    step((384, 30))
    assert counters["stats"]["unique_graphs"] == 1
    for length in (270, 384):  # a single row has the same strides with and without padding
        step((length,))
        assert counters["stats"]["unique_graphs"] == 2, length
    assert not counters["graph_break"]


@pytest.mark.parametrize("kernel", ["gather", "flex", "flex_sorted", "dense"])
def test_a_view_runs_the_named_kernel(kernel: str, flex_trains: list[bool]) -> None:
    """Outputs and gradients equal sdpa's; only flex and flex_sorted run FlexAttention, once for each layer with
    evictions."""
    traces = [trace_of(n, layers=3, causal=[1]) for n in LENGTHS]
    q, k, v = random_qkv(len(LENGTHS), WIDTH)
    real = torch.arange(WIDTH)[:, None] < torch.tensor(LENGTHS)[:, None, None, None]
    ours, theirs = (make_view(traces, [0] * 3, WIDTH, "cpu", name) for name in (kernel, "sdpa"))
    for layer in range(3):
        module = torch.nn.Module()
        module.layer_idx, module.config = layer, SimpleNamespace(model_type="llama", num_hidden_layers=3)  # type: ignore[assignment]
        outs = [attention_forward(module, q, k, v, None, kv_view=view)[0].transpose(1, 2) for view in (ours, theirs)]
        grads = [torch.autograd.grad((out * real).square().sum(), (q, k, v)) for out in outs]
        torch.testing.assert_close(outs[0] * real, outs[1] * real, rtol=0, atol=1e-5)
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    assert flex_trains == {"flex": [False] * 2, "flex_sorted": [True] * 2}.get(kernel, [])


def test_attention_is_computed_in_the_dtype_of_autocast() -> None:
    """As SDPA does, since RoPE leaves queries and keys in float32: the output equals that of bfloat16 inputs."""
    evict_at = batched("right")
    q, k, v = (x.detach() for x in random_qkv(3, WIDTH))
    real = (evict_at[:, :1, :, None] > 0).float()
    expected = dense_attention(q, k, v, visible_mask(evict_at), SCALE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = flex_attend(evict_at, q, k, v.bfloat16(), SCALE, in_segments=True, compiled=False)[0]
    in_bfloat16 = (x.bfloat16() for x in (q, k, v))
    out = flex_attend(evict_at, *in_bfloat16, SCALE, in_segments=True, compiled=False)[0]
    assert mixed.dtype == out.dtype == torch.bfloat16
    assert torch.equal(mixed, out)
    assert 1e-4 < ((out - expected) * real).abs().max() < 0.05


@pytest.mark.parametrize("length", [1, 2, 128, 129])
def test_flex_without_evictions_is_causal_at_lengths_around_a_tile(length: int, flex_trains: list[bool]) -> None:
    evict_at = EvictionTrace.dense(1, KV_HEADS, length).evict_at
    q, k, v = random_qkv(1, length)
    for in_segments in (False, True):
        out = flex_attend(evict_at, q, k, v, SCALE, in_segments=in_segments, compiled=False)[0]
        expected = dense_attention(q, k, v, visible_mask(evict_at), SCALE)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (q, k, v)))
