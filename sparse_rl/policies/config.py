"""What the settings of every cache policy have, and the parts of its method that they name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sparse_rl.config import NamedConfiguration, as_mapping, yaml_fields
from sparse_rl.errors import UserError
from sparse_rl.policies.schedule import NeverEvicts, Schedule


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(NamedConfiguration):
    """What the settings of all cache policies have: the policy's name, its schedule, and the parts of its method.

    A part is named as "module:class", and imported when it is asked for (`part`), so that settings need no torch.

    `PolicyConfig.from_block({"policy": name, ...})` makes those of any policy. Raises UserError for an unknown name or
    parameter, a missing budget, and a value that breaks a parameter's rule.
    """

    family: ClassVar[str] = "cache policy"
    name_key: ClassVar[str] = "policy"
    packs: ClassVar[bool] = True  # whether several sequences can be replayed in one row
    in_parts: ClassVar[bool] = True  # whether some layers can have it, and others another one
    policy_class: ClassVar[str]  # a sparse_rl.policies.base.Policy
    cache_class: ClassVar[str] = "sparse_rl.methods.eviction.cache:EvictingCache"  # a sparse_rl.policies.cache.Cache
    view_class: ClassVar[str] = "sparse_rl.attention.views.replay:ReplayView"  # replays its traces, a TraceView
    learned_view_class: ClassVar[str]  # what a retrofit attends by, where the policy is learned
    sections: ClassVar[str | None] = None  # a module whose SECTIONS declares what is recorded beside evict_at

    @classmethod
    def part(cls, kind: Literal["policy", "cache", "view", "learned_view"]) -> Any:
        """The class that `policy_class`, `cache_class`, `view_class` or `learned_view_class` names."""
        module, name = getattr(cls, f"{kind}_class").split(":")
        return getattr(importlib.import_module(module), name)

    @classmethod
    def members(cls) -> Mapping[str, type[PolicyConfig]]:
        configs: Mapping[str, type[PolicyConfig]] = importlib.import_module("sparse_rl.methods.config").CONFIGS
        return configs

    @classmethod
    def chosen(cls, block: Mapping[str, Any]) -> type[PolicyConfig]:
        member: type[PolicyConfig] = super().chosen(block)
        if "budget" in yaml_fields(member) and "budget" not in block:
            raise UserError(f"cache policy {member.name!r} needs a budget: the entries to keep per kv head")
        return member

    @property
    def schedule(self) -> Schedule:
        """When the policy compacts, and how many entries that leaves."""
        raise NotImplementedError

    @property
    def only_hf(self) -> str | None:
        """Why no engine but hf samples under it, in a few words; None where all do."""
        return None

    @property
    def recorded(self) -> int:
        """Bytes that a trace holds per layer, kv head and token."""
        return 4

    def check_trainable(self) -> None:
        """Raise UserError, with the setting as its key, where no trainer can follow what is sampled under it."""

    def remark(self, group: int, layers: int) -> str | None:
        """What a user should hear of it, for a model with `group` query heads to a kv head; None: nothing."""
        return None

    def parameters(self) -> dict[str, Any]:
        """Plain values: those of `as_block` without the policy's name."""
        return as_mapping(self)


@dataclass(frozen=True, kw_only=True)
class FullConfig(PolicyConfig):
    """Nothing is evicted. It has no parameters."""

    name: ClassVar[str] = "full"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.full:Full"

    @property
    def schedule(self) -> Schedule:
        return NeverEvicts()
