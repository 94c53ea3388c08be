"""On a GPU, neither a decode step nor a compaction waits for the device.

NOT RUN YET: written on a machine without a GPU. torch reports each call that waits, including its own copies.
tests/counting.py counts the same waits without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from counting import DIM, GROUP, HEADS, state_of
from tiny import policy_of

from sparse_rl.kernels.redundancy import check_redundancy

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"), pytest.mark.first(0)]
REQUESTS = 8
POLICIES: list[dict[str, Any]] = [
    {"policy": "streaming", "period": 128},
    {"policy": "h2o", "period": 1},
    {"policy": "gkv", "window": 16, "period": 128},
    {"policy": "kvpop", "window": 64, "scorer": {"name": "mlp"}},
    {"policy": "kvpop", "window": 64, "scorer": {"name": "mlstm"}},
]


@pytest.fixture
def react_to_waits() -> Iterator[Callable[[str], None]]:
    """Yield the function that sets torch's reaction to waits: "error" or, at the end, "default"."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@torch.no_grad()
def test_decoding_and_compactions_do_not_wait(
    policy: dict, react_to_waits: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all 8 requests of a run, whose evictions are recorded. Control: fetching the record waits."""
    pytest.importorskip("vllm")
    from rollout.vllm.sampling import RunRecord
    from rollout.vllm.state import Due

    cache_policy = policy_of(
        policy["policy"], budget=128, **{name: value for name, value in policy.items() if name != "policy"}
    )
    peak, left, device = cache_policy.schedule.peak, cache_policy.schedule.left(0, 0), torch.device("cuda")
    assert peak is not None
    held = peak + 8 * cache_policy.schedule.before_attending
    state, table = state_of(cache_policy, REQUESTS, True, monkeypatch, dtype=torch.bfloat16, device=device)
    state.record = RunRecord()
    check_redundancy(torch.bfloat16, DIM)  # at the first use, this check waits
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
    state.compact([Due(int(row[0]), held, held, left) for row in table])
    with pytest.raises(RuntimeError, match="synchroniz"):
        state.record._fetch()
