"""What a compaction in vLLM costs a GPU beyond its arithmetic: operators (an upper proxy for launches) and waits.

All layers are compacted at once where vLLM has them in one allocation. Counted on a CPU, with as much at once as on a
GPU. test_cuda_layout.py holds what a compaction does, in every memory order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_rl.policies import Policy, scored_window
from sparse_rl.policies.config import EvictingConfig

LAYERS, HEADS, GROUP, DIM, SIZE = 28, 4, 7, 8, 16
MOST_OPERATORS, MOST_WAITS = 200, 10
FREE = {  # views and allocations
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "lift_fresh", "new_empty", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero"}
POLICIES: list[dict[str, Any]] = [
    {"policy": "gkv", "budget": 128, "window": 16, "period": 128},
    {"policy": "gkv", "budget": 128, "window": 16, "period": 128, "redundancy": False},
    {"policy": "rkv", "budget": 128, "window": 16, "period": 128},
    {"policy": "snapkv", "budget": 128, "window": 16, "period": 128},
    {"policy": "morphkv", "budget": 128, "window": 16, "period": 128},
    {"policy": "cake", "budget": 128, "window": 16, "period": 128},
    {"policy": "streaming", "budget": 128, "period": 128},
    {"policy": "h2o", "budget": 128, "period": 1},
    {"policy": "tova", "budget": 128, "period": 1},
]


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.operators[name] += name not in FREE
        self.waits[name] += name in WAITS
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            self.waits["by a mask"] += sum(index is not None and index.dtype == torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))


def state_of(policy: Policy, requests: int, blocks_inside: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker's state over random caches of one allocation, full requests in it: (state, blocks of each request)."""
    from rollout.vllm.compat import paged
    from rollout.vllm.compat.arguments import CacheConfig
    from rollout.vllm.messages import Begun
    from rollout.vllm.state import CacheState

    peak = policy.schedule.peak
    assert peak is not None
    each = -(-peak // SIZE)
    blocks, layer = requests * each + 1, SimpleNamespace(impl=SimpleNamespace(scale=1.0), num_heads=HEADS * GROUP)
    shape = (LAYERS, blocks) if blocks_inside else (blocks, LAYERS)
    whole = torch.randn(*shape, SIZE, HEADS, 2 * DIM).transpose(2, 3)
    whole = whole if blocks_inside else whole.transpose(0, 1)
    names = [str(i) for i in range(LAYERS)]
    monkeypatch.setattr(paged, "attention_layers", lambda config, given: dict.fromkeys(given, layer))
    monkeypatch.setattr(paged, "keys_are_transposed", lambda: False)
    monkeypatch.setattr(paged, "mean_over_ranks", lambda value: value)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=requests), model_config=SimpleNamespace(dtype=torch.float32)
    )
    state = CacheState(config, CacheConfig(policy, None, True), dict(zip(names, whole, strict=True)))
    table = torch.arange(1, blocks, dtype=torch.int32).view(requests, each)
    state.begin([], [Begun(str(i), int(row[0]), SIZE) for i, row in enumerate(table)])
    positions = torch.arange(each * SIZE, dtype=torch.int32).view(each, 1, SIZE)
    for row in table.long():
        state.positions[:, row] = positions
    starts = torch.arange(requests + 1, dtype=torch.int32)
    state.make_plan(table, torch.full((requests,), peak, dtype=torch.int32), starts, starts)
    for name in names:
        state.after_layer(name, torch.randn(requests, HEADS * GROUP, DIM))
    return state, table


@pytest.mark.parametrize("blocks_inside", [True, False], ids=["LB", "BL"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p['policy']}{'' if p.get('redundancy', True) else '-'}")
def test_a_compaction_of_all_layers_is_a_few_launches(
    policy: dict, blocks_inside: bool, policy_of: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """28 layers, whatever the requests; as it was by layer, a compaction of G-KV took 4,177 operators and 196 waits."""
    pytest.importorskip("vllm")
    from rollout.vllm import state as states
    from rollout.vllm.messages import Due

    monkeypatch.setitem(states.AT_ONCE, "cpu", states.AT_ONCE["cuda"])
    monkeypatch.setitem(scored_window.AT_ONCE, "cpu", scored_window.AT_ONCE["cuda"])
    made = policy_of(policy["policy"], **{name: value for name, value in policy.items() if name != "policy"})
    assert isinstance(made.config, EvictingConfig)
    for requests in (1, 8):
        state, table = state_of(made, requests, blocks_inside, monkeypatch)
        peak, left = made.schedule.peak, made.schedule.left(0, 0)
        due = [Due(str(i), int(row[0]), peak, peak, left) for i, row in enumerate(table)]
        with Counted() as counted:
            state.compact(due)
        assert 0 < sum(counted.operators.values()) <= MOST_OPERATORS, counted.operators
        assert 0 < sum(counted.waits.values()) <= MOST_WAITS, counted.waits


def test_layers_that_lie_elsewhere_are_compacted_one_by_one() -> None:
    pytest.importorskip("vllm")
    from rollout.vllm.slabs import Arrangement

    whole = torch.zeros(3, 4, 2)
    assert Arrangement.of(list(whole)) == Arrangement(4, 1)
    assert Arrangement.of(list(whole.transpose(0, 1))) == Arrangement(1, 4)
    assert Arrangement.of([torch.zeros(4, 2), torch.zeros(4, 2)]) is None
    assert Arrangement.of([whole[0], whole[2], whole[1]]) is None
    assert Arrangement.of(list(whole[:, :3])) is None
    for views in (list(whole), list(whole.transpose(0, 1))):
        found = Arrangement.of(views)
        assert found is not None
        joined = found.joined(views)
        for layer, view in enumerate(views):
            for block in range(len(view)):
                place = joined[layer * found.of_layer + block * found.of_block]
                assert place.data_ptr() == view[block].data_ptr()
        filled = found.filled((len(views), len(views[0]), 5), 1.5, torch.float32, torch.device("cpu"))
        assert Arrangement.of(list(filled)) == found and bool((filled == 1.5).all())
