"""What is measured under a cache, or under each cache of a sweep of policies and budgets."""

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
    """Evaluate every policy at every budget; an empty list keeps what the cache block says.

    policy : names, or {policy: name, its parameters}; one with a budget of its own is evaluated at that one alone
    """

    policy: list[Text | dict[str, Any]] = field(default_factory=list)
    budget: list[PositiveInt] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SweptRecipe(Recipe):
    """What is measured under one cache, or under each of a sweep.

    cache : the policy; in a sweep, with a policy or without, its other keys go to each swept policy that has them and
        does not say them itself. Without cache and sweep the model's own cache_policy.json, if any
    """

    cache: Text | dict[str, Any] | None = None
    sweep: SweepConfig = field(default_factory=SweepConfig)
    rollout: EvalRolloutConfig = field(default_factory=EvalRolloutConfig)

    points: list[PolicyConfig | None] = field(default_factory=list, init=False, compare=False)
    """The cache of each point of the sweep."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.cache, str):
            object.__setattr__(self, "cache", {"policy": self.cache})
        object.__setattr__(self, "points", self.read_points())

    def sequences(self) -> int | None:
        """The most sequences that the engine is given for one task under one cache; None: not known."""
        raise NotImplementedError

    def caches(self) -> list[PolicyConfig | None]:
        return self.points

    def read_points(self) -> list[PolicyConfig | None]:
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
