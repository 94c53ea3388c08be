"""Base of the recipes that evaluate models under one cache policy, or under each policy of a sweep."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from rollout.config import EvalRolloutConfig
from sparse_rl.config import Configuration, PathText, Source, Text, yaml_fields
from sparse_rl.errors import UserError
from sparse_rl.methods.config import CONFIGS, PolicyConfig, accepted_parameters
from sparse_rl.recipe.kinds.base import Recipe


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


def nested_sweep(mapping: dict[str, Any], source: Source) -> dict[str, Any]:
    """Return a recipe's mapping in which `sweep: {cache.alpha: [...]}` is written as `sweep: {cache: {alpha: [...]}}`.

    Raises UserError for a parameter of a policy directly under `sweep`.
    """
    sweep = mapping.get("sweep")
    if not isinstance(sweep, dict) or not isinstance(sweep.get("cache", {}), dict):
        return mapping
    axes = dict(sweep.get("cache", {}))
    rest: dict[Any, Any] = {}
    for key, values in sweep.items():
        if isinstance(key, str) and key.startswith("cache."):
            axes[key.removeprefix("cache.")] = values
        elif key not in yaml_fields(SweepConfig) and any(key in accepted_parameters(name) for name in CONFIGS):
            raise source.error(f"sweep.{key}", f"unknown key; did you mean sweep.cache.{key}?")
        elif key != "cache":
            rest[key] = values
    return {**mapping, "sweep": {**rest, "cache": axes}}


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

    def sequences(self) -> int | None:
        """Return the maximum number of sequences that one task has under one cache policy; None if unknown."""
        raise NotImplementedError

    def caches(self) -> list[PolicyConfig | None]:
        return self.points

    def models(self) -> list[str]:
        return self.sweep.model or [self.model]

    def by_model(self) -> list[Self]:
        """Return one recipe for each model, in which no models are swept."""
        rest = dataclasses.replace(self.sweep, model=[])
        return [dataclasses.replace(self, model=model, sweep=rest) for model in self.models()]

    def with_models(self, directory_of: Callable[[str], str]) -> Self:
        swept = dataclasses.replace(self.sweep, model=list(map(directory_of, self.sweep.model)))
        return dataclasses.replace(super().with_models(directory_of), sweep=swept)

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
        if own_policy is not None and own_policy not in list(CONFIGS):
            PolicyConfig.from_block({"policy": own_policy}, "cache", Source())  # raises, even if it is not swept
        swept = sweep.policy or ([own_policy] if own_policy is not None else [])
        if not swept:
            raise UserError("name the swept policies too, under sweep.policy or cache.policy", "sweep.cache")
        points: list[PolicyConfig | None] = []
        users: dict[str, list[str]] = {key: [] for key in (*base, *sweep.cache)}  # parameter -> policies that use it
        blocks = [{"policy": entry} if isinstance(entry, str) else entry for entry in swept]
        for block in blocks:
            name: Any = block.get("policy")
            is_policy = name in list(CONFIGS)
            accepted = accepted_parameters(name) if is_policy else []
            for key in users:
                users[key] += [name] if key in accepted else []
            defaults = {key: value for key, value in base.items() if key in accepted}
            axes = {key: values for key, values in sweep.cache.items() if key in accepted and key not in block}
            for values in itertools.product(*axes.values()):
                try:
                    point = PolicyConfig.from_block({**defaults, **block, **dict(zip(axes, values, strict=True))})
                except UserError as error:
                    raise UserError(str(error), "sweep" if is_policy else "sweep.policy") from None
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
