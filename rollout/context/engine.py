"""An engine for training after compacted contexts.

A call compacts each context of its prompts once, with the engine's weights at that time, and continues it with all of
the context's prompts, before it reads the next context. So one context is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollout.config import SamplingConfig
from rollout.context import Context, PromptCacheConfig
from rollout.context.reader import ContextPrompts
from rollout.engine import Rollout
from rollout.hf import HFEngine
from rollout.measure.contexts import Questions, compacted_contexts
from rollout.sampling import NotFiniteLogprobError, sequence_seed
from sparse_rl.data.tokens import SplitPrompt
from sparse_rl.policies.base import Policy

Prompts = Sequence[Sequence[int]] | Sequence[SplitPrompt]


class CompactingEngine(HFEngine):
    """The engine hf, whose prompts may also be given as SplitPrompt. Their contexts are then compacted.

    prompt_cache : settings of the compactions; `first` does not count the tokens before a context's text
    about : prompts about a context, for reference queries of the kinds repeat, self_study and question

    It takes the other parameters of HFEngine, too.
    """

    def __init__(
        self, model: Any, policy: Policy, *, prompt_cache: PromptCacheConfig, about: ContextPrompts, **options: Any
    ) -> None:
        super().__init__(model, policy, **options)
        self.prompt_cache, self.about = prompt_cache, about

    def generate(self, prompts: Prompts, sampling: SamplingConfig, context: Context | None = None) -> list[Rollout]:
        """Sample as `Engine.generate`. Equal questions about different contexts get different random numbers."""

        def sample(some: Sequence[Sequence[int]], places: list[int], context: Context | None) -> list[Rollout]:
            own = sampling
            if context is not None and places and sampling.seed is not None:
                own = replace(sampling, seed=sequence_seed(sampling.seed, context.tokens, 0))
            return HFEngine.generate(self, some, own, context)

        return self._continued(prompts, context, sample, sampling.n)

    def simulate(
        self,
        prompts: Prompts,
        completions: Sequence[Sequence[int]],
        temperature: float = 1.0,
        context: Context | None = None,
    ) -> list[Rollout]:
        def decode(some: Sequence[Sequence[int]], places: list[int], context: Context | None) -> list[Rollout]:
            own = [completions[place] for place in places] if places else completions
            return HFEngine.simulate(self, some, own, temperature, context)

        return self._continued(prompts, context, decode)

    def _continued(
        self, prompts: Any, context: Context | None, run: Callable[..., list[Rollout]], samples: int = 1
    ) -> list[Rollout]:
        """Return the rollouts of run(token ids, indices of the prompts, context), called once for each context."""
        if not any(isinstance(prompt, SplitPrompt) for prompt in prompts):
            return run(prompts, [], context)
        rollouts: list[Any] = [None] * (len(prompts) * samples)
        for item in compacted_contexts(self, Questions(prompts, self.about), [self.prompt_cache]):
            places = item.problems
            try:
                continued = run([prompts[place].rest for place in places], places, item.context)
            except NotFiniteLogprobError as error:
                raise error.of_prompt(places[error.prompt]) from error
            for number, rollout in enumerate(continued):
                rollouts[places[number // samples] * samples + number % samples] = rollout
        return rollouts
