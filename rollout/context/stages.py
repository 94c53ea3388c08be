"""Durations of the stages of a compaction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stages(dict[str, float]):
    """Duration of each stage of a compaction, in seconds, added up over parts."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # otherwise kernels that are still running would count for the next stage
        self[stage] = self.get(stage, 0.0) + time.perf_counter() - start
