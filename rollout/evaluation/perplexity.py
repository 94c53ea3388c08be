"""Perplexity of a text under a cache policy, decoded token by token, as is usual for PG-19.

The text is cut into pieces. Each piece is a prompt, which is prefilled, and a rest, which is decoded as if its tokens
had been sampled. The standard error is over pieces, as if they were independent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rollout.engine import Engine
from rollout.evaluation.entries import EntryCounts
from rollout.evaluation.estimators import mean_and_error
from rollout.evaluation.samples import label
from rollout.requests import NotFiniteLogprobError
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage, stage

LARGEST_NLL = 700.0  # largest nll whose exp fits into a float


@dataclass(frozen=True)
class PerplexityRow:
    """Perplexity of a text under one cache policy.

    prompt_tokens, completion_tokens : number of tokens in the prompt of each piece, and in the rest after it
    nll : negative log-likelihood in nats, mean over the tokens after the prompts
    standard_error : standard error of nll over pieces; None for fewer than two pieces
    perplexity : exp(nll); None if it does not fit into a float
    retention : cache length / sequence length at the end, mean over all pieces
    peak_entries, read_entries : maximum number of entries in decoding that a kv head held, and that a query read
    mean_peak_entries : peak of each kv head, averaged over heads, layers and pieces
    tokens : number of tokens after the prompts
    seconds : time in the engine, including prefill
    """

    policy: str
    parameters: dict[str, Any]
    pieces: int
    prompt_tokens: int
    completion_tokens: int
    nll: float
    standard_error: float | None
    perplexity: float | None
    retention: float
    peak_entries: int
    read_entries: int
    mean_peak_entries: float
    tokens: int
    tokens_per_second: float
    seconds: float

    @property
    def budget(self) -> int | None:
        """The policy's budget; None if it has none."""
        return self.parameters.get("budget")


def measure_perplexity(
    pieces: Sequence[Sequence[int]],
    prompt_tokens: int,
    policies: Sequence[Policy],
    open_engine: Callable[[Policy], AbstractContextManager[Engine]],
    *,
    on_row: Callable[[list[PerplexityRow]], None],
    progress: bool = True,
) -> list[PerplexityRow]:
    """Measure the perplexity of a text under several policies. Returns one row per policy.

    pieces : token ids of each piece of the text; all have the same length, which is above `prompt_tokens`
    prompt_tokens : number of tokens at the beginning of each piece that are prefilled
    open_engine : function policy -> context manager of the engine that decodes under it
    on_row : called with all rows so far, after each new one
    """
    rows: list[PerplexityRow] = []
    total = len(policies) * len(pieces)
    with stage("measuring", total=total, unit="piece", shown=progress) as shown:
        for policy in policies:
            shown.tell(label(policy))
            with open_engine(policy) as engine:
                rows.append(_measure(pieces, prompt_tokens, engine, shown))
            on_row(list(rows))
    return rows


def _measure(pieces: Sequence[Sequence[int]], prompt_tokens: int, engine: Engine, shown: Stage) -> PerplexityRow:
    policy = engine.policy  # bound to the model
    entries, seconds = EntryCounts(policy), 0.0
    losses: list[float] = []
    kept: list[float] = []
    for first in range(0, len(pieces), engine.max_batch):  # in parts, so that not all traces are in memory together
        part = pieces[first : first + engine.max_batch]
        start = time.perf_counter()
        try:
            rollouts = engine.simulate([p[:prompt_tokens] for p in part], [p[prompt_tokens:] for p in part])
        except NotFiniteLogprobError as refused:
            raise refused.of_prompt(first + refused.prompt) from refused
        seconds += time.perf_counter() - start
        for rollout in rollouts:
            losses.append(-math.fsum(rollout.model_logprobs) / len(rollout.model_logprobs))
            kept.append(rollout.trace.retention())
            entries.add(rollout)
        shown.advance(len(part))
    nll, error = mean_and_error(losses)
    assert nll is not None
    completion_tokens = len(pieces[0]) - prompt_tokens
    tokens = len(pieces) * completion_tokens
    return PerplexityRow(
        policy=policy.name,
        parameters=policy.parameters(),
        pieces=len(pieces),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        nll=nll,
        standard_error=error,
        perplexity=math.exp(nll) if nll < LARGEST_NLL else None,
        retention=sum(kept) / len(kept),
        peak_entries=entries.peak,
        read_entries=entries.read,
        mean_peak_entries=entries.mean_peak,
        tokens=tokens,
        tokens_per_second=tokens / max(seconds, 1e-9),
        seconds=seconds,
    )
