"""The running top-k, computed in parallel, equals a heap that takes one token at a time, and KVpop's mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from topk_reference import running_topk_reference

from sparse_rl.kernels import RunningTopK, running_topk
from sparse_rl.trace import NEVER


def same(ours: RunningTopK, theirs: RunningTopK) -> bool:
    """Return True if all fields are equal, bit for bit."""
    names = [field.name for field in dataclasses.fields(RunningTopK)]
    return all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in names)


@st.composite
def cases(draw: Any, longest: int) -> dict[str, Any]:
    """Draw arguments of `running_topk`: random scores, often with many ties, and any sizes."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length = draw(st.one_of(st.integers(1, 40), st.integers(1, longest)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    scores = torch.randn(batch, heads, length, generator=generator)
    levels = draw(st.sampled_from([None, 1, 3, 20]))  # few levels: many ties
    if levels is not None:
        scores = (scores * levels).round() / levels
        scores[scores < -1] = float("-inf")
    results: dict[str, Any] = {
        "scores": scores.to(dtype),
        "window": draw(st.one_of(st.integers(1, 8), st.integers(1, length + 2))),
        "k": draw(st.one_of(st.integers(1, 8), st.integers(1, length + 2))),
    }
    if draw(st.booleans()):
        share = draw(st.sampled_from([1e-3, 0.5]))
        results["log_decay"] = torch.log(1 - torch.rand(heads, generator=generator) * share)
        results["decay_every"] = draw(st.sampled_from([1, 2, 7]))
    if draw(st.booleans()):
        results["lengths"] = torch.randint(length + 1, (batch,), generator=generator)
    most = min(length, 9)
    of_rows = torch.randint(most + 1, (batch,), generator=generator)
    results["sinks"] = of_rows if draw(st.booleans()) else draw(st.integers(0, most))
    return results


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(longest=300))
def test_the_parallel_running_top_k_equals_the_heap(case: dict[str, Any]) -> None:
    assert same(running_topk(**case), running_topk_reference(**case))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(longest=2000))
def test_the_parallel_running_top_k_equals_the_heap_on_long_rows(case: dict[str, Any]) -> None:
    assert same(running_topk(**case), running_topk_reference(**case))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("length", "sinks", "window", "k"),
    [(64, 4, 8, 8), (100, 0, 1, 5), (90, 3, 16, 1), (80, 4, 8, 400), (80, 4, 8, 68), (80, 4, 8, 67), (40, 4, 36, 1)],
)
def test_the_mask_equals_the_papers_mask(length: int, sinks: int, window: int, k: int, ties: bool) -> None:
    """Sinks (t < s), the window (q - t < w), and the k best tokens between these, by the decayed scores at q."""
    scores = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(length + k), dtype=torch.float64)
    if ties:
        scores = (2 * scores).round()
    log_decay = torch.tensor([0.999, 0.9999, 0.99]).log().double()
    topk = running_topk(scores, sinks, window=window, k=k, log_decay=log_decay)
    t = torch.arange(length)
    for q in range(length):
        aged = scores + (q - t) * log_decay[:, None]
        eligible = (t >= sinks) & (t <= q - window)
        order = aged.masked_fill(~eligible, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
        best = torch.zeros_like(aged, dtype=torch.bool).scatter_(-1, order[..., :k], True) & eligible
        visible = (t <= q) & ((t < sinks) | (q - t < window) | best)
        assert torch.equal(visible, (t <= q) & (q < topk.evict_at)), q


def test_equal_scores_keep_the_earlier_token_unless_scores_decay() -> None:
    """A score falls as its token ages, so the oldest is evicted."""
    equal = torch.zeros(1, 1, 12)
    topk = running_topk(equal, 1, window=2, k=3)
    assert topk.evict_at[0, 0].tolist() == [NEVER] * 4 + [6, 7, 8, 9, 10, 11, 12, 13][: 12 - 4 - 2] + [NEVER] * 2
    with_decay = running_topk(equal, 1, window=2, k=3, log_decay=torch.tensor([-0.01]))
    assert with_decay.evict_at[0, 0, 1:7].tolist() == [6, 7, 8, 9, 10, 11]


def test_values_after_the_end_of_a_row_are_ignored() -> None:
    scores = torch.randn(2, 2, 50, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([50, 31])
    padded = scores.clone()
    padded[1, :, 31:] = float("nan")
    together = running_topk(padded, 2, window=4, k=6, lengths=lengths)
    alone = running_topk(scores[1:, :, :31], 2, window=4, k=6)
    for field in dataclasses.fields(RunningTopK):
        whole = getattr(together, field.name)[1, :, :31]
        assert torch.equal(whole, getattr(alone, field.name)[0])


def test_invalid_arguments_are_refused() -> None:
    scores = torch.zeros(1, 1, 9)
    for name in ("window", "k", "decay_every"):
        with pytest.raises(ValueError, match=f"running_topk: {name} must be at least 1, got 0"):
            running_topk(scores, **{"window": 1, "k": 1, name: 0})
    scores[0, 0, 3] = float("nan")
    with pytest.raises(FloatingPointError, match="a score is NaN"):
        running_topk(scores, window=2, k=2)
    assert same(running_topk(scores, 4, window=2, k=2), running_topk(torch.zeros(1, 1, 9), 4, window=2, k=2))


@pytest.mark.parametrize("fault", ["ties", "window", "cutoff"])
def test_control_a_wrong_top_k_differs_from_the_reference(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case: dict[str, Any] = {"scores": torch.zeros(1, 2, 40).index_fill_(-1, torch.arange(0, 40, 3), 1.0), "sinks": 2}
    expected = running_topk_reference(**case, window=3, k=5)
    assert same(running_topk(**case, window=3, k=5), expected)
    module = "sparse_rl.kernels.topk"
    if fault == "ties":
        sort = torch.Tensor.sort
        flipped = lambda x, **keys: sort(x + 1e-6 * torch.arange(x.shape[-1]), **keys)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "sort", flipped)
    elif fault == "cutoff":
        monkeypatch.setattr(f"{module}.kth_smallest_of_prefixes", lambda ranks, k: ranks.new_zeros(len(ranks), 31))
    assert not same(running_topk(**case, window=4 if fault == "window" else 3, k=5), expected)
