"""A compaction of all layers allocates memory besides the cache. The bytes that `doctor` counts for it cover the bytes
that are allocated.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from counting import GROUP, HEADS, state_of
from peaks import Peak
from policy_cases import ON_VLLM

from sparse_rl.commands.memory import transient_bytes
from sparse_rl.methods.config import EvictingConfig
from sparse_rl.policies import Entries, Policy

LAYERS, DIM, REQUESTS = 4, 64, 3
SIZES = {"budget": 96, "period": 64, "window": 16}
# Upper bounds of counted bytes / allocated bytes. With R-KV's redundancy, the bound is that of the redundancy alone.
SLACK = {
    **dict.fromkeys(("cake", "morphkv", "snapkv"), 1.02),
    **dict.fromkeys(("h2o", "tova"), 1.05),
    **{"streaming": 1.1, "am": 1.3, "rkv": 2, "gkv": 2},
}
MOST_SLACK = 3
CELLS = [({"policy": name}, SLACK.get(name, MOST_SLACK)) for name in ON_VLLM if name != "full"]
CELLS.append(({"policy": "gkv", "redundancy": False}, 1.02))


class SpreadConfig(EvictingConfig):
    name = "spread"


class Spread(Policy):
    """A policy that scores entries by their keys alone, in a given dtype, without queries or memory."""

    def __init__(self, computed: torch.dtype, **settings: int) -> None:
        super().__init__(SpreadConfig(**settings))
        self.computed = computed

    def score(self, layer: int, entries: Entries) -> torch.Tensor:
        assert entries.keys is not None
        keys = entries.keys.to(self.computed).masked_fill(~entries.valid()[..., None], 0.0)
        mean = keys.sum(2, keepdim=True) / entries.lengths[:, None, None, None]
        return (keys - mean).square().sum(-1).float()


def check_counted(policy: Policy, slack: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the counted bytes, for a compaction of all layers together and of two layers at a time."""
    from rollout.vllm import compacting
    from rollout.vllm.messages import Due

    peak, left = policy.schedule.peak, policy.schedule.left(0, 0)
    assert peak is not None
    starts, lengths = torch.arange(REQUESTS + 1, dtype=torch.int32), torch.full((REQUESTS,), peak, dtype=torch.int32)
    for layers_together in (LAYERS, 2):
        monkeypatch.setitem(compacting.AT_ONCE, "cpu", layers_together * REQUESTS * HEADS * peak * DIM)
        state, table = state_of(
            policy, REQUESTS, True, monkeypatch, shape=(LAYERS, DIM), dtype=dtype, device=torch.device("cpu")
        )
        state.make_plan(table, lengths, starts, starts)
        for name in state.index:
            state.after_layer(name, torch.randn(REQUESTS, HEADS * GROUP, DIM, dtype=dtype))
        with Peak() as memory:
            state.after_forward()
            state.compact([Due(str(i), int(row[0]), peak, peak, left) for i, row in enumerate(table)])
        shape = (LAYERS, HEADS, DIM)
        bytes_of_parts = transient_bytes(
            policy, REQUESTS, peak, shape, GROUP, str(dtype).removeprefix("torch."), "cpu", vllm=True
        )
        counted = sum(size for size, _ in bytes_of_parts.values())
        assert 0.98 * memory.bytes <= counted <= slack * memory.bytes, (memory.bytes, counted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("policy", "slack"), CELLS, ids=str)
@pytest.mark.few(5)
def test_measured_bytes_of_a_compaction_equal_the_counted_bytes(
    policy: dict, slack: float, dtype: torch.dtype, policy_of: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counted bytes are at least 0.98 times, and at most `slack` times, the bytes that a compaction allocates at
    its peak (`check_counted`).
    """
    settings = {**SIZES, **policy}
    check_counted(policy_of(settings.pop("policy"), **settings), slack, dtype, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("computed", [torch.float32, torch.float64], ids=str)
def test_bytes_of_a_score_of_only_keys_are_counted(
    computed: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy Spread scores entries by their keys alone, in float32 or float64. `check_counted` checks the counted
    bytes for it.
    """
    check_counted(Spread(computed, **SIZES), MOST_SLACK, dtype, monkeypatch)


def test_requests_are_compacted_in_parts_that_fit(
    policy_of: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many due requests are compacted in parts that fit in memory. The kept entries equal those of a compaction of all
    requests together, and the peak memory is less than half.
    """
    from rollout.vllm import compacting
    from rollout.vllm.messages import Due

    policy = policy_of("gkv", budget=96, period=64, window=16, redundancy=False)
    peak, left = policy.schedule.peak, policy.schedule.left(0, 0)
    assert peak is not None
    kept, peak_bytes = [], []
    for limit in (compacting.MOST, 2 * HEADS * peak * DIM):
        torch.manual_seed(0)
        monkeypatch.setattr(compacting, "MOST", limit)
        state, table = state_of(policy, 5, True, monkeypatch, shape=(2, DIM), device=torch.device("cpu"))
        starts = torch.arange(6, dtype=torch.int32)
        state.make_plan(table, torch.full((5,), peak, dtype=torch.int32), starts, starts)
        for name in state.index:
            state.after_layer(name, torch.randn(5, HEADS * GROUP, DIM))
        with Peak() as memory:
            state.compact([Due(str(i), int(row[0]), peak, peak, left) for i, row in enumerate(table)])
        kept.append(state.positions[:, table[:, : left // 16].long()])
        peak_bytes.append(memory.bytes)
    assert torch.equal(*kept)
    assert peak_bytes[1] < 0.5 * peak_bytes[0]
