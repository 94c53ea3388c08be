"""A compaction in vLLM takes few operators (an upper estimate of the kernel launches) and few waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import DEVICE, LAYERS, Counted, state_of
from policy_cases import ON_VLLM
from tiny import policy_of

from sparse_rl.errors import UserError
from sparse_rl.kernels import redundancy

MOST_OPERATORS, MOST_WITH_REDUNDANCY = 120, {1: 156, 8: 183}  # for 1 and for 8 requests
POLICIES: list[dict[str, Any]] = [
    *({"policy": name} for name in ON_VLLM if name not in ("full", "am")),  # am solves its fits in a loop
    {"policy": "gkv", "redundancy": False},
    {"policy": "kvpop", "window": 64, "scorer": {"name": "mlp"}},  # for the tokens at the end of a longer prompt
]


@pytest.mark.parametrize("blocks_inside", [True, False], ids=["LB", "BL"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p['policy']}{'' if p.get('redundancy', True) else '-'}")
@pytest.mark.few(2)
def test_a_compaction_of_all_layers_takes_few_operators_and_waits(
    policy: dict, blocks_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 1, 8 and 64 requests of a run, whose evictions are recorded. Layer by layer, G-KV took 4,264 operators and
    283 waits, in a later version 8 waits. Only redundancy without Triton waits; it also reads a few requests at a time.
    """
    pytest.importorskip("vllm")
    from rollout.vllm import state
    from rollout.vllm.sampling import RunRecord
    from rollout.vllm.state import Due

    monkeypatch.setitem(state.AT_ONCE, DEVICE.type, state.AT_ONCE["cuda"])
    monkeypatch.setitem(redundancy.AT_ONCE, DEVICE.type, redundancy.AT_ONCE["cuda"])
    settings = {"budget": 128, "window": 16, "period": 1 if policy["policy"] in ("h2o", "tova") else 128, **policy}
    cache_policy = policy_of(settings.pop("policy"), **settings)
    redundant = getattr(cache_policy.config, "redundancy", policy["policy"] == "rkv")
    for requests in (1, 8) if redundant else (1, 8, 64):
        with Counted() as counter:
            state, table = state_of(cache_policy, requests, blocks_inside, monkeypatch)
            state.record = RunRecord()
            peak, left = cache_policy.schedule.peak, cache_policy.schedule.left(0, 0)
            assert peak is not None
            held = peak + 8 * cache_policy.schedule.before_attending
            starts = torch.arange(requests + 1, dtype=torch.int32)
            seen = torch.full((requests,), held, dtype=torch.int32)
            state.make_plan(table.to(DEVICE), seen.to(DEVICE), starts.to(DEVICE), starts)
            counter.taken()
            state.compact([Due(int(row[0]), held, held, left) for row in table])
            operators, waits = counter.taken()
        assert LAYERS < operators <= (MOST_WITH_REDUNDANCY[requests] if redundant else MOST_OPERATORS)
        assert waits == redundant


def test_layers_at_unequal_distances_are_refused() -> None:
    """vLLM itself has no such layout; test_cuda_layout.py has its three memory orders."""
    pytest.importorskip("vllm")
    from rollout.vllm.state import Arrangement

    allocation = torch.zeros(3, 4, 2)
    assert Arrangement.of(list(allocation)) == Arrangement(4, 1)
    assert Arrangement.of(list(allocation.transpose(0, 1))) == Arrangement(1, 4)
    unequal = (
        [torch.zeros(4, 2), torch.zeros(4, 2)],
        [allocation[0], allocation[2], allocation[1]],
        list(allocation[:, :3]),
    )
    for views in unequal:
        with pytest.raises(UserError, match="are not at equal distances in one allocation"):
            Arrangement.of(views)
    for views in (list(allocation), list(allocation.transpose(0, 1))):
        arrangement = Arrangement.of(views)
        joined = arrangement.joined(views)
        for layer, view in enumerate(views):
            for block in range(len(view)):
                block_in_joined = joined[layer * arrangement.of_layer + block * arrangement.of_block]
                assert block_in_joined.data_ptr() == view[block].data_ptr()
        separate = arrangement.apart(joined, len(views))
        for layer, view in zip(separate, views, strict=True):
            assert (layer.shape, layer.stride(), layer.data_ptr()) == (view.shape, view.stride(), view.data_ptr())
