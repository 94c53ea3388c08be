"""Our part of a decode step takes few operators (an upper estimate of the launches) and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import DEVICE, DIM, GROUP, HEADS, Counted, state_of
from tiny import policy_of

# maximum numbers of operators of a step: before the forward pass, in each layer, and after all layers
POLICIES: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({"policy": "streaming", "period": 128}, (32, 0, 0)),
    ({"policy": "h2o", "period": 1}, (40, 1, 40)),
    ({"policy": "tova", "period": 1}, (36, 1, 0)),
    ({"policy": "gkv", "window": 16, "period": 128}, (36, 1, 0)),
    ({"policy": "am", "period": 128}, (36, 1, 0)),
    ({"policy": "kvpop", "window": 64, "scorer": {"name": "mlp"}}, (72, 3, 18)),
    ({"policy": "kvpop", "window": 64, "scorer": {"name": "mlstm", "readout": "immediate"}}, (72, 3, 60)),
    ({"policy": "kvpop", "window": 64, "scorer": {"name": "mlstm"}}, (92, 55, 20)),
]


@pytest.mark.parametrize(("policy", "most"), POLICIES, ids=str)
def test_a_decode_step_takes_few_operators_and_no_wait(
    policy: dict, most: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 1 and for 8 requests. In an earlier version, H2O took 28 operators and 2 waits in each layer."""
    pytest.importorskip("vllm")
    from rollout.vllm import state

    monkeypatch.setitem(state.AT_ONCE, DEVICE.type, state.AT_ONCE["cuda"])
    cache_policy = policy_of(
        policy["policy"], budget=128, **{name: value for name, value in policy.items() if name != "policy"}
    )
    for requests in (1, 8):
        with Counted() as counter, torch.no_grad():
            state, table = state_of(cache_policy, requests, True, monkeypatch)
            starts = torch.arange(requests + 1, dtype=torch.int32)
            seen = torch.full((requests,), 129, dtype=torch.int32).to(DEVICE)
            new = torch.randn(requests, HEADS, DIM).to(DEVICE)
            query = torch.randn(requests, HEADS * GROUP, DIM).to(DEVICE)
            blocks, device_starts = table.to(DEVICE), starts.to(DEVICE)
            counter.taken()
            state.make_plan(blocks, seen, device_starts, starts)
            before = counter.taken()
            layers = []
            for name in state.index:
                state.arrive(name, new, new)
                state.after_layer(name, query)
                layers.append(counter.taken())
            state.after_forward()
            after = counter.taken()
        first, *others = layers
        for (operators, waits), budget in zip((before, max(others), after), most, strict=True):
            assert operators <= budget
            assert waits == 0
        assert first[0] <= most[1] + 3  # the first layer also reads the rows of the requests


def test_control_every_kind_of_wait_is_counted() -> None:
    """And no wait for operations that do not wait."""
    with Counted() as counter:
        on_device = torch.arange(4, device=DEVICE)
        for wait in (
            lambda: int(on_device[1]),
            lambda: bool((on_device > 1).any()),
            lambda: on_device.tolist(),
            lambda: on_device.cpu(),
            lambda: on_device[on_device > 1],
            lambda: (on_device > 1).nonzero(),
            lambda: torch.tensor([1, 2], device=DEVICE),
            lambda: torch.tensor([1, 2]).to(DEVICE),
        ):
            counter.taken()
            wait()
            assert counter.taken()[1] == 1
        counter.taken()
        sent = torch.tensor([1, 2]).to(DEVICE, non_blocking=True)
        on_device.index_copy_(0, sent, torch.where(on_device[sent] > 1, sent, 0).view(2))
        host = torch.arange(3)
        assert int(host.max()) == 2
        assert len(host[host > 1]) == 1
        assert counter.taken() == (6, 0)  # one of the operators turns the number 0 into a tensor
