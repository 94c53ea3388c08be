"""Count the bytes that operators allocate, and those that the backward pass keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Records the peak number of bytes of the tensors that operators create."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for produced in tree_leaves(out):
            if isinstance(produced, torch.Tensor) and produced.untyped_storage()._cdata not in given:
                storage = produced.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self.storages.values()))
        return out


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


def kept_for_backward(model: torch.nn.Module, forward: Callable[[], object]) -> int:
    """Return the bytes that `forward` keeps for the backward pass, besides the model's parameters."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
