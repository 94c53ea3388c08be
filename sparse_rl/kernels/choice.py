"""Which form of a computation this process's GPU runs: Triton's where a check here has found it right, else torch's.

A kernel that is right under Triton's interpreter may be wrong, slow or not to be had on some GPU and version. So the
first use in a process checks it. `sparse-rl doctor RECIPE` shows the findings.
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
    """The form that runs here.

    finding : why it is this one, in words
    """

    kernel: Literal["torch", "triton"]
    finding: str

    def __str__(self) -> str:
        return f"{self.kernel} ({self.finding})"


def choose(load: Callable[[], Form], judge: Callable[[Form], tuple[bool, str]]) -> Choice:
    """load : gives Triton's form; judge : (whether it is taken, the finding). What either raises is a finding, too."""
    try:
        taken, finding = judge(load())
    except Exception as error:  # whatever a compiler or kernel raises, it says that this kernel is not to be had here
        taken, finding = False, in_a_line(error)
    return Choice("triton", finding) if taken else Choice("torch", f"Triton's kernel is not used: {finding}")


def in_a_line(error: Exception) -> str:
    """An error as its type and the first line of what it says."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"


def seconds_on_gpu(work: Callable[[], object]) -> float:
    """The median of 5 runs, after one to warm up."""
    found = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
