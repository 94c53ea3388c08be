"""Perplexity of a text under a cache policy, decoded token by token, as is usual for PG-19.

The text is cut into pieces. Each piece is a prompt, which is prefilled, and a rest, which is decoded as if its tokens
had been sampled. The standard error is over pieces, as if they were independent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.engine import Engine
from rollout.measure.accuracy import CacheRow, entry_counts, label, mean_and_error, totals
from rollout.measure.journal import Journal, Point, settings_of
from rollout.sampling import NotFiniteLogprobError
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage

LARGEST_NLL = 700.0  # largest nll whose exp fits into a float


@dataclass(frozen=True, kw_only=True)
class PerplexityRow(CacheRow):
    """Perplexity of a text under one cache policy.

    prompt_tokens, completion_tokens : number of tokens in the prompt of each piece, and in the rest after it
    nll : negative log-likelihood in nats, mean over the tokens after the prompts
    standard_error : standard error of nll over pieces; None for fewer than two pieces
    perplexity : exp(nll); None if it does not fit into a float
    """

    pieces: int
    prompt_tokens: int
    completion_tokens: int
    nll: float
    standard_error: float | None
    perplexity: float | None


class TextPoint(Point):
    """A text under one cache policy: a line for each piece, given as token ids, of which the first `prompt_tokens` are
    prefilled. All pieces have the same length.

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
        determining = identity, list(map(list, pieces)), prompt_tokens, settings_of(cache)
        super().__init__(journal, cache, len(pieces), *determining)

    def measure(self, engine: Engine, shown: Stage) -> None:
        shown.tell(label(self.cache))
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
        lines = self.journal.lines(self.key)
        completion_tokens = len(self.pieces[0]) - self.prompt_tokens
        nll, error = mean_and_error([line["nll"] for line in lines])
        assert nll is not None
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
            **totals(lines, len(lines) * completion_tokens),
        )
