"""Weights for an engine that runs in separate processes.

The sender writes them to an unnamed file in memory, and the engine's processes map it. The memory is freed when the
sender closes the file or ends for any reason. Unlike /dev/shm, which has 64 MB in a container, its size is not limited.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

STEP = 64  # bytes; each weight begins at a multiple of it


@contextmanager
def handed_over(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, list[list]]]:
    """Yield the arguments of `received`, valid in any process of this user on this machine until the context ends.

    The weights are taken from the iterable one at a time.
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
    """Yield (name, weight) of all weights handed over. They are views of the shared memory and must not be kept."""
    memory = torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)
    for name, kind, shape, start in places:
        dtype = getattr(torch, kind)
        count = torch.Size(shape).numel() * dtype.itemsize
        yield name, memory[start : start + count].view(dtype).view(shape)
