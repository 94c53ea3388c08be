"""Times the parts of a forward pass while a `Clock` runs. Without a running clock, a `part` costs almost nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True)
class Step:
    """State of an engine after a step.

    time : time in seconds, of the clock's own `now`
    tokens : number of tokens sampled so far, over all sequences
    prefilled : True if no prompt waits to be read
    cache_bytes : bytes of keys and values that the sequences hold
    at_once : number of sequences that the step worked on
    """

    time: float
    tokens: int
    prefilled: bool
    cache_bytes: int
    at_once: int


class Clock:
    """Context manager that records the steps of an engine and the durations of the parts of a step.

    detailed : True records also parts that occur in every layer of every step. On a GPU this slows the engine down,
        because each measured part waits for the GPU
    now : function that returns the time in seconds, after a GPU has finished its work
    on_step : called after each step
    """

    running: ClassVar[Clock | None] = None

    def __init__(
        self,
        detailed: bool = False,
        now: Callable[[], float] = time.perf_counter,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.detailed, self.now, self.on_step = detailed, now, on_step
        self.within_part = False
        self.steps: list[Step] = []
        self.parts: list[tuple[str, int, float]] = []  # name of a part, number of its step, seconds

    def __enter__(self) -> Self:
        Clock.running = self
        return self

    def __exit__(self, *_: object) -> None:
        Clock.running = None

    def step(self, sampled: int, cache_bytes: int, at_once: int, prefilled: bool = True) -> None:
        """Record the end of a step that sampled `sampled` tokens; the other arguments are fields of `Step`."""
        tokens = sampled + (self.steps[-1].tokens if self.steps else 0)
        self.steps.append(Step(self.now(), tokens, prefilled, cache_bytes, at_once))
        self.on_step(self.steps[-1])


@contextmanager
def part(name: str, detail: bool = False) -> Iterator[None]:
    """Context manager, and decorator: if a clock runs, it records the duration of the block under `name`.

    A part that runs within another part is not recorded, so the recorded durations can be added.

    detail : True if the block runs in every layer of every step; only a detailed clock records it
    """
    clock = Clock.running
    if clock is None or clock.within_part or (detail and not clock.detailed):
        yield
        return
    clock.within_part, start = True, clock.now()
    try:
        yield
    finally:
        clock.parts.append((name, len(clock.steps), clock.now() - start))
        clock.within_part = False
