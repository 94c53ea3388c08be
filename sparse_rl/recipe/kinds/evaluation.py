"""kind: eval, pass@1 over tasks × policies × budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from rollout.config import SamplingConfig
from rollout.context.config import PromptCacheConfig
from sparse_rl.config import Configuration, Fraction, NonNegative, NonNegativeInt, PositiveInt, Text
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import FullConfig, PolicyConfig
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
class PromptCacheSweep(PromptCacheConfig):
    """How contexts are compacted once, before all their questions are asked.

    ratio : of the tokens of the context's text that stay; each of several is evaluated
    first, last : further tokens at the beginning and end of the context's text that stay as they are; what the chat
        template puts in front of it always does
    """

    ratio: list[Fraction] = field(default_factory=lambda: [0.1])  # type: ignore[assignment]  # several of the one
    first: NonNegativeInt = 0

    def points(self) -> list[PromptCacheConfig]:
        """The settings of each ratio; a policy that chooses nothing has none."""
        ratios = self.ratio if self.chooses else self.ratio[:1]
        same = {f.name: getattr(self, f.name) for f in fields(PromptCacheConfig) if f.name != "ratio"}
        return [PromptCacheConfig(**same, ratio=ratio) for ratio in ratios]


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
    wanting: ClassVar[str] = "is not evaluated; it needs kind: eval"
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
        self.check_model_len()
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

    def evaluation(self, run: str) -> dict[str, Any]:
        return self.resolved()

    def prompt_caches(self) -> list[PromptCacheConfig]:
        points = [point for sweep in self.prompt_cache or [] for point in sweep.points()]
        return [point for place, point in enumerate(points) if point not in points[:place]]

    def read_points(self) -> list[PolicyConfig | None]:
        return super().read_points() if self.prompt_cache is None else [FullConfig()]

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
