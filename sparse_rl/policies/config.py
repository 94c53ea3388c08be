"""The settings of cache policies: their base class, and the policies that compact a cache on a schedule.

Importing this module needs no torch. Methods with a folder of their own have their settings there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from sparse_rl.config import (
    Configuration,
    NamedConfiguration,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Probability,
    Rule,
    as_mapping,
    yaml_fields,
)
from sparse_rl.errors import UserError
from sparse_rl.policies.schedule import GrowingSchedule, KeepsAFraction, NeverEvicts, Schedule


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(NamedConfiguration):
    """Base class of the settings of all cache policies: name, schedule, and the classes that implement the policy.

    Classes are named as "module:class" and are imported only when `part` is called, so that settings need no torch.
    `from_block({"policy": name, ...})` makes the settings of any policy; the name `FILE.py:CLASS` is a policy of the
    user's own (make.py).

    turns : the cache between the turns of a conversation: with kept, the next turn goes on from the entries that the
        last one left; with prefilled, it prefills all tokens before it, as an API server without memory does
    """

    turns: Literal["kept", "prefilled"] = "kept"

    family: ClassVar[str] = "cache policy"
    name_key: ClassVar[str] = "policy"
    packs: ClassVar[bool] = True  # True: several sequences can be replayed in one row
    in_parts: ClassVar[bool] = True  # True: the policy can be used for only some of the layers
    policy_class: ClassVar[str]
    cache_class: ClassVar[str] = "sparse_rl.policies.cache:EvictingCache"
    view_class: ClassVar[str] = "sparse_rl.attention.views:ReplayView"  # the TraceView that replays its traces
    context_view_class: ClassVar[str | None] = None  # the view of completions after a context that it compacted once
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
    def member(cls, block: Mapping[str, Any]) -> type[PolicyConfig]:
        name = block.get(cls.name_key)
        if isinstance(name, str) and ".py:" in name:
            make = importlib.import_module("sparse_rl.policies.make")  # only here, because it needs torch
            return make.own_config(name, block.get("sha256"))  # type: ignore[no-any-return]
        return super().member(block)  # type: ignore[no-any-return]

    @classmethod
    def chosen(cls, block: Mapping[str, Any]) -> type[PolicyConfig]:
        member: type[PolicyConfig] = super().chosen(block)
        if "budget" in yaml_fields(member) and "budget" not in block:
            raise UserError(f"cache policy {member.name!r} needs a budget, the number of entries per kv head")
        return member

    @property
    def schedule(self) -> Schedule:
        """The times of compactions, and the number of entries that a compaction leaves."""
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
        """Return a remark about these settings on a model with `layers` layers without a sliding window, and `group`
        query heads per kv head; or None.
        """
        return None

    def parameters(self) -> dict[str, Any]:
        """Return the settings as plain values, as in a recipe, without the policy's name, and `turns` only if it is not
        the default: fingerprints that were recorded before it existed stay the same.
        """
        return {key: value for key, value in as_mapping(self).items() if (key, value) != ("turns", "kept")}

    def as_block(self) -> dict[str, Any]:
        return {self.name_key: self.name, **self.parameters()}


@dataclass(frozen=True, kw_only=True)
class FullConfig(PolicyConfig):
    """No entry is evicted. The policy has no parameters of its own."""

    name: ClassVar[str] = "full"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:Full"

    @property
    def schedule(self) -> Schedule:
        return NeverEvicts()


Pooling = Annotated[int, Rule(">= 1 and odd (1 is off)", lambda v: v >= 1 and v % 2 == 1)]


# ---- policies that compact a cache to a budget (rules.py) -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GrowingBudget(Configuration):
    """A budget that grows with the number of tokens seen. Between two knots it is linear, rounded down; before the
    first knot and after the last one it is constant.

    tokens : numbers of tokens of prompt and completion that the cache has seen at the knots, ascending
    entries : budget at each knot; it never falls, and grows by at most one entry per token
    """

    tokens: list[NonNegativeInt]
    entries: list[PositiveInt]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.entries or len(self.entries) != len(self.tokens):
            wrong = f"{len(self.tokens)} tokens and {len(self.entries)} entries are not as many knots"
            raise UserError(f"{wrong}; give one number of entries for each number of tokens", "entries")
        for (start, low), (end, high) in pairwise(self.knots):
            if end <= start:
                raise UserError(f"{end} after {start} does not ascend; sort the knots, each at another token", "tokens")
            if high < low:
                raise UserError(f"{high} after {low} falls; evicted entries never return, so raise it", "entries")
            if high - low > end - start:
                wrong = f"from {low} to {high} in {end - start} tokens is more than one entry per token"
                raise UserError(f"{wrong}, and a cache gains no more; move the knots apart", "entries")

    @property
    def knots(self) -> tuple[tuple[int, int], ...]:
        """Pairs (tokens seen, budget)."""
        return tuple(zip(self.tokens, self.entries, strict=True))


def budget_words(budget: Any) -> str | None:
    """Return a policy's budget, a number or a mapping as in a recipe, in words; None for anything else."""
    if isinstance(budget, GrowingBudget):
        budget = as_mapping(budget)
    if isinstance(budget, Mapping) and isinstance(entries := budget.get("entries"), list) and entries:
        return f"{entries[0]} to {entries[-1]}"
    return str(budget) if type(budget) is int else None


@dataclass(frozen=True, kw_only=True)
class EvictingConfig(PolicyConfig):
    """Settings of policies that compact a cache to a budget.

    budget : number of entries kept per kv head, sinks and window included; or {tokens: [...], entries: [...]}, with
        which it grows
    sinks : number of first tokens, never evicted
    window : number of most recent tokens, never evicted
    period : number of entries that are added between two compactions; the peak in decoding is budget + period
    """

    budget: PositiveInt | GrowingBudget
    sinks: NonNegativeInt = 0
    window: NonNegativeInt = 0
    period: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least <= self.window + self.sinks:
            others = f"window {self.window} + sinks {self.sinks}"
            raise UserError(f"{self.least} must exceed {others}; raise it or lower them", "budget")

    @property
    def least(self) -> int:
        """The budget, or the smallest one if it grows."""
        return self.budget.entries[0] if isinstance(self.budget, GrowingBudget) else self.budget

    @property
    def schedule(self) -> Schedule:
        if isinstance(self.budget, GrowingBudget):
            return GrowingSchedule(self.least, self.period, self.budget.knots)
        return Schedule(self.budget, self.period)


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(EvictingConfig):
    """Keeps only the first tokens (sinks) and the newest ones (window). The window is the budget minus the sinks."""

    name: ClassVar[str] = "streaming"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:Streaming"
    sinks: NonNegativeInt = 4
    window: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True)
class H2OConfig(EvictingConfig):
    """The score of a token is the attention that it has received so far.

    window : number of most recent tokens, never evicted; null means half of the (smallest) budget
    """

    name: ClassVar[str] = "h2o"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:H2O"
    window: NonNegativeInt | None = None  # type: ignore[assignment]  # __post_init__ sets a number

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # checks the budget before it is halved
        if self.window is None:
            object.__setattr__(self, "window", self.least // 2)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class LinedConfig(PolicyConfig):
    """Keeps sinks, window, and a fraction of the other tokens, chosen by H2O's scores (LuKA sections 3.1 and 4.2).

    compression : one of every `compression` tokens is kept
    of : tokens of which this fraction is taken: with seen, all tokens seen except sinks and window, so that the cache
        grows; with prompt, the prompt's tokens
    sinks : number of first tokens, never evicted
    window : number of most recent tokens, never evicted
    period : number of tokens between two compactions
    """

    name: ClassVar[str] = "lined"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:Lined"
    compression: Annotated[int, Rule(">= 2", lambda v: v >= 2)] = 8
    of: Literal["seen", "prompt"] = "seen"
    sinks: NonNegativeInt = 0
    window: PositiveInt = 128
    period: PositiveInt = 8

    @property
    def schedule(self) -> Schedule:
        return KeepsAFraction(self.sinks + self.window, self.period, self.compression, self.of == "prompt")

    @property
    def only_hf(self) -> str | None:
        return "vllm gives each sequence a bounded number of blocks, and this cache grows"


@dataclass(frozen=True, kw_only=True)
class TovaConfig(EvictingConfig):
    """The score of an entry is the last query's attention to it. The policy has no parameters of its own."""

    name: ClassVar[str] = "tova"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:Tova"


@dataclass(frozen=True, kw_only=True)
class ScoredWindowConfig(EvictingConfig):
    """Settings of policies that score an entry by the attention that the window's queries pay to it.

    window : number of most recent tokens, never evicted; the attention of their queries scores the other entries
    """

    window: PositiveInt = 16
    period: PositiveInt = 128


@dataclass(frozen=True, kw_only=True)
class SnapKVConfig(ScoredWindowConfig):
    """The score of an entry is the mean attention of the window's queries, max-pooled over neighbouring entries.

    pooling : number of neighbouring entries over which the maximum of the score is taken
    """

    name: ClassVar[str] = "snapkv"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:SnapKV"
    pooling: Pooling = 7


@dataclass(frozen=True, kw_only=True)
class MorphKVConfig(ScoredWindowConfig):
    """The score of an entry is the mean attention of the window's queries. The policy adds no parameters."""

    name: ClassVar[str] = "morphkv"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:MorphKV"


@dataclass(frozen=True, kw_only=True)
class RKVConfig(ScoredWindowConfig):
    """The score of an entry is the mean attention of the window's queries minus the redundancy of the entry's key.

    lam : lambda, the weight of the attention; the redundancy has the weight 1 - lambda
    pooling : number of neighbouring entries over which the maximum of the attention is taken
    """

    name: ClassVar[str] = "rkv"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:RKV"
    lam: Probability = 0.1
    pooling: Pooling = 7


@dataclass(frozen=True, kw_only=True)
class GKVConfig(ScoredWindowConfig):
    """The score of an entry is its global score minus the redundancy of its key.

    The global score combines the mean attention of the window's queries at this compaction and at earlier compactions.

    form : how the previous global score is combined with the local score of this compaction: max, mean or sum (G-KV
        eqs. 3 to 5)
    alpha : weight of the previous global score
    redundancy : true lowers the score of entries whose keys are similar to other keys
    lam : lambda, the weight of the global score; the redundancy has the weight 1 - lambda
    pooling : number of neighbouring entries over which the maximum of the global score is taken; 1 is off
    """

    name: ClassVar[str] = "gkv"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:GKV"
    form: Literal["max", "mean", "sum"] = "max"
    alpha: Probability = 0.8
    redundancy: bool = True
    lam: Probability = 0.7
    pooling: Pooling = 1


@dataclass(frozen=True, kw_only=True)
class CAKEConfig(ScoredWindowConfig):
    """The score of an entry is the mean of the window's attention to it, plus gamma times the variance.

    gamma : weight of the variance over the window's queries
    """

    name: ClassVar[str] = "cake"
    policy_class: ClassVar[str] = "sparse_rl.policies.rules:CAKE"
    gamma: NonNegative = 200.0
