"""Base of the recipes that evaluate under one cache policy, or under each of a sweep of policies and budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout.config import EvalRolloutConfig
from sparse_rl.config import Configuration, PositiveInt, Source, Text
from sparse_rl.errors import UserError
from sparse_rl.methods.config import CONFIGS, PolicyConfig, accepted_parameters
from sparse_rl.recipe.kinds.base import Recipe


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Configuration):
    """Sweep that evaluates every policy at every budget; an empty list keeps the value of the cache block.

    policy : names, or mappings {policy: name, parameters of the policy}; a policy whose mapping sets a budget
        is evaluated only at that budget
    budget : budgets at which each policy is evaluated
    """

    policy: list[Text | dict[str, Any]] = field(default_factory=list)
    budget: list[PositiveInt] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SweptRecipe(Recipe):
    """Recipe that is evaluated under one cache policy, or under each policy and budget of a sweep.

    cache : cache policy. In a sweep, the parameters in this block are defaults for each swept policy that has them, and
        `policy` may be left out. Without cache and sweep, the cache_policy.json saved with the model is used, if any
    """

    cache: Text | dict[str, Any] | None = None
    sweep: SweepConfig = field(default_factory=SweepConfig)
    rollout: EvalRolloutConfig = field(default_factory=EvalRolloutConfig)

    points: list[PolicyConfig | None] = field(default_factory=list, init=False, compare=False)
    """Cache policy of each point of the sweep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cache, str):
            object.__setattr__(self, "cache", {"policy": self.cache})
        object.__setattr__(self, "points", self.read_points())

    def sequences(self) -> int | None:
        """Return the maximum number of sequences that one task has under one cache policy; None if unknown."""
        raise NotImplementedError

    def caches(self) -> list[PolicyConfig | None]:
        return self.points

    def read_points(self) -> list[PolicyConfig | None]:
        """Return the cache policy of every point of the sweep; [None] means the policy saved with the model.

        A parameter of the cache block is a default for each swept policy that has the parameter. Raises UserError for a
        parameter that no swept policy has.
        """
        if not self.sweep.policy and not self.sweep.budget:
            if self.cache is None:
                return [None]
            return [PolicyConfig.from_block(self.cache, "cache", Source())]
        base = dict(self.cache) if isinstance(self.cache, dict) else {}
        own_policy = base.pop("policy", None)
        if own_policy is not None and own_policy not in list(CONFIGS):
            PolicyConfig.from_block(
                {"policy": own_policy}, "cache", Source()
            )  # raises, even if the sweep names other policies
        swept = self.sweep.policy or ([own_policy] if own_policy is not None else [])
        if not swept:
            raise UserError("name the policies too, as sweep.policy or cache.policy", "sweep.budget")
        points: list[PolicyConfig | None] = []
        used: set[str] = set()
        blocks = [{"policy": entry} if isinstance(entry, str) else entry for entry in swept]
        for block in blocks:
            name: Any = block.get("policy")
            is_policy = name in list(CONFIGS)
            accepted = accepted_parameters(name) if is_policy else []
            defaults = {key: value for key, value in base.items() if key in accepted}
            used |= defaults.keys()
            sweeps_budget = self.sweep.budget and "budget" in accepted and "budget" not in block
            for size in [{"budget": budget} for budget in self.sweep.budget] if sweeps_budget else [{}]:
                try:
                    point = PolicyConfig.from_block({**defaults, **block, **size})
                except UserError as error:
                    raise UserError(str(error), "sweep" if is_policy else "sweep.policy") from None
                if point not in points:
                    points.append(point)
        for key in base:
            if key not in used and key != "budget":
                names = ", ".join(block["policy"] for block in blocks)
                raise UserError(f"none of the policies {names} has this parameter; remove it", f"cache.{key}")
        return points
