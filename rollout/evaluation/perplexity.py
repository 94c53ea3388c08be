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
from rollout.evaluation.entries import entry_counts
from rollout.evaluation.estimators import mean_and_error
from rollout.evaluation.journal import Journal, point_key, settings_of, work
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
    peak_entries : maximum number of entries that a kv head held in decoding
    read_entries : maximum number of entries of a kv head that a query read in decoding
    mean_peak_entries : peak of each kv head, averaged over heads, layers and pieces
    tokens : number of tokens after the prompts
    seconds : time in the engine, including prefill
    """

    model: str
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


class TextPoint:
    """A text under one cache policy. Its results are lines of the journal, one for each piece.

    model : name of the model
    pieces : token ids of each piece of the text; all have the same length, which is above `prompt_tokens`
    prompt_tokens : number of tokens at the beginning of each piece that are prefilled
    cache : the policy
    identity : digest of everything that determines the results, except pieces and policy
    """

    def __init__(
        self,
        model: str,
        pieces: Sequence[Sequence[int]],
        prompt_tokens: int,
        journal: Journal,
        cache: Policy,
        identity: str,
    ) -> None:
        self.model, self.pieces, self.prompt_tokens = model, pieces, prompt_tokens
        self.journal, self.cache = journal, cache
        self.key = point_key(identity, list(map(list, pieces)), prompt_tokens, settings_of(cache))

    @property
    def complete(self) -> bool:
        """True if the journal holds all pieces."""
        return len(self.journal.units(self.key)) == len(self.pieces)

    def measure(self, engine: Engine, shown: Stage) -> None:
        """Decode the pieces that have no line in the journal yet, and write a line for each."""
        policy, cut = engine.policy, self.prompt_tokens  # the engine's policy is bound to the model
        for first in range(0, len(self.pieces), engine.max_batch):  # in parts, so that not all traces are in memory
            part = self.pieces[first : first + engine.max_batch]
            new = sum((place,) not in self.journal.units(self.key) for place in range(first, first + len(part)))
            if not new:
                continue
            start = time.perf_counter()
            try:
                rollouts = engine.simulate([p[:cut] for p in part], [p[cut:] for p in part])
            except NotFiniteLogprobError as refused:
                raise refused.of_prompt(first + refused.prompt) from refused
            seconds = time.perf_counter() - start
            self.journal.add(
                [
                    {
                        "point": self.key,
                        "unit": [first + i],
                        "policy": policy.name,
                        "parameters": policy.parameters(),
                        "nll": -math.fsum(rollout.model_logprobs) / len(rollout.model_logprobs),
                        "retention": rollout.trace.retention(),
                        **entry_counts(rollout, policy),
                        "seconds": seconds / len(part),
                    }
                    for i, rollout in enumerate(rollouts)
                ]
            )
            shown.advance(new)

    def row(self) -> PerplexityRow:
        """Return the row of the point, computed from the lines of all pieces."""
        lines = self.journal.lines(self.key)
        completion_tokens = len(self.pieces[0]) - self.prompt_tokens
        nll, error = mean_and_error([line["nll"] for line in lines])
        assert nll is not None
        tokens, seconds = len(lines) * completion_tokens, sum(line["seconds"] for line in lines)
        return PerplexityRow(
            model=self.model,
            policy=lines[0]["policy"],
            parameters=lines[0]["parameters"],
            pieces=len(lines),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion_tokens,
            nll=nll,
            standard_error=error,
            perplexity=math.exp(nll) if nll < LARGEST_NLL else None,
            retention=sum(line["retention"] for line in lines) / len(lines),
            peak_entries=max(line["peak_entries"] for line in lines),
            read_entries=max(line["read_entries"] for line in lines),
            mean_peak_entries=sum(line["mean_peak_entries"] for line in lines) / len(lines),
            tokens=tokens,
            tokens_per_second=tokens / max(seconds, 1e-9),
            seconds=seconds,
        )


def measure_perplexity(
    points: Sequence[TextPoint],
    open_engine: Callable[[Policy], AbstractContextManager[Engine]],
    journal: Journal,
    *,
    on_point: Callable[[], object],
    progress: bool = True,
) -> None:
    """Finish the points: decode the pieces that are not in the journal yet. Skip points on which other processes work.

    open_engine : function policy -> context manager of the engine that decodes under it
    on_point : called after each finished point
    """
    done, total = sum(len(journal.units(point.key)) for point in points), sum(len(point.pieces) for point in points)
    with stage("measuring", total=total, unit="piece", shown=progress, done=done) as shown:

        def measure(point: TextPoint, engine: Engine) -> None:
            shown.tell(label(point.cache))
            point.measure(engine, shown)

        work(points, open_engine, journal, measure, on_point)
