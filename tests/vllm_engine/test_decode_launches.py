"""Cost of a decode step besides vLLM's own: the number of operators (an upper proxy for launches), and no waits.

Work that is equal for all layers is done once before the forward pass; work that can wait until the end is done there,
for all layers at once. test_cuda_layout.py and the comparisons with hf check the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import DEVICE, DIM, GROUP, HEADS, Counted, state_of

from sparse_rl.policies import Policy

# number of operators of a step: before the forward pass, in each layer, and after all layers
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
def test_a_decode_step_has_few_launches_and_no_synchronisation(
    policy: dict, most: tuple[int, int, int], policy_of: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode step has few launches and no wait, for any number of requests. Layer by layer, as in an earlier version,
    H2O's observation took 28 operators and 2 waits in each layer.
    """
    pytest.importorskip("vllm")
    from rollout.vllm import compacting

    monkeypatch.setitem(compacting.AT_ONCE, DEVICE.type, compacting.AT_ONCE["cuda"])
    made = policy_of(policy["policy"], budget=128, **{name: p for name, p in policy.items() if name != "policy"})
    for requests in (1, 8):
        with Counted() as counted, torch.no_grad():
            state, table = state_of(made, requests, True, monkeypatch)
            starts = torch.arange(requests + 1, dtype=torch.int32)
            seen = torch.full((requests,), 129, dtype=torch.int32).to(DEVICE)
            new = torch.randn(requests, HEADS, DIM).to(DEVICE)
            query = torch.randn(requests, HEADS * GROUP, DIM).to(DEVICE)
            blocks, starts_there = table.to(DEVICE), starts.to(DEVICE)
            counted.taken()
            state.make_plan(blocks, seen, starts_there, starts)
            before = counted.taken()
            layers = []
            for name in state.index:
                state.arrive(name, new, new)
                state.after_layer(name, query)
                layers.append(counted.taken())
            state.after_forward()
            after = counted.taken()
        first, *others = layers
        for (operators, waits), budget in zip((before, max(others), after), most, strict=True):
            assert operators <= budget and waits == 0
        assert first[0] <= most[1] + 3  # and the rows of the requests, which only the forward pass knows


def test_synchronisations_are_counted() -> None:
    """The counter counts each kind of wait, and does not count operations that do not wait."""
    with Counted() as counted:
        there = torch.arange(4, device=DEVICE)
        for wait in (
            lambda: int(there[1]),
            lambda: bool((there > 1).any()),
            lambda: there.tolist(),
            lambda: there.cpu(),
            lambda: there[there > 1],
            lambda: (there > 1).nonzero(),
            lambda: torch.tensor([1, 2], device=DEVICE),
            lambda: torch.tensor([1, 2]).to(DEVICE),
        ):
            counted.taken()
            wait()
            assert counted.taken()[1] == 1
        counted.taken()
        sent = torch.tensor([1, 2]).to(DEVICE, non_blocking=True)
        there.index_copy_(0, sent, torch.where(there[sent] > 1, sent, 0).view(2))
        host = torch.arange(3)
        assert int(host.max()) == 2 and len(host[host > 1]) == 1
        assert counted.taken() == (6, 0)  # and 0 is turned into a tensor
