"""Checks of rollouts: the gap to a replay, wrong traces that must be detected, and equality of rollouts."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from rollout import Rollout
from sparse_rl.attention.interface import NO_MASK
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import make_view
from sparse_rl.errors import LONGEST, UserError
from sparse_rl.trace import NEVER, EvictionTrace, Supports
from sparse_rl.trace.support import SupportRecord, packed

T = TypeVar("T")


def in_one_line(work: Callable[[], T]) -> T | str:
    """Return the result of `work`, or its one-line error of bounded length, within 10 seconds of processor time."""
    start = time.process_time()
    try:
        return work()
    except UserError as error:
        line = str(error)
        assert line.isprintable(), line
        assert 0 < len(line) <= LONGEST, line
        return line
    finally:
        assert time.process_time() - start < 10


def gap(logprobs: Sequence[torch.Tensor], rollouts: Sequence[Rollout]) -> float:
    """Return max |log-prob - sampler's log-prob| over all tokens of all rollouts."""
    return max(
        float((ours.detach() - torch.tensor(r.model_logprobs)).abs().max())
        for ours, r in zip(logprobs, rollouts, strict=True)
    )


@torch.no_grad()
def trainer_gap(model: Any, rollouts: Sequence[Rollout], *how: Any, **options: Any) -> float:
    """Return the gap of `replay_logprobs` with these arguments."""
    return gap(replay_logprobs(model, rollouts, *how, **options), rollouts)


@torch.no_grad()
def padded_gap(model: Any, rollouts: Sequence[Rollout], side: str) -> float:
    """Return the gap of one forward pass with padding on the left, on the right or on both sides of each row."""
    width = max(len(r.trace) for r in rollouts) + 3
    starts = [{"left": width - len(r.trace), "right": 0, "both": (width - len(r.trace)) // 2}[side] for r in rollouts]
    texts = [torch.tensor([*r.prompt_ids, *r.completion_ids]) for r in rollouts]
    ids, positions = torch.ones(len(rollouts), width).long(), torch.zeros(len(rollouts), width).long()
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        ids[row, start : start + len(text)], positions[row, start : start + len(text)] = text, torch.arange(len(text))
    view = make_view([r.trace for r in rollouts], starts, width, "cpu")
    logits = model(input_ids=ids, position_ids=positions, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
    assert logits.isfinite().all()
    logprobs = []
    for row, (r, text, start) in enumerate(zip(rollouts, texts, starts, strict=True)):
        of_text = logits[row, start : start + len(text) - 1].log_softmax(-1).gather(-1, text[1:, None])[:, 0]
        logprobs.append(of_text[len(r.prompt_ids) - 1 :])
    return gap(logprobs, rollouts)


def check_slope(
    model: torch.nn.Module, loss: Callable[[bool], torch.Tensor], seed: int, step: float, control: float = 1e-2
) -> None:
    """Check the slope of a loss along a random direction of all float64 weights by finite differences.

    loss : with True, gradients flow through the fits; without these the slope must differ by the share `control`
    """
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) * p.std() for p in model.parameters()]

    def slope(through: bool) -> float:
        model.zero_grad()
        loss(through).backward()
        return sum(float((p.grad * d).detach().sum()) for p, d in zip(model.parameters(), directions, strict=True))

    @torch.no_grad()
    def loss_at(by: float) -> float:
        originals = copy.deepcopy(list(model.parameters()))
        for p, d in zip(model.parameters(), directions, strict=True):
            p.add_(by * d)
        value = float(loss(True))
        for p, original in zip(model.parameters(), originals, strict=True):
            p.copy_(original)
        return value

    near, far = ((loss_at(by) - loss_at(-by)) / (2 * by) for by in (step, 2 * step))
    finite_difference = (4 * near - far) / 3  # Richardson extrapolation
    assert abs(slope(True) - finite_difference) <= 1e-3 * abs(finite_difference)
    assert abs(slope(False) - finite_difference) > control * abs(finite_difference)


def shifted(evict_at: torch.Tensor, by: int) -> torch.Tensor:
    """Return a copy of evict_at in which every eviction is `by` positions later."""
    return torch.where(evict_at < NEVER, evict_at + by, NEVER).to(torch.int32)


def wrong_traces(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Return name -> copies of the rollouts with wrong traces. The name says what is wrong with them."""
    right = [r.trace.evict_at for r in rollouts]
    wrong = {
        "evict_at + 1": [shifted(e, 1) for e in right],
        "evict_at - 1": [shifted(e, -1) for e in right],
        "causal": [torch.full_like(e, NEVER) for e in right],
    }
    if any(not torch.equal(e, e.roll(1, dims=1)) for e in right):
        wrong["heads swapped"] = [e.roll(1, dims=1) for e in right]
    return {
        name: [replace(r, trace=EvictionTrace(e, _beside(r), False)) for r, e in zip(rollouts, traces, strict=True)]
        for name, traces in wrong.items()
    }


def _beside(rollout: Rollout) -> dict[str, torch.Tensor]:
    """Return the sections `routed` and `windowed` of a rollout's trace, if there are any."""
    return {name: values for name, values in rollout.trace.further.items() if name in ("routed", "windowed")}


def wrong_windows(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Return name -> copies of the rollouts with wrong sliding windows. The name says what is wrong with them."""

    def changed(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[Rollout]:
        """`change` takes evict_at int32 [L, Hkv, S] and bool [L, 1, 1], True for a layer with a window."""
        traces = []
        for r in rollouts:
            has_window = torch.tensor(r.trace.windows)[:, None, None] > 0
            traces.append(EvictionTrace(change(r.trace.evict_at, has_window), r.trace.further, False))
        return [replace(r, trace=trace) for r, trace in zip(rollouts, traces, strict=True)]

    return {
        "window + 1": changed(lambda evict_at, has_window: shifted(evict_at, 1).where(has_window, evict_at)),
        "window - 1": changed(lambda evict_at, has_window: shifted(evict_at, -1).where(has_window, evict_at)),
        "windows as global layers": changed(lambda evict_at, has_window: evict_at.masked_fill(has_window, NEVER)),
        "global layers as windows": changed(
            lambda evict_at, has_window: evict_at.where(has_window, evict_at[has_window[:, 0, 0]][:1])
        ),
        "evictions of another layer": changed(lambda evict_at, _: evict_at.roll(1, dims=0)),
    }


def wrong_routes(rollouts: Sequence[Rollout], experts: int) -> dict[str, list[Rollout]]:
    """Return name -> copies of the rollouts with wrong experts. The name says what is wrong with them.

    experts : number of experts in a layer
    """

    def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> list[Rollout]:
        sections = [{**r.trace.further, "routed": change(r.trace.further["routed"])} for r in rollouts]
        traces = [EvictionTrace(r.trace.evict_at, s, validate=False) for r, s in zip(rollouts, sections, strict=True)]
        return [replace(r, trace=trace) for r, trace in zip(rollouts, traces, strict=True)]

    def rolled_layers(routed: torch.Tensor) -> torch.Tensor:
        with_experts = (routed >= 0).any(-1).any(-1)
        routed = routed.clone()
        routed[with_experts] = routed[with_experts].roll(1, dims=0)
        return routed

    return {
        "next expert": changed(lambda routed: ((routed + 1) % experts).where(routed >= 0, -1).to(routed.dtype)),
        "experts of the token before": changed(lambda routed: routed.roll(1, dims=1)),
        "experts of another layer": changed(rolled_layers),
    }


def without_routes(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return copies of the rollouts whose traces record no experts, so that a replay's routers choose themselves."""
    kept = [{n: v for n, v in r.trace.further.items() if n != "routed"} for r in rollouts]
    return [
        replace(r, trace=EvictionTrace(r.trace.evict_at, further)) for r, further in zip(rollouts, kept, strict=True)
    ]


def same(ours: list[Rollout], theirs: list[Rollout]) -> bool:
    """Return True if tokens, traces and finish reasons are equal, and log-probs are equal up to rounding."""
    return len(ours) == len(theirs) and all(
        (a.prompt_ids, a.completion_ids, a.finish_reason) == (b.prompt_ids, b.completion_ids, b.finish_reason)
        and torch.equal(a.trace.evict_at, b.trace.evict_at)
        and torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-5)
        for a, b in zip(ours, theirs, strict=True)
    )


def outcome(rollouts: Sequence[Rollout]) -> list[tuple]:
    """Return tokens, log-probs and traces, to be compared bit for bit."""
    return [
        (r.completion_ids, r.logprobs, r.model_logprobs, {name: x.tolist() for name, x in r.trace.sections.items()})
        for r in rollouts
    ]


def shortened(r: Rollout, stop: set[int]) -> Rollout:
    """Return the rollout cut after the first of the stop tokens, as if it had been sampled with these stop tokens."""
    results = [i for i, token in enumerate(r.completion_ids) if token in stop]
    n = results[0] + 1 if results else len(r.completion_ids)
    return Rollout(
        r.prompt_ids,
        r.completion_ids[:n],
        r.logprobs[:n],
        r.model_logprobs[:n],
        EvictionTrace.recorded(r.trace.evict_at[..., : len(r.prompt_ids) + n]),
        "stop" if results else "length",
    )


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a loss to all weights of a model that it reaches, float64 [number of these weights]."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def weighted_sum(logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a loss in which each log-prob has another weight, as advantages would give."""
    return sum((row * torch.linspace(-1, 2, len(row))).sum() for row in logprobs)  # type: ignore[return-value]


# ---- supports of truncated draws -------------------------------------------------------------------------------------


def supports_of(rollout: Rollout, vocabulary: int) -> list[list[int]]:
    """Return the token ids of each draw's support."""
    supports = Supports.of([rollout.trace], vocabulary)
    assert supports is not None
    return [ids.tolist() for ids in supports.ids.split(supports.sizes.tolist())]


def with_supports(trace: EvictionTrace, supports: Sequence[Sequence[int]], vocabulary: int) -> EvictionTrace:
    """Return the trace with other supports, one for each completion token."""
    record, kept = SupportRecord(), torch.zeros(len(supports), vocabulary, dtype=torch.bool)
    for step, ids in enumerate(supports):
        kept[step, list(ids)] = True
        record.draw([("", step)], packed(kept[step : step + 1]))
    return trace.beside(record.take("", len(trace)))


def wrong_supports(rollouts: Sequence[Rollout], vocabulary: int) -> dict[str, list[Rollout]]:
    """Return rollouts with supports that a sampler could have recorded, but did not: each draw has the next draw's, to
    which its own token is added; all tokens; or one token less, if it has several."""
    wrong: dict[str, list[Rollout]] = {"another step's": [], "all tokens": [], "one token less": []}
    for rollout in rollouts:
        supports, drawn = supports_of(rollout, vocabulary), rollout.completion_ids
        others = [{*ids, token} for ids, token in zip([*supports[1:], supports[0]], drawn, strict=True)]
        fewer = [
            [i for i in ids if i != max((i for i in ids if i != token), default=None)]
            for ids, token in zip(supports, drawn, strict=True)
        ]
        every = [range(vocabulary)] * len(drawn)
        for name, changed in zip(wrong, (others, every, fewer), strict=True):
            wrong[name].append(replace(rollout, trace=with_supports(rollout.trace, changed, vocabulary)))
    return wrong


@torch.no_grad()
def support_gaps(model: Any, rollouts: Sequence[Rollout], temperature: float) -> tuple[float, float]:
    """Return the gap of the log-probs over the whole vocabulary, and of those among the supports."""
    replayed = torch.cat(replay_logprobs(model, rollouts, temperature, truncated=True))
    sampled = torch.cat([torch.tensor([r.model_logprobs, r.logprobs]).T for r in rollouts])
    whole, kept = (replayed - sampled).abs().amax(0).tolist()
    return whole, kept


def check_support_law(model: Any, rollouts: Sequence[Rollout], temperature: float, trained: bool) -> float:
    """Check that each drawn token's log-prob among the recorded support is the sampler's, and that the gap of each
    wrong record is as large as the proof of concept measured; return the true gap. Logits of untrained models are flat.
    """
    whole, kept = support_gaps(model, rollouts, temperature)
    assert whole <= 1e-5
    assert kept <= 2e-6
    least = {"another step's": 2.0, "all tokens": 0.043, "one token less": 0.25}
    for name, wrong in wrong_supports(rollouts, model.config.vocab_size).items():
        same, wrong_gap = support_gaps(model, wrong, temperature)
        assert same == whole
        assert wrong_gap >= (least[name] if trained else 5e-3), (name, wrong_gap)
    return kept
