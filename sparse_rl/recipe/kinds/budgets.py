"""kind: budgets, head budgets of a model, from the sensitivity curves of its kv heads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from rollout.config import EvalRolloutConfig, SamplingConfig
from rollout.context.config import BASE, RATIOS, PromptCacheConfig
from sparse_rl.config import Fraction, NonNegative, NonNegativeInt, PositiveInt, Probability
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import FullConfig, PolicyConfig
from sparse_rl.recipe.kinds.base import Recipe

# Settings that do not apply, because heads are compacted alone.
UNUSED = ("ratio", "heads", "budgets", "on_policy", "chunking", "summary")


@dataclass(frozen=True, kw_only=True)
class MeasuredCacheConfig(PromptCacheConfig):
    """Settings of the compactions. `ratio`, `heads`, `budgets`, `on_policy`, `chunking` and `summary` keep their
    default values.

    first, last : number of further tokens kept unchanged at the start and at the end of the context's text; tokens that
        the chat template puts before the text are always kept
    """

    first: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.chooses:
            raise UserError(f"{self.policy} selects no entries, so it has no head budgets; use am or evict", "policy")
        for name in UNUSED:
            if getattr(self, name) != getattr(PromptCacheConfig(), name):
                raise UserError("does not apply to a measurement of head budgets; remove it", name)

    def config(self) -> PromptCacheConfig:
        """Return the same settings as a plain configuration."""
        return PromptCacheConfig(**{f.name: getattr(self, f.name) for f in fields(PromptCacheConfig)})


@dataclass(frozen=True, kw_only=True)
class BudgetsRecipe(Recipe):
    """Head budgets: shares of the kept entries for each kv head, from the model's loss when a single head keeps more or
    fewer entries (Attention Matching, section 3.4). The loss is the negative log-likelihood per token of answers that
    the model has sampled with the full cache. The engine is always hf.

    tasks : names of tasks in recipes/tasks, or a mapping, name -> dataset, as in recipes of kind eval. Each dataset
        needs a column of contexts
    prompt_cache : settings of the compactions
    contexts : number of contexts, the first ones of the tasks
    questions : maximum number of questions about a context, the first ones; null means all
    ratios : ratios of its entries that the varied head keeps; at 0 it keeps one entry
    base : ratio that all other heads keep, for which the budgets are computed
    global_ratios : ratios at which the keys of all heads compete by their attention, for comparison with the budgets
    temperature, top_p, top_k, max_completion_length : sampling of the answers, as in recipes of kind eval
    """

    kind: ClassVar[str] = "budgets"
    wanting: ClassVar[str] = "measures no head budgets; it needs kind: budgets"
    tasks: dict[str, DataConfig]
    prompt_cache: MeasuredCacheConfig = field(default_factory=MeasuredCacheConfig)
    contexts: PositiveInt = 10
    questions: PositiveInt | None = None
    ratios: list[Probability] = field(default_factory=lambda: list(RATIOS))
    base: Fraction = BASE
    global_ratios: list[Fraction] = field(default_factory=lambda: [0.01, 0.02, 0.05, 0.1, 0.2])
    temperature: NonNegative = 0.6
    top_p: Fraction = 0.95
    top_k: PositiveInt | None = None
    max_completion_length: PositiveInt = 512
    rollout: EvalRolloutConfig = field(default_factory=EvalRolloutConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks:
            raise UserError("name at least one task, for example tasks: {mine: {path: mine.jsonl}}", "tasks")
        for name, data in self.tasks.items():
            if not data.has_context:
                wrong = (
                    "head budgets are measured on contexts; say which column holds them, as in columns: {context: text}"
                )
                raise UserError(wrong, f"tasks.{name}.columns")
        if self.rollout.engine == "vllm":
            raise UserError("head budgets are measured with the engine hf; use hf", "rollout.engine")
        object.__setattr__(self, "rollout", replace(self.rollout, engine="hf"))
        for key, ratios in (("ratios", self.ratios), ("global_ratios", self.global_ratios)):
            if not ratios or sorted(set(ratios)) != ratios:
                raise UserError("name ratios in increasing order, at least one of them", key)
        if len(self.ratios) < 2 or not self.ratios[0] <= self.base <= self.ratios[-1]:
            raise UserError(f"name at least two ratios, from at most base ({self.base:g}) to at least base", "ratios")
        self.check_model_len()

    def caches(self) -> list[PolicyConfig | None]:
        return [FullConfig()]

    def prompt_caches(self) -> list[PromptCacheConfig]:
        return [self.prompt_cache.config()]

    def sampling(self, samples: int = 1) -> SamplingConfig:
        return SamplingConfig(
            self.max_completion_length, self.temperature, self.top_p, self.top_k, n=samples, seed=self.seed
        )

    def prompt_sources(self) -> dict[str, DataConfig]:
        return {f"tasks.{name}": data for name, data in self.tasks.items()}

    def sequences(self) -> int | None:
        """Return the maximum number of questions that are answered together; None if unknown."""
        return self.questions
