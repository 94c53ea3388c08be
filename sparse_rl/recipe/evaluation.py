"""The kinds that measure models and train none: eval (pass@1 over tasks), perplexity (of a text) and bench (time and
memory), over models × cache policies; and budgets (head budgets of a model)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Self

from rollout.config import EvalRolloutConfig, SamplingConfig
from rollout.context.config import BASE, RATIOS, PromptCacheConfig
from sparse_rl.config import (
    Configuration,
    Fraction,
    NonNegative,
    NonNegativeInt,
    PathText,
    Positive,
    PositiveInt,
    Probability,
    Source,
    Text,
    at_most,
    yaml_fields,
)
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.methods.config import FullConfig, PolicyConfig
from sparse_rl.recipe.run import Recipe, ToolsRecipe

# ---- sweeps ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Configuration):
    """Sweep: every model is evaluated under every policy, with every combination of the policy's swept parameters. An
    empty `model` or `policy` changes nothing.

    model : models, which replace the recipe's `model`
    policy : names, or mappings {policy: name, parameters of the policy}, which replace `cache.policy`
    cache : parameter -> its values, for example {budget: [512, 1024], alpha: [0, 0.8]}. A policy ignores parameters
        that it does not have, and parameters that its own mapping under `policy` sets
    """

    model: list[PathText] = field(default_factory=list)
    policy: list[Text | dict[str, Any]] = field(default_factory=list)
    cache: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, values in self.cache.items():
            if not values:
                raise UserError(f"name at least one value, or remove {key}", f"cache.{key}")


def _accepted(block: dict[str, Any], key: str) -> list[str]:
    """Return the parameter names of the policy that a block names. Raises UserError at `key` for an unknown policy."""
    try:
        return list(yaml_fields(PolicyConfig.member(block)))
    except UserError as error:
        raise UserError(str(error), key) from None


@dataclass(frozen=True, kw_only=True)
class SweptRecipe(Recipe):
    """Recipe that evaluates models under one cache policy, or under each policy of a sweep.

    cache : cache policy. In a sweep, the parameters in this block are defaults for each swept policy that has them, and
        `policy` may be left out. Without `cache` and `sweep`, the policy saved with the model is used, or else `full`
    """

    cache: Text | dict[str, Any] | None = None
    sweep: SweepConfig = field(default_factory=SweepConfig)
    rollout: EvalRolloutConfig = field(default_factory=EvalRolloutConfig)

    points: list[PolicyConfig | None] = field(default_factory=list, init=False, compare=False)
    """Cache policy of each point of the sweep; None is the policy saved with the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cache, str):
            object.__setattr__(self, "cache", {"policy": self.cache})
        object.__setattr__(self, "points", self.read_points())

    def caches(self) -> list[PolicyConfig | None]:
        return self.points

    def models(self) -> list[str]:
        return self.sweep.model or [self.model]

    def by_model(self) -> list[Self]:
        """Return one recipe for each model, in which no models are swept."""
        rest = replace(self.sweep, model=[])
        return [replace(self, model=model, sweep=rest) for model in self.models()]

    def with_models(self, directory_of: Callable[[str], str]) -> Self:
        swept = replace(self.sweep, model=list(map(directory_of, self.sweep.model)))
        return replace(super().with_models(directory_of), sweep=swept)

    def count_points(self) -> int:
        """Return the number of rows in the results."""
        return len(self.models()) * len(self.points)

    def read_points(self) -> list[PolicyConfig | None]:
        """Return the cache policy of every point of the sweep; [None] means the policy saved with the model.

        A parameter of the block `cache` is a default for each swept policy that has the parameter. Raises UserError for
        a parameter that no swept policy has.
        """
        sweep = self.sweep
        if not sweep.policy and not sweep.cache:
            if self.cache is None:
                return [None]
            return [PolicyConfig.from_block(self.cache, "cache", Source())]
        base = dict(self.cache) if isinstance(self.cache, dict) else {}
        own_policy = base.pop("policy", None)
        if own_policy is not None:
            _accepted({"policy": own_policy}, "cache")  # raises, even if it is not swept
        swept = sweep.policy or ([own_policy] if own_policy is not None else [])
        if not swept:
            raise UserError("name the swept policies too, under sweep.policy or cache.policy", "sweep.cache")
        points: list[PolicyConfig | None] = []
        users: dict[str, list[str]] = {key: [] for key in (*base, *sweep.cache)}  # parameter -> policies that use it
        blocks = [{"policy": entry} if isinstance(entry, str) else entry for entry in swept]
        for block in blocks:
            name: Any = block.get("policy")
            accepted = _accepted(block, "sweep.policy")
            for key in users:
                users[key] += [name] if key in accepted else []
            defaults = {key: value for key, value in base.items() if key in accepted}
            axes = {key: values for key, values in sweep.cache.items() if key in accepted and key not in block}
            for values in itertools.product(*axes.values()):
                try:
                    point = PolicyConfig.from_block({**defaults, **block, **dict(zip(axes, values, strict=True))})
                except UserError as error:
                    raise UserError(str(error), "sweep") from None
                if point not in points:
                    points.append(point)
        names = list(dict.fromkeys(block["policy"] for block in blocks))
        for key, policies in users.items():
            where = f"sweep.cache.{key}" if key in sweep.cache else f"cache.{key}"
            if not policies:
                raise UserError(f"none of the policies {', '.join(names)} has this parameter; remove {where}", where)
            others = [name for name in names if name not in policies and name != "full"]
            if others and key not in sweep.cache:
                self.warnings.append(f"{where} does not apply to {', '.join(others)}, which lack this parameter")
        return points


# ---- kind: eval ------------------------------------------------------------------------------------------------------


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
class TasksRecipe(Recipe):
    """Recipe that samples answers to the problems of tasks.

    tasks : names of tasks in recipes/tasks, such as [aime24, gsm8k]; or a mapping, name -> dataset. A dataset with the
        name of a task in recipes/tasks takes all keys that it does not set from that task
    temperature : sampling temperature; 0 takes the most likely token
    top_p : sampling is restricted to the smallest set of tokens with at least this total probability
    top_k : sampling is restricted to the top_k most likely tokens; null means all
    min_p : sampling is restricted to tokens with at least min_p times the probability of the most likely one
    max_completion_length : maximum number of tokens of a completion
    """

    tasks: dict[str, DataConfig]
    temperature: NonNegative = 0.6
    top_p: Fraction = 0.95
    top_k: PositiveInt | None = None
    min_p: Probability = 0.0
    max_completion_length: PositiveInt

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tasks:
            wrong = "name at least one task, for example tasks: [aime24], or tasks: {mine: {path: mine.jsonl}}"
            raise UserError(wrong, "tasks")

    def sampling(self, samples: int = 1) -> SamplingConfig:
        cut = self.top_p, self.top_k, self.min_p
        return SamplingConfig(self.max_completion_length, self.temperature, *cut, n=samples, seed=self.seed)

    def prompt_sources(self) -> dict[str, DataConfig]:
        return {f"tasks.{name}": data for name, data in self.tasks.items()}


@dataclass(frozen=True, kw_only=True)
class EvalRecipe(SweptRecipe, TasksRecipe, ToolsRecipe):
    """Evaluation of pass@1 over tasks × models × cache policies.

    samples : number of completions per problem
    accuracy : reward that decides whether an answer is correct; `environment` is what the environment's method
        get_reward returns
    further_accuracy : name -> further reward that decides whether an answer is correct, for the same completions
    forced_answer : answer forced on completions that come near the length limit; null means that these completions are
        truncated
    prompt_cache : settings for compacting each context once for all its questions: a block, or a list of blocks, each
        of which is evaluated. Nothing is evicted after a context has been compacted. null means that the context is
        part of each prompt
    max_tool_calling_iterations : maximum number of times that a conversation calls tools; null means any number
    tool_seconds : time limit of a call of a tool; a conversation with a late tool ends
    """

    kind: ClassVar[str] = "eval"
    wanting: ClassVar[str] = "is not evaluated; it needs kind: eval"
    samples: PositiveInt = 32
    max_completion_length: PositiveInt = 32768
    forced_answer: ForcedAnswerConfig | None = None
    accuracy: Text | dict[str, Any] = "math"
    further_accuracy: dict[str, Text | dict[str, Any]] = field(default_factory=dict)
    prompt_cache: list[PromptCacheSweep] | None = None
    max_tool_calling_iterations: PositiveInt | None = None
    tool_seconds: Annotated[Positive, at_most(86_400)] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_tools()
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
                wrong = f"nothing is evicted after a context that prompt_cache compacts; remove {key} or prompt_cache"
                raise UserError(wrong, key)
        self.refuse_without_context("prompt_cache compacts contexts")

    def _check_tools(self) -> None:
        if "environment" in self.accuracies().values() and self.environment is None:
            raise UserError("environment is the reward of an environment, but the recipe names none", "accuracy")
        if not self.uses_tools and self.max_tool_calling_iterations is not None:
            raise UserError("has no effect without tools or environment; remove it", "max_tool_calling_iterations")
        for key in ("prompt_cache", "forced_answer"):
            if self.uses_tools and getattr(self, key) is not None:
                raise UserError("is followed by one completion, not by turns; remove tools, or this key", key)

    def tool_limits(self) -> tuple[int | None, float]:
        return self.max_tool_calling_iterations, self.tool_seconds

    def evaluation(self, run: str) -> dict[str, Any]:
        return self.resolved()

    def prompt_caches(self) -> list[PromptCacheConfig]:
        points = [point for sweep in self.prompt_cache or [] for point in sweep.points()]
        return [point for place, point in enumerate(points) if point not in points[:place]]

    def count_points(self) -> int:
        return len(self.models()) * len(self.tasks) * len(self.prompt_caches() or self.points)

    def read_points(self) -> list[PolicyConfig | None]:
        return super().read_points() if self.prompt_cache is None else [FullConfig()]

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

    def accuracies(self) -> dict[str, str | dict[str, Any]]:
        """Return the rewards that decide whether a completion is correct, `accuracy` first: dotted key -> reward."""
        further = {f"further_accuracy.{name}": reward for name, reward in self.further_accuracy.items()}
        return {"accuracy": self.accuracy, **further}

    def sequences(self) -> int | None:
        problems = [data.synthetic.size if data.synthetic else data.limit for data in self.tasks.values()]
        sizes = [count for count in problems if count is not None]
        return max(sizes) * self.samples if len(sizes) == len(problems) else None


# ---- kind: perplexity ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PerplexityRecipe(SweptRecipe):
    """Perplexity of a text, decoded token by token, over models × cache policies.

    text : UTF-8 file, which is cut into pieces of prompt_tokens + completion_tokens tokens
    prompt_tokens : number of tokens of a piece that are prefilled with full attention and not counted
    completion_tokens : number of the following tokens of a piece, which are decoded under the cache
    pieces : maximum number of pieces, taken from the start of the text; null means all
    """

    kind: ClassVar[str] = "perplexity"
    wanting: ClassVar[str] = "has no text to decode; it needs kind: perplexity"
    completion_key: ClassVar[str] = "completion_tokens"
    text: PathText
    prompt_tokens: PositiveInt = 1024
    completion_tokens: PositiveInt = 1024
    pieces: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model_len()

    def sampling(self, samples: int = 1) -> SamplingConfig:
        return SamplingConfig(self.completion_tokens, n=samples, seed=self.seed)

    def prompt_bounds(self) -> list[int | None]:
        return [self.prompt_tokens]

    def sequences(self) -> int | None:
        return self.pieces


# ---- kind: bench -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TimedContextsConfig(Configuration):
    """Compactions of a context, timed by stage with the hf engine.

    length : numbers of tokens in the context
    compactions : settings of the compactions; each ratio of a list is timed
    """

    length: list[PositiveInt]
    compactions: list[PromptCacheSweep]

    def points(self) -> list[PromptCacheConfig]:
        points = [point for sweep in self.compactions for point in sweep.points()]
        return [point for place, point in enumerate(points) if point not in points[:place]]


@dataclass(frozen=True, kw_only=True)
class BenchRecipe(SweptRecipe):
    """Time and memory of sampling over cache policies × batch sizes × lengths, and of compactions of contexts.

    The prompts are random tokens, and sampling does not stop at an end-of-sequence token. A full cache is always timed
    too. `rollout.max_batch` is always the greatest number in `batch`.

    random_weights : time a model with random weights; then only the model's configuration is needed
    shape : keys of the model's configuration that are replaced, such as num_hidden_layers; only with random_weights
    batch : numbers of sequences that are sampled at the same time
    prompt_tokens : number of tokens in each prompt
    length : numbers of tokens of a sequence, prompt and completion. Sampling goes on to the greatest one, and time and
        memory are measured at each. If empty, sampling is not timed
    parts : also time the parts of a decode step in every layer (hf engine only). On a GPU this makes sampling slower
    contexts : compactions of contexts to time; null means none
    repetitions : number of runs of each point, one after the other; medians are reported
    """

    kind: ClassVar[str] = "bench"
    wanting: ClassVar[str] = "cannot be timed; it needs kind: bench"
    completion_key: ClassVar[str] = "length"
    random_weights: bool = False
    shape: dict[str, Any] = field(default_factory=dict)
    batch: list[PositiveInt] = field(default_factory=lambda: [1, 8])
    prompt_tokens: PositiveInt = 128
    length: list[PositiveInt] = field(default_factory=lambda: [1024])
    parts: bool = False
    contexts: TimedContextsConfig | None = None
    repetitions: PositiveInt = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.length and self.contexts is None:
            raise UserError("name at least one length, or set contexts", "length")
        for length in self.length:
            if length <= self.prompt_tokens:
                wrong = f"{length} leaves no token to sample after a prompt of {self.prompt_tokens} tokens; raise it"
                raise UserError(wrong, "length")
        if not self.batch:
            raise UserError("name at least one batch size", "batch")
        contexts = [] if self.contexts is None else self.contexts.length
        for key, values in (("batch", self.batch), ("length", self.length), ("contexts.length", contexts)):
            if len({*values}) < len(values):
                raise UserError("a number is named twice; remove one", key)
        if self.shape and not self.random_weights:
            raise UserError("only a model with random weights can have another shape; set random_weights", "shape")
        object.__setattr__(self, "rollout", replace(self.rollout, max_batch=max(self.batch)))
        if self.length:
            self.check_model_len()

    def read_points(self) -> list[PolicyConfig | None]:
        full = FullConfig()
        points = [point for point in super().read_points() if point is not None or not self.random_weights]
        return [full, *(point for point in points if point != full)]

    def timed_contexts(self) -> list[tuple[int, PromptCacheConfig]]:
        """Return (tokens of the context, compaction) for each compaction to time."""
        if self.contexts is None:
            return []
        return [(tokens, compaction) for tokens in self.contexts.length for compaction in self.contexts.points()]

    def load_shape(self) -> Any:
        from sparse_rl.models.random_weights import changed_config

        config = super().load_shape()
        return changed_config(config, self.shape, "shape") if self.shape else config

    def sampling(self, samples: int = 1) -> SamplingConfig:
        tokens = max(self.length, default=self.prompt_tokens + 1) - self.prompt_tokens
        return SamplingConfig(tokens, n=samples, seed=self.seed, ignore_eos=True)

    def prompt_bounds(self) -> list[int | None]:
        return [self.prompt_tokens]

    def sequences(self) -> int | None:
        return max(self.batch)


# ---- kind: budgets ---------------------------------------------------------------------------------------------------


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
class BudgetsRecipe(TasksRecipe):
    """Head budgets: shares of the kept entries for each kv head, from the model's loss when a single head keeps more or
    fewer entries (Attention Matching, section 3.4). The loss is the negative log-likelihood per token of answers that
    the model has sampled with the full cache. The engine is always hf.

    tasks : as in recipes of kind eval; each dataset needs a column of contexts
    prompt_cache : settings of the compactions
    contexts : number of contexts, the first ones of the tasks
    questions : maximum number of questions about a context, the first ones; null means all
    ratios : ratios of its entries that the varied head keeps; at 0 it keeps one entry
    base : ratio that all other heads keep, for which the budgets are computed
    global_ratios : ratios at which the keys of all heads compete by their attention, for comparison with the budgets
    """

    kind: ClassVar[str] = "budgets"
    wanting: ClassVar[str] = "measures no head budgets; it needs kind: budgets"
    prompt_cache: MeasuredCacheConfig = field(default_factory=MeasuredCacheConfig)
    contexts: PositiveInt = 10
    questions: PositiveInt | None = None
    ratios: list[Probability] = field(default_factory=lambda: list(RATIOS))
    base: Fraction = BASE
    global_ratios: list[Fraction] = field(default_factory=lambda: [0.01, 0.02, 0.05, 0.1, 0.2])
    max_completion_length: PositiveInt = 512
    rollout: EvalRolloutConfig = field(default_factory=EvalRolloutConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_without_context("head budgets are measured on contexts")
        if self.rollout.engine not in ("auto", "hf"):
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

    def sequences(self) -> int | None:
        return self.questions
