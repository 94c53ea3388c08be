"""Sampling of any number of prompts, in parts, so that not all traces are in memory together."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterator, Sequence
from typing import Any

from rollout.config import SamplingConfig
from rollout.context import Context
from rollout.engine import Engine, Rollout
from rollout.requests import NotFiniteLogprobError
from sparse_rl.policies.base import Policy


def sample_in_parts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    context: Context | None = None,
    finished: Container[int] = (),
) -> Iterator[tuple[list[int], list[Rollout], float]]:
    """Sample in parts of a few full batches. Yields, for each part, (indices of its prompts, their rollouts prompt by
    prompt, seconds that the engine took).

    Equal prompts stay in one part, because the engine gives their samples different seeds only within one call.

    context : compacted context that all prompts continue; None means that there is none
    finished : indices of finished prompts, which do not change the parts; a part with only such prompts is skipped
    """
    places_of: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        places_of.setdefault(tuple(prompt), []).append(place)
    size = math.lcm(sampling.n, engine.max_batch) // sampling.n
    context_option: dict[str, Any] = {} if context is None else {"context": context}
    part: list[int] = []
    for number, places in enumerate(places_of.values(), start=1):
        part += places
        if len(part) >= size or number == len(places_of):
            if all(place in finished for place in part):
                part = []
                continue
            start = time.perf_counter()
            try:
                rollouts = engine.generate([list(prompts[place]) for place in part], sampling, **context_option)
            except NotFiniteLogprobError as error:
                raise error.of_prompt(part[error.prompt]) from error
            yield part, rollouts, time.perf_counter() - start
            part = []


def label(policy: Policy) -> str:
    """Return a short label of a policy for a progress bar: its name, and its budget if it has one."""
    return " ".join(map(str, filter(None, (policy.name, policy.parameters().get("budget")))))


def summary(rollout: Rollout) -> dict[str, Any]:
    """Return the keys and values that describe a rollout in a file of completions, except the completion's text."""
    return {
        "finish_reason": rollout.finish_reason,
        "tokens": len(rollout.completion_ids),
        "retention": rollout.trace.retention(),
        "mean_logprob": sum(rollout.logprobs) / len(rollout.logprobs),
    }
