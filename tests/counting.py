"""Count the operators (an upper proxy for launches) and waits of a worker's state, without a GPU.

`Device` is torch's `meta` device with numbers: its tensors compute on the CPU, but work of the host and work of the
device are distinguished as on a GPU. Operations that wait for the device are recognised too: reading a number, indexing
by a mask, copying to the host, and copying from the host without `non_blocking`.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from sparse_rl.methods.kvpop.policy import KVpop
from sparse_rl.methods.kvpop.scorers import sketch_scorer
from sparse_rl.policies import Policy

LAYERS, HEADS, GROUP, DIM, SIZE = 28, 4, 7, 8, 16
DEVICE = torch.device("meta")
FREE = {  # views and allocations
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "diagonal", "empty", "empty_like",
    "empty_strided", "expand", "lift_fresh", "new_empty", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"}


class OnDevice(torch.Tensor):
    """A tensor on the device; its numbers are in `inner`, on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout, dtype=inner.dtype, device=DEVICE)
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("operators on the device may only run inside a `Counted` block")

    def tolist(self) -> list[Any]:
        return self.cpu().tolist()


class Counted(TorchDispatchMode):
    """Provides the device within the block, and records the operators that run on it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> Counted:
        # `torch.device(...)` keeps its list of constructors from its first use on: not with a replaced one
        _device_constructors()
        self.tensor = torch.tensor
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(torch, "tensor", self._tensor)
        # torch.autocast does not support the meta device
        self.patches.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patches.undo()

    def _tensor(self, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """Copy blockingly, as on a GPU; torch's own function would keep only the shape on the meta device."""
        tensor = self.tensor(data, **kwargs)
        return tensor if device is None else tensor.to(device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.split(".")[0], dict(kwargs or {})
        given: list[bool] = []

        def plain(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                given.append(isinstance(x, OnDevice))
            return x.inner if isinstance(x, OnDevice) else x

        inputs, options = tree_map(plain, args), tree_map(plain, kwargs)
        there = came = any(given)
        if kwargs.get("device") is not None:
            there = kwargs["device"].type == DEVICE.type
            options["device"] = torch.device("cpu")
            if given and there != came:
                self.waits["copied to the host" if came else "copied to the device"] += not kwargs.get("non_blocking")
        if there or came:
            self.operators[name] += name not in FREE
            self.waits[name] += name in WAITS
            if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
                self.waits["by a mask"] += sum(i is not None and i.dtype == torch.bool for i in args[1])
        out = func(*inputs, **options)
        if "out" in kwargs:
            return kwargs["out"]
        if there and (name == "copy_" or func._schema.is_mutable) and isinstance(args[0], OnDevice):
            return args[0]
        return tree_map(lambda x: OnDevice(x) if there and isinstance(x, torch.Tensor) else x, out)

    def taken(self) -> tuple[int, int]:
        """Return the numbers of operators and of waits since the last call."""
        counts = self.operators.total(), self.waits.total()
        self.operators.clear()
        self.waits.clear()
        return counts


def state_of(
    policy: Policy,
    requests: int,
    blocks_inside: bool,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int] = (LAYERS, DIM),
    dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
) -> Any:
    """A worker's state over random caches of one allocation, on the device: (state, blocks of each request).

    Each request has a prompt of one block; its entries are stored in order of position. shape : (layers, head dim)
    """
    from rollout.vllm import arrivals
    from rollout.vllm.arrivals import ArrivalState
    from rollout.vllm.compat import paged
    from rollout.vllm.compat.arguments import CacheConfig
    from rollout.vllm.state import Begun, CacheState

    peak = policy.schedule.peak
    layers, dim = shape
    item = peak // SIZE + 1
    blocks, layer = requests * item + 1, SimpleNamespace(impl=SimpleNamespace(scale=1.0), num_heads=HEADS * GROUP)
    outer = (layers, blocks) if blocks_inside else (blocks, layers)
    whole = torch.randn(*outer, SIZE, HEADS, 2 * dim).to(device, dtype).transpose(-2, -3)
    whole = whole if blocks_inside else whole.transpose(0, 1)
    names = [str(i) for i in range(layers)]
    monkeypatch.setattr(paged, "attention_layers", lambda config, given: dict.fromkeys(given, layer))
    monkeypatch.setattr(paged, "keys_are_transposed", lambda: False)
    monkeypatch.setattr(paged, "mean_over_ranks", lambda value: value)
    monkeypatch.setattr(paged, "own_heads", slice)
    kind = CacheState
    if isinstance(policy, KVpop):
        kind, weights = ArrivalState, dict(sketch_scorer(policy.config.scorer, heads=HEADS, dim=dim).named_parameters())
        stored = {f"{i}.{name}": torch.randn(w.shape) for i in range(layers) for name, w in weights.items()}
        monkeypatch.setattr(arrivals, "stored_scorers", lambda model: stored)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=requests), model_config=SimpleNamespace(dtype=dtype, model="")
    )
    state = kind(config, CacheConfig(policy, None, True), dict(zip(names, whole, strict=True)))
    table = torch.arange(1, blocks, dtype=torch.int32).view(requests, item)
    state.begin([], [Begun(str(i), int(row[0]), SIZE) for i, row in enumerate(table)])
    positions = torch.arange(item * SIZE, dtype=torch.int32).view(item, 1, SIZE).to(device)
    for row in table.long().to(device):
        state.positions[:, row] = positions
    return state, table
