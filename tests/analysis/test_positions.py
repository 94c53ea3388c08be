"""The density of held positions equals a count with exact fractions, and is 1 everywhere under a full cache."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from test_heads import random_trace

from sparse_rl.analysis import positions as module
from sparse_rl.analysis.drawing import COLOURS
from sparse_rl.analysis.positions import compared_positions, draw_positions, positions, source_labels
from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER, EvictionTrace


def fingerprint(model: str = "a-model", **policy: Any) -> dict[str, str]:
    return {"model": model, "policy": json.dumps(policy)}


def counted(traces: list[EvictionTrace], bins: int) -> tuple[list[float], float]:
    """Return density and mean by a loop over the bins, sequences, layers, kv heads and tokens."""
    mass, places = [Fraction(0)] * bins, []
    for trace in traces:
        fed = len(trace) - 1
        for layer in trace.global_layers:
            for head in range(trace.kv_heads):
                for token in range(fed):
                    if int(trace.evict_at[layer, head, token]) < fed:
                        continue
                    places.append(Fraction(token, max(fed - 1, 1)))
                    for b in range(bins):
                        left = max(Fraction(b, bins), Fraction(token, fed))
                        right = min(Fraction(b + 1, bins), Fraction(token + 1, fed))
                        mass[b] += max(right - left, Fraction(0)) * fed
    return [float(share * bins / len(places)) for share in mass], float(sum(places) / len(places))


@pytest.mark.parametrize("bins", [1, 7, 20])
def test_density_and_mean_equal_a_loop_with_fractions(bins: int) -> None:
    """Sequences have fewer tokens than there are bins, or more, and one layer has a sliding window."""
    traces = [random_trace(length, length).beside_windows([0, 4, 0, 0]) for length in (2, 5, 12, 33)]
    numbers = positions(traces, bins)
    density, mean = counted(traces, bins)
    assert numbers["density"] == pytest.approx(density, abs=2e-6)
    assert numbers["mean"] == pytest.approx(mean, abs=2e-6)
    assert numbers["sequences"] == 4
    assert sum(numbers["density"]) / bins == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("length", [2, 3, 40, 1001])
def test_a_full_cache_has_density_1_and_mean_one_half(length: int) -> None:
    numbers = positions([EvictionTrace.dense(2, 3, length)], 10)
    assert numbers["density"] == pytest.approx([1.0] * 10)
    assert numbers["mean"] == (0.0 if length == 2 else 0.5), "a single token is the first"
    assert numbers["held"] == 6 * (length - 1)


def test_only_the_last_tokens_of_a_window_count() -> None:
    """Known by hand: of 10 fed tokens the last two are held, at positions 8/9 and 9/9."""
    token = torch.arange(11)
    trace = EvictionTrace.recorded((token + 2).expand(1, 1, -1))
    assert positions([trace], 5) == {
        "sequences": 1, "held": 2, "mean": pytest.approx(17 / 18, abs=1e-6), "density": [0, 0, 0, 0, 5.0]
    }  # fmt: skip


def test_sequences_without_a_fed_token_are_refused() -> None:
    """The last query always sees itself, so any other sequence has a held token."""
    with pytest.raises(UserError, match="no token is held"):
        positions([EvictionTrace.dense(1, 1, 1)])


def test_labels_tell_sources_apart() -> None:
    """A label has settings in which sources of its policy differ, the model if there are several, else the folder."""
    gkv, rkv = fingerprint(policy="gkv", budget=8, alpha=0.8), fingerprint(policy="rkv", budget=8, lam=0.1)
    local = fingerprint(policy="gkv", budget=8, alpha=0)
    assert source_labels([("a", gkv), ("b", rkv)]) == ["gkv, budget 8", "rkv, budget 8"]
    assert source_labels([("a", gkv), ("b", local)]) == ["gkv, budget 8, alpha 0.8", "gkv, budget 8, alpha 0"]
    assert source_labels([("a", gkv), ("b", gkv)]) == ["gkv, budget 8 (a)", "gkv, budget 8 (b)"]
    other = fingerprint("b-model", policy="rkv", budget=8)
    assert source_labels([("a", gkv), ("b", other)]) == ["a-model, gkv, budget 8", "b-model, rkv, budget 8"]
    assert source_labels([("a", {})]) == ["unnamed policy"]


def test_each_source_has_a_curve_and_a_bar_in_its_methods_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(module, "save_figure", lambda figure, out: figures.append(figure))
    sources = [
        (name, fingerprint(policy=name, budget=8), iter([random_trace(40, seed)]))
        for seed, name in enumerate(("gkv", "rkv"))
    ]
    numbers = json.loads(json.dumps(compared_positions(sources)))
    draw_positions(numbers, Path("unused"))
    (axes,) = figures[0].axes
    curve, bar, other_curve, other_bar = axes.lines
    assert [line.get_color() for line in axes.lines] == [COLOURS[name] for name in ("gkv", "gkv", "rkv", "rkv")]
    assert list(curve.get_ydata()) == numbers["sources"][0]["density"]
    assert list(other_curve.get_ydata()) == numbers["sources"][1]["density"]
    assert [bar.get_xdata()[0], other_bar.get_xdata()[0]] == [source["mean"] for source in numbers["sources"]]
    assert axes.get_title(loc="left").startswith("a-model: positions of the tokens held at the end")


def test_an_evicted_token_does_not_count() -> None:
    """Control: without evictions, the same sequence has another density and mean."""
    evict_at = torch.full((1, 1, 21), NEVER)
    evict_at[..., :10] = 15
    numbers, whole = positions([EvictionTrace.recorded(evict_at)], 2), positions([EvictionTrace.dense(1, 1, 21)], 2)
    assert numbers["density"] == [0.0, 2.0]
    assert whole["density"] == [1.0, 1.0]
    assert numbers["mean"] > whole["mean"]
