"""Measures the time of the parts of a training step: sampling, weight sync, rewards, log-probs and update."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("sync", "generate", "rewards", "logprobs")


class StepClock:
    """Counts the sampled tokens and the seconds of each part of a step since the last log.

    The time outside of PARTS is reported as the update.
    """

    def __init__(self) -> None:
        self.logged_step = 0
        self.restart()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds that this block takes to `part`, one of PARTS."""
        start = now()
        try:
            yield
        finally:
            self.seconds[part] += now() - start

    def read(self, step: int) -> dict[str, float]:
        """Return the timing metrics per step since the last call, or {} if there was no step since then."""
        steps = step - self.logged_step
        if steps <= 0:
            return {}
        elapsed = now() - self.start
        parts = {part: self.seconds[part] for part in PARTS}
        parts["update"] = elapsed - sum(parts.values())
        self.logged_step = step
        return {
            **{f"time/{part}": seconds / steps for part, seconds in parts.items()},
            "time/step": elapsed / steps,
            "time/tokens_per_second": self.tokens / elapsed,
        }

    def restart(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.start, self.tokens = now(), 0


def now() -> float:
    """Wait until the GPU has finished its queued work, and return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
