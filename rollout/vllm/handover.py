"""Weights for an engine that runs in processes of its own.

The sender writes them to a file in memory that has no name; the engine's processes map it. The memory is free again
when the sender closes the file or ends, however it ends. Unlike /dev/shm, of 64 MB in a container, it has no size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

STEP = 64  # bytes; weights begin at multiples of it


@contextmanager
def handed_over(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, list[list]]]:
    """What `received` takes, in any process of this user on this machine, until the end of the context.

    The weights are drawn from the iterable one at a time.
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
    """(name, weight) of all that was handed over: views of that memory, not to be kept."""
    memory = torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)
    for name, kind, shape, start in places:
        dtype = getattr(torch, kind)
        count = torch.Size(shape).numel() * dtype.itemsize
        yield name, memory[start : start + count].view(dtype).view(shape)
