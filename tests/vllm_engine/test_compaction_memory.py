"""The memory that a compaction of all layers allocates besides the cache is bounded."""

from __future__ import annotations

import pytest
import torch
from counting import GROUP, HEADS, state_of
from peaks import Peak
from tiny import policy_of

DIM = 64


def test_requests_are_compacted_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept entries equal those of a compaction of all requests together, with less than half of the peak memory."""
    from rollout.vllm import state as worker_state
    from rollout.vllm.state import Due

    policy = policy_of("gkv", budget=96, period=64, window=16, redundancy=False)
    peak, left = policy.schedule.peak, policy.schedule.left(0, 0)
    assert peak is not None
    kept, peak_bytes = [], []
    for limit in (worker_state.MOST, 2 * HEADS * peak * DIM):
        torch.manual_seed(0)
        monkeypatch.setattr(worker_state, "MOST", limit)
        state, table = state_of(policy, 5, True, monkeypatch, shape=(2, DIM), device=torch.device("cpu"))
        starts = torch.arange(6, dtype=torch.int32)
        state.make_plan(table, torch.full((5,), peak, dtype=torch.int32), starts, starts)
        for name in state.index:
            state.after_layer(name, torch.randn(5, HEADS * GROUP, DIM))
        with Peak() as memory:
            state.compact([Due(int(row[0]), peak, peak, left) for row in table])
        kept.append(state.positions[:, table[:, : left // 16].long()])
        peak_bytes.append(memory.bytes)
    assert torch.equal(*kept)
    assert peak_bytes[1] < 0.5 * peak_bytes[0]
