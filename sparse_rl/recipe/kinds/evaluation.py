"""kind: eval, pass@1 over tasks × policies × budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollout.config import SamplingConfig
from rollout.context.config import PromptCacheConfig
from sparse_rl.config import Configuration, Fraction, NonNegative, PositiveInt, Text
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import FullConfig, PolicyConfig
from sparse_rl.recipe.kinds.base import SampledProblems
from sparse_rl.recipe.kinds.caches import check_model_len
from sparse_rl.recipe.kinds.prompt_caches import PromptCacheSweep, all_points
from sparse_rl.recipe.kinds.swept import SweepConfig, SweptRecipe


@dataclass(frozen=True, kw_only=True)
class ForcedAnswerConfig(Configuration):
    """An answer at the limit: a completion that has not ended when text and tokens are all that is left of
    max_completion_length goes on with the text, also where its answer has begun. `forced` of a row: how many did.

    text : ends the thinking, and begins the answer
    tokens : left for the answer behind it
    """

    text: Text
    tokens: PositiveInt = 64


@dataclass(frozen=True, kw_only=True)
class EvalRecipe(SweptRecipe):
    """pass@1 over tasks × policies × budgets.

    samples : of each problem
    temperature : of sampling; 0 takes the most likely token
    top_p : the smallest set of tokens with at least this probability is sampled from
    top_k : the so many most likely tokens are sampled from; null: all
    max_completion_length : tokens of a completion, at most
    accuracy : the reward that says whether an answer is right
    further_accuracy : name -> another such reward, by which the same completions are judged too
    forced_answer : what is forced upon completions that come near the limit; null: they are cut off
    prompt_cache : how the contexts of the problems are compacted, once for all questions about one; a block, or
        several, each of which is evaluated. Behind a context nothing is evicted. null: it is a part of each prompt
    """

    kind: ClassVar[str] = "eval"
    tasks: dict[str, DataConfig]
    samples: PositiveInt = 32
    temperature: NonNegative = 0.6
    top_p: Fraction = 0.95
    top_k: PositiveInt | None = None
    max_completion_length: PositiveInt = 32768
    forced_answer: ForcedAnswerConfig | None = None
    accuracy: Text | dict[str, Any] = "math"
    further_accuracy: dict[str, Text | dict[str, Any]] = field(default_factory=dict)
    prompt_cache: list[PromptCacheSweep] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks:
            raise UserError("name at least one, for example tasks: {aime24: {path: aime24.jsonl}}", "tasks")
        self._check_prompt_cache()
        check_model_len(self.rollout, self.prompt_bounds(), self.max_completion_length)
        if self.temperature == 0 and self.samples > 1:
            self.warnings.append(
                f"temperature 0 gives {self.samples} equal samples per problem; samples: 1 says as much"
            )

    def _check_prompt_cache(self) -> None:
        if self.prompt_cache is None:
            return
        if not self.prompt_caches():
            raise UserError("name at least one, for example {policy: am, ratio: 0.05}, or remove this", "prompt_cache")
        for key, given in (("cache", self.cache is not None), ("sweep", self.sweep != SweepConfig())):
            if given:
                raise UserError("nothing is evicted behind a context that prompt_cache compacts; remove one", key)
        for name, data in self.tasks.items():
            if not data.has_context:
                wrong = "prompt_cache compacts contexts; say which column holds them, as in columns: {context: article}"
                raise UserError(wrong, f"tasks.{name}.columns")

    def as_evaluation(self) -> EvalRecipe:
        return self

    def evaluation(self, run: str) -> dict[str, Any]:
        return self.resolved()

    def prompt_caches(self) -> list[PromptCacheConfig]:
        return all_points(self.prompt_cache or [])

    def caches(self) -> list[PolicyConfig | None]:
        return super().caches() if self.prompt_cache is None else [FullConfig()]

    def sampling(self, samples: int = 1) -> SamplingConfig:
        return SamplingConfig(
            self.max_completion_length, self.temperature, self.top_p, self.top_k, n=samples, seed=self.seed
        )

    def forcing(self, encode: Callable[[str], list[int]]) -> dict[str, Any]:
        """What `SamplingConfig` has to say of a forced answer. encode : a text's tokens, without special ones"""
        if self.forced_answer is None:
            return {}
        forced = encode(self.forced_answer.text)
        start = self.max_completion_length - self.forced_answer.tokens - len(forced)
        if start < 1:
            taken = f"its text has {len(forced)} tokens, with {self.forced_answer.tokens} behind it"
            raise UserError(f"{taken}: nothing is left of {self.max_completion_length}; lower tokens", "forced_answer")
        return {"forced": tuple(forced), "forced_from": start}

    def prompt_sources(self) -> dict[str, DataConfig]:
        return {f"tasks.{name}": data for name, data in self.tasks.items()}

    def accuracies(self) -> dict[str, str | dict[str, Any]]:
        """The rewards that completions are judged by, the one of `accuracy` first: dotted key -> reward."""
        further = {f"further_accuracy.{name}": reward for name, reward in self.further_accuracy.items()}
        return {"accuracy": self.accuracy, **further}

    def sequences(self) -> int | None:
        problems = [data.synthetic.size if data.synthetic else data.limit for data in self.tasks.values()]
        known = [count for count in problems if count is not None]
        return max(known) * self.samples if len(known) == len(problems) else None

    def sampled_problems(self) -> SampledProblems:
        where, data = next(iter(self.prompt_sources().items()))
        return SampledProblems(data, where, self.samples)
