"""Attention over gathered keys equals the dense reference, and its chunks compute few unneeded pairs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peaks import Largest
from test_flex import DIM, GROUP, KV_HEADS, SCALE, WIDTH, batched, random_qkv

from sparse_rl.kernels import masked as gather
from sparse_rl.kernels import running_topk
from sparse_rl.kernels.flex import visible_share
from sparse_rl.kernels.masked import (
    QueryChunk,
    dense_attention,
    gathered_attention,
    held_bytes,
    make_chunks,
    visible_mask,
    visited_share,
)
from sparse_rl.trace import EvictionTrace


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks so short that a few tokens have several, the last one shorter."""
    monkeypatch.setattr(gather, "SMALLEST", 32)
    monkeypatch.setattr(gather, "LARGEST", 32)


def evictions_of_top_k(length: int, budget: int) -> torch.Tensor:
    """Return evict_at [1, 1, S] of 4 sinks, a window of 8 and the best random scores so far, `budget` tokens in all."""
    scores = torch.randn(1, 1, length, generator=torch.Generator().manual_seed(0))
    return running_topk(scores, 4, window=8, k=budget - 12).evict_at


def random_inputs(rows: int, width: int) -> list[torch.Tensor]:
    return random_qkv(rows, width, dtype=torch.float64)


@pytest.mark.parametrize("held", [True, False], ids=["held", "gathered again"])
@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_gathered_output_and_gradients_equal_the_dense_reference(
    layout: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered keys are held for the backward pass or gathered again. Control: no evictions."""
    monkeypatch.setattr(gather, "HELD", 2**30 if held else 0)
    evict_at = batched(layout)
    q, k, v = random_inputs(3, WIDTH)
    real = (evict_at[:, :1, :, None] > 0).double()
    expected = dense_attention(q, k, v, visible_mask(evict_at), SCALE)
    out = gathered_attention(evict_at, q, k, v, SCALE)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    weight = torch.randn_like(expected) * real
    ours, theirs = (torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (out, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    causal = dense_attention(q, k, v, visible_mask(evict_at.clamp(max=1) * (1 << 20)), SCALE)  # control
    assert ((causal - expected) * real).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_have_the_inputs_dtype(dtype: torch.dtype) -> None:
    """Up to 1e-6 for float32 inputs, which a CPU computes in float64, and 0.05 for bfloat16."""
    evict_at = batched("right")
    exact = random_inputs(3, WIDTH)
    given = [x.detach().to(dtype).requires_grad_() for x in exact]
    out = gathered_attention(evict_at, *given, SCALE)
    expected = dense_attention(*(x.double() for x in given), visible_mask(evict_at), SCALE)
    grads = torch.autograd.grad(out.float().square().sum(), given)
    assert out.dtype == dtype
    assert all(grad.dtype == dtype for grad in grads)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.05)


def a_key_less(chunk: QueryChunk) -> None:
    """Hide the first key from all queries of the chunk."""
    chunk.until[:, 0] = 0


def a_step_later(chunk: QueryChunk) -> None:
    """Evict every key one query too late."""
    chunk.until += 1


def other_keys(chunk: QueryChunk) -> None:
    """Gather the chunk's keys in an order that does not fit their evictions."""
    chunk.columns = chunk.columns.roll(1, -1)


@pytest.mark.parametrize("damage", [a_key_less, a_step_later, other_keys])
def test_control_damaged_chunks_change_the_output(damage: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    evict_at = evictions_of_top_k(WIDTH, 20).expand(1, KV_HEADS, -1)
    q, k, v = (x.detach() for x in random_inputs(1, WIDTH))
    right = gathered_attention(evict_at, q, k, v, SCALE)
    chunks = make_chunks(evict_at.flatten(0, 1))
    damage(chunks[2])
    monkeypatch.setattr(gather, "make_chunks", lambda *_: chunks)
    assert (gathered_attention(evict_at, q, k, v, SCALE) - right).abs().max() > 1e-2


@pytest.mark.parametrize("layout", ["right", "left", "packed"])
def test_every_visible_pair_is_computed_once(layout: str) -> None:
    """And no other. Each row gathers the same number of earlier keys, the largest that is visible in any row."""
    evict_at = batched(layout).flatten(0, 1)
    expected = visible_mask(evict_at[:, None])[:, 0]
    computed = torch.zeros_like(expected, dtype=torch.int32)
    for chunk in make_chunks(evict_at):
        queries = slice(chunk.first, chunk.last)
        at = chunk.columns[:, None].expand(-1, chunk.last - chunk.first, -1)
        computed[:, queries].scatter_add_(2, at, chunk.visible()[:, 0].int())
        before = expected[:, queries, : chunk.first].any(1).sum(-1).max()
        assert chunk.columns.shape[1] == before + chunk.last - chunk.first
    assert torch.equal(computed, expected.int())


@pytest.mark.parametrize(("length", "budget", "most"), [(16384, 2048, 0.14), (4096, 256, 0.08), (1056, 256, 0.27)])
def test_computed_pairs_are_close_to_the_visible_pairs(
    length: int, budget: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks of the real size, about a quarter of the budget."""
    monkeypatch.undo()  # the real sizes of chunks
    evict_at = evictions_of_top_k(length, budget)[0]
    share = visited_share(make_chunks(evict_at))
    assert visible_share(evict_at) < share <= most


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64])
def test_gathered_attention_without_evictions_is_causal_at_lengths_around_a_chunk(length: int) -> None:
    evict_at = EvictionTrace.dense(1, KV_HEADS, length).evict_at
    q, k, v = random_inputs(1, length)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    torch.testing.assert_close(gathered_attention(evict_at, q, k, v, SCALE), expected, rtol=0, atol=1e-13)


def test_no_tensor_of_forward_or_backward_is_as_large_as_a_mask() -> None:
    length, evict_at = 1024, evictions_of_top_k(1024, 64).expand(1, KV_HEADS, -1)
    q, k, v = random_inputs(1, length)
    with Largest() as largest:
        torch.autograd.grad(gathered_attention(evict_at, q, k, v, SCALE).sum(), (q, k, v))
    # the right-hand side is the size of the queries; one mask would have 1,048,576 elements
    assert largest.elements <= GROUP * KV_HEADS * length * DIM


@pytest.mark.parametrize("most", [2**30, 0], ids=["held", "gathered again"])
def test_held_bytes_equal_the_counted_bytes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves this besides inputs, output and LSE. With HELD = 0 keys are gathered again."""
    monkeypatch.setattr(gather, "HELD", most)
    evict_at = evictions_of_top_k(WIDTH, 20).expand(1, KV_HEADS, -1)
    q, k, v = random_inputs(1, WIDTH)
    held: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() if x.dtype == torch.float64 else 0
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = gathered_attention(evict_at, q, k, v, SCALE)
    own = {x.untyped_storage().data_ptr(): x for x in (q, k, v, out)}
    outputs_and_lse = GROUP * KV_HEADS * WIDTH * (DIM + 1) * 8
    counted = held_bytes(make_chunks(evict_at.flatten(0, 1)), DIM, 8) + outputs_and_lse
    assert sum(size for address, size in held.items() if address not in own) == (counted if most else 0)
