"""Time and memory of sampling, at several lengths of the sequences; time of the stages of a context's compaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from rollout.context.config import PromptCacheConfig
from rollout.context.reader import ContextPrompts
from rollout.hf import HFEngine
from sparse_rl.clock import Clock, Step

FITS = "selection", "fit of biases", "fit of values"  # the parts of a compaction


@dataclass(frozen=True)
class Measured:
    """Time and memory of sampling until all sequences have `length` tokens.

    length : tokens of a sequence, prompt and completion
    seconds : time from the call of the engine on; it includes the reading of the prompts
    decode_seconds : time after the reading of the prompts
    decode_tokens : tokens of all sequences that were sampled in this time
    decode_steps : steps of the engine in this time
    parts : name of a part of a step -> seconds while decoding
    compactions : number of decode steps in which a sequence was compacted
    cache_bytes : maximum number of bytes of keys and values
    at_once : mean number of sequences that a decode step worked on; fewer than all if some waited, because the cache of
        the vllm engine was full
    peak_bytes : maximum number of bytes of the GPU's memory or, without a GPU, of this process; None means unknown
    """

    length: int
    seconds: float
    decode_seconds: float
    decode_tokens: int
    decode_steps: int
    parts: dict[str, float]
    compactions: int
    cache_bytes: int
    at_once: float
    peak_bytes: int | None


def now() -> float:
    """Return the time in seconds, after a GPU has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def time_sampling(
    sample: Callable[[], object],
    sequences: int,
    prompt: int,
    lengths: Sequence[int],
    *,
    detailed: bool = False,
    observed: AbstractContextManager | None = None,
) -> list[Measured]:
    """Call `sample` and return the time and memory until each of the lengths.

    sample : samples `sequences` sequences from prompts of `prompt` tokens, up to the greatest length
    lengths : tokens of a sequence, prompt and completion
    detailed : True also times the parts that occur in every layer of every step
    observed : context in which an engine that does not always do so reports its steps to the running clock
    """
    peaks: dict[int, int | None] = {}

    def read_peak(step: Step) -> None:
        for length in lengths:
            if length not in peaks and step.tokens >= sequences * (length - prompt):
                peaks[length] = _peak_bytes()

    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    with Clock(detailed, now, read_peak) as clock, observed or nullcontext():
        start = now()
        sample()
        now()
    return [_measured(clock, start, length, sequences * (length - prompt), peaks.get(length)) for length in lengths]


def time_context(
    engine: HFEngine, tokens: Sequence[int], config: PromptCacheConfig, prompts: ContextPrompts
) -> tuple[int, dict[str, float]]:
    """Compact a context once (Attention Matching, table 1). Returns the number of entries that a kv head keeps, and
    stage -> seconds: prefill, queries, compaction; and the parts of the compaction.
    """
    with Clock(True, now) as clock:
        context = engine.compact(tokens, config, prompts)
    seconds = dict(context.seconds)
    for name, _, spent in clock.parts:
        if name in FITS:
            seconds[name] = seconds.get(name, 0.0) + spent
    return context.entries, seconds


def _measured(clock: Clock, start: float, length: int, tokens: int, peak: int | None) -> Measured:
    steps = clock.steps
    last = next((place for place, step in enumerate(steps) if step.tokens >= tokens), len(steps) - 1)
    first = next((place for place, step in enumerate(steps) if step.prefilled), last)
    if steps[last].tokens - steps[min(first, last)].tokens < tokens / 2:  # prompts were read while others decoded
        first = 0
    first = min(first, last)
    parts: dict[str, float] = {}
    compacted = set()
    for name, place, seconds in clock.parts:
        if first < place <= last:
            parts[name] = parts.get(name, 0.0) + seconds
            compacted |= {place} if name == "compaction" else set()
    return Measured(
        length=length,
        seconds=steps[last].time - start,
        decode_seconds=steps[last].time - steps[first].time,
        decode_tokens=steps[last].tokens - steps[first].tokens,
        decode_steps=last - first,
        parts=parts,
        compactions=len(compacted),
        cache_bytes=max(step.cache_bytes for step in steps[: last + 1]),
        at_once=fmean(step.at_once for step in steps[first + 1 : last + 1] or steps[last : last + 1]),
        peak_bytes=peak,
    )


def _peak_bytes() -> int | None:
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    return None
