"""Pictures of the differences between kv heads. Their numbers equal those of a slow loop over plain numbers."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch

from sparse_rl.analysis.heads import draw_evict_ratios, evict_ratios
from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER, EvictionTrace

POLICY = {"policy": json.dumps({"policy": "dms", "window": 3, "sinks": 1})}


def random_trace(length: int, seed: int, layers: int = 3, heads: int = 2) -> EvictionTrace:
    """Return a trace in which tokens are evicted at random times, or never."""
    generator = torch.Generator().manual_seed(seed)
    later = torch.randint(1, length, (layers, heads, length), generator=generator)
    evict_at = torch.arange(length) + later
    never = torch.rand(layers, heads, length, generator=generator) < 0.3
    return EvictionTrace.recorded(evict_at.masked_fill(never, NEVER))


def test_evict_ratios_equal_a_counting_loop() -> None:
    traces = [random_trace(length, seed) for seed, length in enumerate((9, 14, 30, 4))]
    numbers = evict_ratios(traces, POLICY)
    assert numbers["traces"] == 3, "a trace of 4 tokens has none between the sink and the window"
    for layer in range(3):
        for head in range(2):
            shares = []
            for trace in traces[:3]:
                fed = len(trace) - 1
                between = range(1, fed - 3)
                evicted = sum(int(trace.evict_at[layer, head, token]) < fed for token in between)
                shares.append(evicted / len(between))
            assert numbers["ratios"][layer][head] == pytest.approx(median(shares), abs=1e-6)


def test_a_full_cache_evicts_nothing_and_a_window_everything() -> None:
    """The two ends of the scale: a full cache has the ratio 0 in every head, and sinks with a window have 1."""
    length, token = 20, torch.arange(20)
    window = (token + 3).masked_fill(token < 1, NEVER).expand(2, 2, -1)
    for trace, ratio in ((EvictionTrace.dense(2, 2, length), 0.0), (EvictionTrace.recorded(window), 1.0)):
        assert evict_ratios([trace], POLICY)["ratios"] == [[ratio] * 2] * 2


def test_layers_with_a_sliding_window_are_left_out(tmp_path: Path) -> None:
    trace = random_trace(20, 0).beside_windows([0, 5, 0, 5, 0])
    numbers = evict_ratios([trace], POLICY)
    assert numbers["layers"] == [0, 2, 4]
    assert numbers["ratios"] == evict_ratios([random_trace(20, 0)], POLICY)["ratios"]
    draw_evict_ratios(numbers, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_traces_without_evictable_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="no trace has a token between 1 sinks and a window of 3"):
        evict_ratios([random_trace(4, 0)], POLICY)
