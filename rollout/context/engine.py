"""An engine for training after compacted contexts.

A call compacts each context of its prompts once, with the engine's weights at that time, and continues it with all of
the context's prompts, before it reads the next context. So one context is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy
from sparse_rl.trace import EvictionTrace


class CompactingEngine(HFEngine):
    """The engine hf, which also continues prompts that are split after their contexts, and compacts these contexts.

    prompt_cache : settings of the compactions; `first` does not count the tokens before a context's text
    about : prompts about a context, for reference queries of the kinds repeat, self_study and question

    It takes the other parameters of HFEngine, too.
    """

    def __init__(
        self, model: Any, policy: Policy, *, prompt_cache: PromptCacheConfig, about: ContextPrompts, **options: Any
    ) -> None:
        super().__init__(model, policy, **options)
        self.prompt_cache, self.about = prompt_cache, about

    def continued(self, prompts: Sequence[SplitPrompt], sampling: SamplingConfig) -> list[Rollout]:
        """Sample as `generate` does. Equal questions about different contexts get different random numbers."""
        rollouts: list[Any] = [None] * (len(prompts) * sampling.n)
        for places, context in self._contexts(prompts):
            seed = None if sampling.seed is None else sequence_seed(sampling.seed, context.tokens, 0)
            try:
                some = self.generate([prompts[place].rest for place in places], replace(sampling, seed=seed), context)
            except NotFiniteLogprobError as error:
                raise error.of_prompt(places[error.prompt]) from error
            for number, rollout in enumerate(some):
                rollouts[places[number // sampling.n] * sampling.n + number % sampling.n] = rollout
        return rollouts

    def converse(self, *_: Any, **__: Any) -> Any:
        raise UserError("a conversation of several turns cannot follow a compacted context; remove one of the two")

    def traces(self, prompts: Sequence[SplitPrompt], lengths: Sequence[int]) -> list[EvictionTrace]:
        """Return the traces that `simulate` records for prompts with given completions, together `lengths` tokens.
        Nothing is evicted after a context, so nothing is decoded.
        """
        traces: list[Any] = [None] * len(prompts)
        for places, context in self._contexts(prompts):
            cache = self._cache(context)
            for place in places:
                traces[place] = cache.trace(0, lengths[place])
        return traces

    def _contexts(self, prompts: Sequence[SplitPrompt]) -> Iterator[tuple[list[int], Context]]:
        for item in compacted_contexts(self, Questions(prompts, self.about), [self.prompt_cache]):
            yield item.problems, item.context
