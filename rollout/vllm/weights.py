"""New weights for a model in vLLM's workers: which ones it takes, and how they get there from another process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.core_model_loading import revert_weight_conversion

from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.policy import LearnedPolicy
from sparse_rl.models.directory import attach_scorers
from sparse_rl.policies.base import Policy

STEP = 64  # in the file of handed-over weights, each weight begins at a multiple of STEP bytes


class ModelWeights:
    """The weights of a model and its policy's scorers, in a model without data: their names and shapes.

    shapes : name in transformers' module -> shape of each weight that may be given
    required : names of those that must be given
    """

    def __init__(self, config: Any, policy: Policy) -> None:
        with torch.device("meta"):
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            self.model = model_class(config)  # `from_config` would partition the weights under ZeRO-3
            if isinstance(policy, LearnedPolicy):
                attach_scorers(self.model, policy)
        # `state_dict` has buffers, and both names of a tied head.
        self.shapes = {name: weight.shape for name, weight in self.model.state_dict().items()}
        self.required = frozenset(name for name, _ in self.model.named_parameters())

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Check weights, given by their names in transformers' module, and yield them as a checkpoint has them. vLLM
        would not notice a missing part of a fused one. Raises UserError, at the end for missing ones.
        """
        missing = set(self.required)
        wrong = "the engine cannot take the weights: "
        for name, tensor in weights:
            if name not in self.shapes:
                raise UserError(f"{wrong}its model has no {name!r}")
            if tensor.shape != self.shapes[name]:
                raise UserError(f"{wrong}{name!r} must have shape {[*self.shapes[name]]}, got {[*tensor.shape]}")
            missing.discard(name)
            yield from revert_weight_conversion(self.model, {name: tensor.detach()}).items()
        if missing:
            raise UserError(f"{wrong}these were not handed over: {', '.join(sorted(missing)[:3])}")


@contextmanager
def handed_over(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, list[list]]]:
    """Write the weights to a file in memory, and yield the two arguments with which `received` reads the file, until
    the `with` block ends. Its size is not limited, unlike that of /dev/shm, which is 64 MB in a container.
    """
    with open(os.memfd_create("weights"), "wb") as file:
        places = []
        for name, weight in weights:
            start = file.seek(-(-file.tell() // STEP) * STEP)
            places.append([name, str(weight.dtype).removeprefix("torch."), list(weight.shape), start])
            file.write(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}", places


def received(path: str, places: list[list]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) for all weights of `handed_over`. Weights are views of the file, and must not be kept."""
    memory = torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)
    for name, kind, shape, start in places:
        dtype = getattr(torch, kind)
        count = torch.Size(shape).numel() * dtype.itemsize
        yield name, memory[start : start + count].view(dtype).view(shape)
