"""The base class of all cache policies' settings, and the settings of the policy `full`."""

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
    """Base class of the settings of all cache policies: name, schedule, and the classes that implement the policy.

    Classes are named as "module:class" and are imported only when `part` is called, so that settings need no torch.

    `PolicyConfig.from_block({"policy": name, ...})` makes the settings of any policy. It raises UserError for an
    unknown name or parameter, a missing budget, or a value that breaks a parameter's rule.
    """

    family: ClassVar[str] = "cache policy"
    name_key: ClassVar[str] = "policy"
    packs: ClassVar[bool] = True  # True: several sequences can be replayed in one row
    in_parts: ClassVar[bool] = True  # True: the policy can be used for only some of the layers
    policy_class: ClassVar[str]  # a subclass of sparse_rl.policies.base.Policy
    cache_class: ClassVar[str] = "sparse_rl.methods.eviction.cache:EvictingCache"  # a sparse_rl.policies.cache.Cache
    view_class: ClassVar[str] = "sparse_rl.attention.views.replay:ReplayView"  # the TraceView that replays its traces
    learned_view_class: ClassVar[str]  # the view of a retrofit; only learned policies have one
    sections: ClassVar[str | None] = None  # a module whose SECTIONS declares the trace sections besides evict_at

    @classmethod
    def part(cls, kind: Literal["policy", "cache", "view", "learned_view", "context_view"]) -> Any:
        """Import and return the class that the attribute `KIND_class` names, for example `policy_class`."""
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
            raise UserError(f"cache policy {member.name!r} needs a budget, the number of entries per kv head")
        return member

    @property
    def schedule(self) -> Schedule:
        """Schedule of the policy: the times of compactions, and the number of entries that a compaction leaves."""
        raise NotImplementedError

    @property
    def only_hf(self) -> str | None:
        """Short reason why only the hf engine can sample under the policy; None means that all engines can."""
        return None

    @property
    def recorded(self) -> int:
        """Size of a trace in bytes per layer, kv head and token."""
        return 4

    def check_trainable(self) -> None:
        """Raise UserError if rollouts under the policy cannot be replayed in training; the error names the setting."""

    def remark(self, group: int, layers: int) -> str | None:
        """Return a remark for the user about these settings on a model, or None if there is nothing to say.

        The model has `layers` layers without a sliding window, and `group` query heads per kv head.
        """
        return None

    def parameters(self) -> dict[str, Any]:
        """Return the settings as plain values, as in a recipe, without the policy's name."""
        return as_mapping(self)


@dataclass(frozen=True, kw_only=True)
class FullConfig(PolicyConfig):
    """No entry is evicted. The policy has no parameters."""

    name: ClassVar[str] = "full"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.full:Full"

    @property
    def schedule(self) -> Schedule:
        return NeverEvicts()
