"""Replay with torch's SDPA equals the dense reference: the masks, outputs and gradients of one attention layer."""

from __future__ import annotations

import pytest
import torch
from traces import starts_of, trace_of

from sparse_rl.attention.views import make_view
from sparse_rl.kernels.masked import dense_attention, visible_mask
from sparse_rl.trace import EvictionTrace, batch_traces, pack_traces

LENGTHS = (13, 29, 1, 21)
WIDTH = max(LENGTHS)
DIM = 8


def brute_force(trace: EvictionTrace, layer: int) -> torch.Tensor:
    """Return the mask bool [Hkv, S, S] of one layer: query q sees token t if t <= q < evict_at of t."""
    evict_at, n = trace.evict_at[layer].tolist(), len(trace)
    return torch.tensor([[[t <= q < head[t] for t in range(n)] for q in range(n)] for head in evict_at])


def random_qkv(group: int, kv_heads: int = 2) -> list[torch.Tensor]:
    """Return random q, k and v of a padded batch, in float64, that require grad."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(LENGTHS), heads, WIDTH, DIM) for heads in (group * kv_heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_mask_equals_the_definition(side: str) -> None:
    """A padding query sees itself alone."""
    traces, starts = [trace_of(n) for n in LENGTHS], starts_of(side, LENGTHS)
    batch = batch_traces(traces, starts, WIDTH)["evict_at"]
    for layer in range(3):
        mask = visible_mask(batch[layer])
        assert mask.dtype == torch.bool
        assert mask.shape == (len(LENGTHS), 2, WIDTH, WIDTH)
        for row, (trace, start) in enumerate(zip(traces, starts, strict=True)):
            real = slice(start, start + len(trace))
            expected = brute_force(trace, layer)
            assert torch.equal(mask[row, :, real, real], expected)
            assert torch.equal(mask[row, :, real, real], trace.visible(layer))
            pads = torch.ones(WIDTH, dtype=torch.bool)
            pads[real] = False
            assert not mask[row, :, real][..., pads].any()
            assert mask[row][:, pads].any(-1).all()  # no softmax over zero keys
    assert not torch.equal(visible_mask(batch[0]), visible_mask(batch[1]))  # control: layers have different masks


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("grad", [True, False])
def test_replayed_attention_and_gradients_equal_the_dense_reference(side: str, group: int, grad: bool) -> None:
    """Row by row; padding has zero gradients. Control: causal attention."""
    traces, starts = [trace_of(n) for n in LENGTHS], starts_of(side, LENGTHS)
    view = make_view(traces, starts, WIDTH, "cpu")
    q, k, v = random_qkv(group)
    weight = torch.randn_like(q.detach())
    real = torch.zeros(len(LENGTHS), 1, WIDTH, 1, dtype=torch.bool)
    for row, (start, n) in enumerate(zip(starts, LENGTHS, strict=True)):
        real[row, :, start : start + n] = True
    with torch.set_grad_enabled(grad):
        out = view.attend(1, q, k, v, DIM**-0.5)
    assert out.isfinite().all()

    reference_rows = []
    for row, (trace, start) in enumerate(zip(traces, starts, strict=True)):
        part = [t[row : row + 1, :, start : start + len(trace)] for t in (q, k, v)]
        reference_rows.append(dense_attention(*part, trace.visible(1)[None], DIM**-0.5))
        torch.testing.assert_close(
            out[row : row + 1, :, start : start + len(trace)], reference_rows[-1], rtol=0, atol=1e-12
        )
        if len(trace) > 1:
            no_evictions = EvictionTrace.dense(1, 2, len(trace))  # control
            causal = dense_attention(*part, no_evictions.visible(0)[None], DIM**-0.5)
            assert (causal - reference_rows[-1]).abs().max() > 1e-2
    if not grad:
        return

    ours = torch.autograd.grad((out * weight * real).sum(), (q, k, v))
    pieces = zip(reference_rows, weight, starts, strict=True)
    loss = sum((o[0] * w[:, s : s + o.shape[2]]).sum() for o, w, s in pieces)
    theirs = torch.autograd.grad(loss, (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        assert a.isfinite().all()
        assert not (a * ~real).any()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_causes_no_nan(side: str) -> None:
    """Outputs and gradients are finite even if a loss wrongly includes the queries of padding."""
    view = make_view([trace_of(n) for n in LENGTHS], starts_of(side, LENGTHS), WIDTH, "cpu")
    q, k, v = random_qkv(2)
    for layer in range(3):
        out = view.attend(layer, q, k, v, DIM**-0.5)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (q, k, v)))


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_layer_without_evictions_is_causal(side: str) -> None:
    """It has no mask; output and gradients are those under the mask. Control: a layer with evictions."""
    traces = [trace_of(n, causal=[1]) for n in LENGTHS]
    starts = [(WIDTH - n) // 2 for n in LENGTHS] if side == "both" else starts_of(side, LENGTHS)
    view, masked = (make_view(traces, starts, WIDTH, "cpu").of_policy for _ in range(2))
    assert view.causal == [False, True, False]
    masked.causal = [False] * 3
    view.layer = None  # type: ignore[method-assign,assignment]  # so fetching evict_at would fail
    q, k, v = random_qkv(2)
    column, first = torch.arange(WIDTH)[:, None], torch.tensor(starts)[:, None, None, None]
    real = (column >= first) & (column < first + torch.tensor(LENGTHS)[:, None, None, None])
    outs = [x.attend(1, q, k, v, DIM**-0.5) * real for x in (view, masked)]
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs]
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-12)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert (masked.attend(0, q, k, v, DIM**-0.5) * real - outs[0]).abs().max() > 1e-2  # control


@pytest.mark.parametrize(
    ("lengths", "starts"), [((9, 4), (0, 0)), ((9, 9), (0, 0)), ((9, 4), (0, 5))], ids=["right", "none", "left"]
)
def test_layers_without_evictions_are_marked_causal(lengths: tuple, starts: tuple) -> None:
    """Also with padding. Packed documents always need a mask."""
    traces = [trace_of(n, causal=[1]) for n in lengths]
    view = make_view(traces, starts, 9, "cpu").of_policy
    assert view.causal == [False, True, False]
    assert view.starts == list(starts)
    assert make_view([pack_traces(traces)], [0], sum(lengths), "cpu").of_policy.causal == [False] * 3
