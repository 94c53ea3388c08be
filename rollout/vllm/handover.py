"""Passes weights to an engine in separate processes: the sender writes a file in memory, and the engine maps the file.

The memory is freed when the sender closes the file or ends for any reason. The file's size is not limited, unlike that
of /dev/shm, which is 64 MB in a container.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

STEP = 64  # each weight begins at a multiple of STEP bytes


@contextmanager
def handed_over(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, list[list]]]:
    """Write the weights to a file in memory, and yield the two arguments with which `received` reads the file.

    The arguments are valid until the `with` block ends, in any process of this user on this machine.
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
