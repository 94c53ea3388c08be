"""Times of several ways to compute the same: interleaved repetitions after a warm-up, medians, and their spread."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.gpu.worker import FAILURE, Row, in_a_line

WARM_UPS = 2


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its queued work; on a CPU there is nothing to wait for."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], Any], device: str) -> float:
    """Return the duration of one run: by CUDA events on a GPU, by the clock on a CPU."""
    if device != "cuda":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    work()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event)


def interleaved(works: Mapping[str, Callable[[], Any]], device: str, runs: int) -> dict[str, list[float] | str]:
    """Return name -> milliseconds of each run, or -> the exception in one line if the work raised one."""
    times: dict[str, list[float] | str] = {}
    for name, work in works.items():
        try:
            for _ in range(WARM_UPS):
                work()
            synchronize(device)
            times[name] = []
        except Exception as error:  # the other works are still wanted
            traceback.print_exc()
            times[name] = in_a_line(error)
    for _ in range(runs):
        for name, work in works.items():
            run_times = times[name]
            if isinstance(run_times, list):
                run_times.append(milliseconds(work, device))
    return times


def compared(works: Mapping[str, Callable[[], Any]], device: str, runs: int, reference: str) -> dict[str, Row]:
    """Return name -> row with the median of the milliseconds, their spread, and the speed relative to the reference.

    spread : (slowest - fastest run) / median
    times faster : median over the rounds of (milliseconds of the reference / milliseconds of this work)
    """
    times, rows = interleaved(works, device, runs), {}
    base = times[reference]
    for name, run_times in times.items():
        if isinstance(run_times, str):
            rows[name] = {FAILURE: run_times}
            continue
        median = statistics.median(run_times)
        row: Row = {"ms": median, "spread": (max(run_times) - min(run_times)) / median}
        if isinstance(base, list):
            ratios = (theirs / ours for theirs, ours in zip(base, run_times, strict=True))
            row[f"times faster than {reference}"] = statistics.median(ratios)
        rows[name] = row
    return rows
