"""On a GPU, a decode step never waits for the device, and a compaction waits at most MOST_WAITS times.

NOT RUN YET: written on a machine without a GPU. torch reports each call that waits, including its own copies.
tests/counting.py counts the same waits without a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from counting import DIM, GROUP, HEADS, state_of
from tiny import policy_of

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"), pytest.mark.first(0)]
REQUESTS, MOST_WAITS = 8, 6
POLICIES: list[dict[str, Any]] = [
    {"policy": "streaming", "period": 128},
    {"policy": "h2o", "period": 1},
    {"policy": "gkv", "window": 16, "period": 128},
    {"policy": "kvpop", "window": 64, "scorer": {"name": "mlp"}},
    {"policy": "kvpop", "window": 64, "scorer": {"name": "mlstm"}},
]


@pytest.fixture
def react_to_waits() -> Iterator[Callable[[str], None]]:
    """Yield the function that sets torch's reaction to waits: "error", "warn" or, at the end, "default"."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@torch.no_grad()
def test_decoding_does_not_wait_and_compactions_wait_a_few_times(
    policy: dict, react_to_waits: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction of all 8 requests waits 1 to MOST_WAITS times."""
    pytest.importorskip("vllm")
    from rollout.vllm.state import Due

    cache_policy = policy_of(
        policy["policy"], budget=128, **{name: value for name, value in policy.items() if name != "policy"}
    )
    peak, left, device = cache_policy.schedule.peak, cache_policy.schedule.left(0, 0), torch.device("cuda")
    assert peak is not None
    held = peak + 8 * cache_policy.schedule.before_attending
    state, table = state_of(cache_policy, REQUESTS, True, monkeypatch, dtype=torch.bfloat16, device=device)
    starts, seen = torch.arange(REQUESTS + 1, dtype=torch.int32), torch.full((REQUESTS,), held, dtype=torch.int32)
    new = torch.randn(REQUESTS, HEADS, DIM, device=device, dtype=torch.bfloat16)
    query = torch.randn(REQUESTS, HEADS * GROUP, DIM, device=device, dtype=torch.bfloat16)
    blocks, seen, device_starts = table.to(device), seen.to(device), starts.to(device)

    react_to_waits("error")
    state.make_plan(blocks, seen, device_starts, starts)
    for name in state.index:
        state.arrive(name, new, new)
        state.after_layer(name, query)
    state.after_forward()
    react_to_waits("warn")
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        state.compact([Due(int(row[0]), held, held, left) for row in table])
    assert 0 < len(waits) <= MOST_WAITS
