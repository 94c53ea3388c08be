"""Gradients of whole models under replay equal the dense reference's, with padding and checkpointing. So do
the log-probs of the public function replay_logprobs, and their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from dense_matched import DenseMatchedView, dense_logprobs
from tiny import new_model
from torch import nn
from traces import starts_of, trace_of

from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import make_view
from sparse_rl.trace import EvictionTrace

LENGTHS = (17, 30, 2, 24)
WIDTH = max(LENGTHS)
LAYERS = 3


@dataclass
class Sampled:
    prompt_ids: list[int]
    completion_ids: list[int]
    trace: EvictionTrace


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in LENGTHS]


def token_loss(logits: torch.Tensor, row: Sequence[int]) -> torch.Tensor:
    """A policy-gradient-like loss of one sequence: its log-probs, each with its own weight."""
    ids = torch.tensor(row)
    logprobs = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return (logprobs * torch.linspace(-1, 2, len(row) - 1)).sum()


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter, by name."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def replayed(
    model: nn.Module, rows: list[list[int]], traces: list[EvictionTrace], starts: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the gradients under replay of all rows in one padded batch; row i begins at column starts[i]."""
    ids = torch.ones(len(rows), WIDTH, dtype=torch.long)
    positions = torch.zeros_like(ids)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[i, start : start + len(row)] = torch.tensor(row)
        positions[i, start : start + len(row)] = torch.arange(len(row))
    view = make_view(traces, starts, WIDTH, "cpu")
    logits = model(input_ids=ids, position_ids=positions, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
    assert logits.isfinite().all()
    losses = [token_loss(x[s : s + len(r)], r) for x, s, r in zip(logits, starts, rows, strict=True)]
    return gradients(model, torch.stack(losses).sum())


def dense(model: nn.Module, rows: list[list[int]], traces: list[EvictionTrace]) -> dict[str, torch.Tensor]:
    """Return the reference's gradients: one sequence at a time, without padding or checkpointing, explicit masks."""
    losses = []
    for row, trace in zip(rows, traces, strict=True):
        ids, view = torch.tensor([row]), DenseMatchedView(trace)
        logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
        losses.append(token_loss(logits[0], row))
    return gradients(model, torch.stack(losses).sum())


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the greatest |a - b| / max |b| over all parameters' gradients a (ours) and b (theirs)."""
    assert all(g.isfinite().all() for g in ours.values())
    return max(float((a - theirs[n]).abs().max() / theirs[n].abs().max()) for n, a in ours.items())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_gradients_equal_the_dense_reference(family: str, side: str, checkpointing: bool) -> None:
    """Within a relative error of 1e-5. Controls: the causal mask, or kv heads swapped."""
    model = adopt(new_model(family, num_hidden_layers=LAYERS)).double().train()
    traces = [trace_of(n, layers=LAYERS, causal=[1]) for n in LENGTHS]
    expected = dense(model, rows(), traces)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    starts = starts_of(side, LENGTHS)
    error = distance(replayed(model, rows(), traces, starts), expected)
    assert error <= 1e-5

    for wrong_traces in (  # controls
        [EvictionTrace.dense(LAYERS, 2, n) for n in LENGTHS],
        [EvictionTrace(t.evict_at.roll(1, dims=1)) for t in traces],
    ):
        assert distance(replayed(model, rows(), wrong_traces, starts), expected) > 1e-2


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_replay_logprobs_and_its_gradients_equal_the_dense_reference(checkpointing: bool) -> None:
    """In batches of 3 rollouts, at two temperatures. Control: another temperature."""
    model = new_model("qwen3", num_hidden_layers=LAYERS).train()
    rollouts = [Sampled(r[:1], r[1:], trace_of(len(r))) for r in rows()]
    for temperature in (1.0, 0.7):
        model.gradient_checkpointing_disable()
        theirs = [dense_logprobs(model, r.prompt_ids, r.completion_ids, r.trace, temperature) for r in rollouts]
        expected = gradients(model, torch.cat(theirs).square().sum())
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ours = replay_logprobs(model, rollouts, temperature, batch_size=3)
        assert [len(x) for x in ours] == [n - 1 for n in LENGTHS]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert distance(gradients(model, torch.cat(ours).square().sum()), expected) <= 1e-5
        at_other_temperature = torch.cat(replay_logprobs(model, rollouts, temperature + 0.1))  # control
        assert distance(gradients(model, at_other_temperature.square().sum()), expected) > 1e-2


@pytest.mark.parametrize("kwargs", [{"use_reentrant": True}, {"preserve_rng_state": False}], ids=["said", "by default"])
def test_reentrant_checkpointing_is_refused(kwargs: dict) -> None:
    """It is torch's default; the error names the mend. Control: non-reentrant checkpointing runs."""
    model = new_model("qwen3", num_hidden_layers=LAYERS).train()
    rollouts = [Sampled(rows()[0][:3], rows()[0][3:], trace_of(LENGTHS[0]))]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={**kwargs, "use_reentrant": False})  # control
    replay_logprobs(model, rollouts)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    mend = r'^reentrant .* use gradient_checkpointing_kwargs=\{"use_reentrant": False\}$'
    with pytest.raises(ValueError, match=mend):
        replay_logprobs(model, rollouts)


@pytest.mark.parametrize(
    "trace",
    [EvictionTrace.dense(2, 2, 17), EvictionTrace.dense(3, 2, 16), EvictionTrace.dense(3, 4, 17)],
    ids=["layers", "length", "kv heads"],
)
@pytest.mark.parametrize("evicting", [False, True])
def test_a_trace_that_does_not_fit_is_refused(trace: EvictionTrace, evicting: bool) -> None:
    """Number of layers, tokens or kv heads, with evictions or without. Control: a trace that fits."""
    model = new_model("qwen3", num_hidden_layers=LAYERS)
    evict_at = trace.evict_at.clone()
    evict_at[:, :, 0] = 5 if evicting else evict_at[:, :, 0]
    rollout = Sampled(rows()[0][:3], rows()[0][3:], EvictionTrace(evict_at))
    with pytest.raises(ValueError, match="does not fit"):
        replay_logprobs(model, [rollout])
    fitting = Sampled(rows()[0][:3], rows()[0][3:], EvictionTrace.dense(3, 2, 17))
    assert len(replay_logprobs(model, [fitting])) == 1  # control
