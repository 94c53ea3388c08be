"""kind: eval, pass@1 over tasks × models × cache policies."""

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
from sparse_rl.recipe.kinds.swept import SweptRecipe


@dataclass(frozen=True, kw_only=True)
class ForcedAnswerConfig(Configuration):
    """Forced answers near the length limit: if a completion has not ended when only `text` and `tokens` further tokens
    still fit into max_completion_length, the completion continues with `text`, even if its answer has already begun.
    The column `forced` of the results counts such completions.

    text : text that ends the thinking and begins the answer
    tokens : number of tokens reserved for the answer after the text
    """

    text: Text
    tokens: PositiveInt = 64


@dataclass(frozen=True, kw_only=True)
class PromptCacheSweep(PromptCacheConfig):
    """Settings for compacting each context once, before its questions are asked.

    ratio : fraction of the tokens of the context's text that is kept; each value of a list is evaluated
    first, last : number of further tokens kept unchanged at the start and at the end of the context's text; tokens that
        the chat template puts before the text are always kept
    """

    ratio: list[Fraction] = field(default_factory=lambda: [0.1])  # type: ignore[assignment]  # a list
    first: NonNegativeInt = 0

    def points(self) -> list[PromptCacheConfig]:
        """Return one configuration for each ratio; `full` and `none` use only the first ratio."""
        ratios = self.ratio if self.sized else self.ratio[:1]
        same = {f.name: getattr(self, f.name) for f in fields(PromptCacheConfig) if f.name != "ratio"}
        return [PromptCacheConfig(**same, ratio=ratio) for ratio in ratios]


@dataclass(frozen=True, kw_only=True)
class EvalRecipe(SweptRecipe):
    """Evaluation of pass@1 over tasks × models × cache policies.

    tasks : names of tasks in recipes/tasks, such as [aime24, gsm8k]; or a mapping, name -> dataset. A dataset with the
        name of a task in recipes/tasks takes all keys that it does not set from that task
    samples : number of completions per problem
    temperature : sampling temperature; 0 takes the most likely token
    top_p : sampling is restricted to the smallest set of tokens with at least this total probability
    top_k : sampling is restricted to the top_k most likely tokens; null means all
    max_completion_length : maximum number of tokens of a completion
    accuracy : reward that decides whether an answer is correct
    further_accuracy : name -> further reward that decides whether an answer is correct, for the same completions
    forced_answer : answer forced on completions that come near the length limit; null means that these completions are
        truncated
    prompt_cache : settings for compacting each context once for all its questions: a block, or a list of blocks, each
        of which is evaluated. Nothing is evicted after a context has been compacted. null means that the context is
        part of each prompt
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
            raise UserError(
                "name at least one task, for example tasks: [aime24], or tasks: {mine: {path: mine.jsonl}}", "tasks"
            )
        self._check_prompt_cache()
        self.check_model_len()
        if self.temperature == 0 and self.samples > 1:
            self.warnings.append(f"temperature 0 gives {self.samples} equal samples per problem; use samples: 1")

    def _check_prompt_cache(self) -> None:
        if self.prompt_cache is None:
            return
        if not self.prompt_caches():
            raise UserError("name at least one ratio, as in {policy: am, ratio: 0.05}, or set null", "prompt_cache")
        for key, is_set in (("cache", self.cache is not None), ("sweep", bool(self.sweep.policy or self.sweep.cache))):
            if is_set:
                raise UserError(
                    f"nothing is evicted after a context that prompt_cache compacts; remove {key} or prompt_cache", key
                )
        for name, data in self.tasks.items():
            if not data.has_context:
                wrong = "prompt_cache compacts contexts; say which column holds them, as in columns: {context: article}"
                raise UserError(wrong, f"tasks.{name}.columns")

    def evaluation(self, run: str) -> dict[str, Any]:
        return self.resolved()

    def prompt_caches(self) -> list[PromptCacheConfig]:
        points = [point for sweep in self.prompt_cache or [] for point in sweep.points()]
        return [point for place, point in enumerate(points) if point not in points[:place]]

    def count_points(self) -> int:
        return len(self.models()) * len(self.tasks) * len(self.prompt_caches() or self.points)

    def read_points(self) -> list[PolicyConfig | None]:
        return super().read_points() if self.prompt_cache is None else [FullConfig()]

    def sampling(self, samples: int = 1) -> SamplingConfig:
        return SamplingConfig(
            self.max_completion_length, self.temperature, self.top_p, self.top_k, n=samples, seed=self.seed
        )

    def forcing(self, encode: Callable[[str], list[int]]) -> dict[str, Any]:
        """Return the fields of `SamplingConfig` for a forced answer, if any; `encode` must add no special tokens."""
        if self.forced_answer is None:
            return {}
        forced = encode(self.forced_answer.text)
        start = self.max_completion_length - self.forced_answer.tokens - len(forced)
        if start < 1:
            parts = f"the text and the {self.forced_answer.tokens} tokens after it fill max_completion_length"
            raise UserError(f"{parts} ({self.max_completion_length}); lower forced_answer.tokens", "forced_answer")
        return {"forced": tuple(forced), "forced_from": start}

    def prompt_sources(self) -> dict[str, DataConfig]:
        return {f"tasks.{name}": data for name, data in self.tasks.items()}

    def accuracies(self) -> dict[str, str | dict[str, Any]]:
        """Return the rewards that decide whether a completion is correct, `accuracy` first: dotted key -> reward."""
        further = {f"further_accuracy.{name}": reward for name, reward in self.further_accuracy.items()}
        return {"accuracy": self.accuracy, **further}

    def sequences(self) -> int | None:
        problems = [data.synthetic.size if data.synthetic else data.limit for data in self.tasks.values()]
        sizes = [count for count in problems if count is not None]
        return max(sizes) * self.samples if len(sizes) == len(problems) else None
