"""Choice between a Triton kernel and torch on this process's GPU: Triton if the kernel passes a check, else torch.

A kernel that is correct under Triton's interpreter may be wrong, slow or unavailable on some GPU or version. So a
kernel is checked when a process first uses it. `sparse-rl doctor RECIPE` shows the findings.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

Form = TypeVar("Form")


@dataclass(frozen=True)
class Choice:
    """The implementation, `kernel`, that this process uses for a computation.

    finding : the reason for the choice, in words
    """

    kernel: Literal["torch", "triton"]
    finding: str

    def __str__(self) -> str:
        return f"{self.kernel} ({self.finding})"


def choose(load: Callable[[], Form], judge: Callable[[Form], tuple[bool, str]]) -> Choice:
    """Choose the Triton implementation if `judge` accepts it, else torch. An exception in either function means torch.

    load : returns the Triton implementation
    judge : returns a pair: True if the implementation is accepted, and the finding in words
    """
    try:
        accepted, finding = judge(load())
    except Exception as error:  # any exception of a compiler or kernel means that the kernel is unusable here
        accepted, finding = False, in_a_line(error)
    return Choice("triton", finding) if accepted else Choice("torch", f"Triton's kernel is not used: {finding}")


def in_a_line(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"


def seconds_on_gpu(work: Callable[[], object]) -> float:
    """Return the median time of 5 runs of `work` on the GPU, in seconds, after one warm-up run."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
