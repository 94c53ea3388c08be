"""Seconds of the stages in which a context is compacted (Attention Matching, table 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.context.config import PromptCacheConfig
from rollout.context.prompts import ContextPrompts
from rollout.hf import HFEngine
from rollout.timing.sampling import now
from sparse_rl.clock import Clock

FITS = "selection", "fit of biases", "fit of values"  # the parts of a compaction


@dataclass(frozen=True)
class MeasuredContext:
    """Time of the compaction of one context.

    entries : number of entries that a kv head keeps
    seconds : stage -> seconds: prefill, queries, compaction; and the parts of the compaction
    """

    entries: int
    seconds: dict[str, float]


def time_context(
    engine: HFEngine, tokens: Sequence[int], config: PromptCacheConfig, prompts: ContextPrompts
) -> MeasuredContext:
    """Compact a context once and return the seconds of its stages. Arguments and errors are those of `compact`."""
    with Clock(True, now) as clock:
        context = engine.compact(tokens, config, prompts)
    seconds = dict(context.seconds)
    for name, _, spent in clock.parts:
        if name in FITS:
            seconds[name] = seconds.get(name, 0.0) + spent
    return MeasuredContext(context.entries, seconds)
