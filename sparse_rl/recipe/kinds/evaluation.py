"""kind: eval, pass@1 over tasks × policies × budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from rollout.config import EvalRolloutConfig, RolloutConfig, SamplingConfig
from sparse_rl.config import Configuration, Fraction, NonNegative, PositiveInt, Source, Text
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError
from sparse_rl.policies.config import CONFIGS, PolicyConfig, accepted_parameters
from sparse_rl.recipe.kinds.base import Recipe, SampledProblems
from sparse_rl.recipe.kinds.caches import check_model_len


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Configuration):
    """Evaluate every policy at every budget; an empty list keeps what the cache block says.

    policy : names, or {policy: name, its parameters}; one with a budget of its own is evaluated at that one alone
    """

    policy: list[Text | dict[str, Any]] = field(default_factory=list)
    budget: list[PositiveInt] = field(default_factory=list)


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
class EvalRecipe(Recipe):
    """pass@1 over tasks × policies × budgets.

    samples : of each problem
    accuracy : the reward that says whether an answer is right
    forced_answer : what is forced upon completions that come near the limit; null: they are cut off
    cache : the policy, and the base parameters of a sweep; without it the model's own cache_policy.json, if any
    """

    kind: ClassVar[str] = "eval"
    tasks: dict[str, DataConfig]
    samples: PositiveInt = 32
    temperature: NonNegative = 0.6
    top_p: Fraction = 0.95
    top_k: PositiveInt | None = None
    max_completion_length: PositiveInt = 32768
    forced_answer: ForcedAnswerConfig | None = None
    cache: Text | dict[str, Any] | None = None
    sweep: SweepConfig = field(default_factory=SweepConfig)
    accuracy: Text | dict[str, Any] = "math"
    rollout: EvalRolloutConfig = field(default_factory=EvalRolloutConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cache, str):
            object.__setattr__(self, "cache", {"policy": self.cache})
        if not self.tasks:
            raise UserError("name at least one, for example tasks: {aime24: {path: aime24.jsonl}}", "tasks")
        self.caches()
        check_model_len(self.rollout, self.prompt_sources(), self.max_completion_length)
        if self.temperature == 0 and self.samples > 1:
            self.warnings.append(
                f"temperature 0 gives {self.samples} equal samples per problem; samples: 1 says as much"
            )

    def as_evaluation(self) -> EvalRecipe:
        return self

    def evaluation(self, run: str) -> dict[str, Any]:
        return self.resolved()

    def engine_config(self) -> RolloutConfig | None:
        return self.rollout

    def with_engine_config(self, rollout: RolloutConfig) -> Self:
        return dataclasses.replace(self, rollout=rollout)  # type: ignore[arg-type]  # changed from its own

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

    def sampled_problems(self) -> SampledProblems:
        where, data = next(iter(self.prompt_sources().items()))
        return SampledProblems(data, where, self.samples)

    def caches(self) -> list[PolicyConfig | None]:
        """The cache of every point of the sweep; [None] leaves it to the model's directory.

        A parameter of the cache block goes to each swept policy that has it and does not say it itself; one that none
        of them has is an error.
        """
        if not self.sweep.policy and not self.sweep.budget:
            if self.cache is None:
                return [None]
            return [PolicyConfig.from_block(self.cache, "cache", Source())]
        base = dict(self.cache) if isinstance(self.cache, dict) else {}
        own = base.pop("policy", None)
        if own is not None and own not in list(CONFIGS):
            PolicyConfig.from_block({"policy": own}, "cache", Source())  # refused, though the sweep may name its own
        swept = self.sweep.policy or ([own] if own is not None else [])
        if not swept:
            raise UserError("name the policies too, here or as cache.policy", "sweep.budget")
        points: list[PolicyConfig | None] = []
        used: set[str] = set()
        blocks = [{"policy": entry} if isinstance(entry, str) else entry for entry in swept]
        for block in blocks:
            name: Any = block.get("policy")
            known = name in list(CONFIGS)
            accepted = accepted_parameters(name) if known else []
            mine = {key: value for key, value in base.items() if key in accepted}
            used |= mine.keys()
            sweeps_budget = self.sweep.budget and "budget" in accepted and "budget" not in block
            for size in [{"budget": budget} for budget in self.sweep.budget] if sweeps_budget else [{}]:
                try:
                    point = PolicyConfig.from_block({**mine, **block, **size})
                except UserError as error:
                    raise UserError(str(error), "sweep" if known else "sweep.policy") from None
                if point not in points:
                    points.append(point)
        for key in base:
            if key not in used and key != "budget":
                names = ", ".join(block["policy"] for block in blocks)
                raise UserError(f"none of the policies {names} has this parameter; remove it", f"cache.{key}")
        return points
