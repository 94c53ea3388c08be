"""The settings of every cache policy, each one dataclass; to be read without torch.

    config = PolicyConfig.from_block({"policy": "gkv", "budget": 512, "alpha": 0.7})
    config.schedule.peak            # entries; see schedule.py

Here, and here alone, a parameter has its default and the rule that its value must keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from sparse_rl.config import (
    AtLeastOne,
    NamedConfiguration,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Probability,
    Rule,
    as_mapping,
    yaml_fields,
)
from sparse_rl.errors import UserError
from sparse_rl.policies.schedule import (
    EvictsBeforeAttending,
    GatesDecide,
    KeepsAFraction,
    NeverEvicts,
    ReadsPages,
    Schedule,
)
from sparse_rl.scorers.config import MLPConfig, ScorerConfig

Pooling = Annotated[int, Rule(">= 1 and odd (1 is off)", lambda v: v >= 1 and v % 2 == 1)]


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(NamedConfiguration):
    """What all have: the policy's name, and its schedule."""

    family: ClassVar[str] = "cache policy"
    name_key: ClassVar[str] = "policy"
    packs: ClassVar[bool] = True  # whether several sequences can be replayed in one row

    @classmethod
    def members(cls) -> Mapping[str, type[PolicyConfig]]:
        return CONFIGS

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
        """Why no other engine than hf samples under it, in a few words; None where all do."""
        return None

    def unwise(self, group: int) -> str | None:
        """What is allowed but hardly wanted, for a model with `group` query heads to a kv head; None: nothing."""
        return None

    def parameters(self) -> dict[str, Any]:
        """Plain values: those of `as_block` without the policy's name."""
        return as_mapping(self)


@dataclass(frozen=True, kw_only=True)
class FullConfig(PolicyConfig):
    name: ClassVar[str] = "full"

    @property
    def schedule(self) -> Schedule:
        return NeverEvicts()


@dataclass(frozen=True, kw_only=True)
class EvictingConfig(PolicyConfig):
    """
    budget : entries kept per kv head, sinks and window included
    sinks : the first tokens, never evicted
    window : the most recent tokens, never evicted
    period : entries that gather between two compactions; the peak in decoding is budget + period
    """

    budget: PositiveInt
    sinks: NonNegativeInt = 0
    window: NonNegativeInt = 0
    period: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget <= self.window + self.sinks:
            mend = f"{self.budget} must exceed window {self.window} + sinks {self.sinks}; raise it or lower them"
            raise UserError(mend, "budget")

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.budget, self.period)


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(EvictingConfig):
    """The window is what the sinks leave of the budget."""

    name: ClassVar[str] = "streaming"
    sinks: NonNegativeInt = 4
    window: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True)
class H2OConfig(EvictingConfig):
    """window : None: half of the budget"""

    name: ClassVar[str] = "h2o"
    window: NonNegativeInt | None = None  # type: ignore[assignment]  # a number from here on

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # what is halved must be a number
        if self.window is None:
            object.__setattr__(self, "window", self.budget // 2)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class LinedConfig(PolicyConfig):
    """
    compression : of so many tokens behind sinks and window one is kept
    of : seen, all tokens so far, so that the cache grows; prompt, those of the prompt alone
    sinks, window, period : as for the others
    """

    name: ClassVar[str] = "lined"
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
    name: ClassVar[str] = "tova"


@dataclass(frozen=True, kw_only=True)
class ScoredWindowConfig(EvictingConfig):
    """window : its queries are what scores the rest"""

    window: PositiveInt = 16
    period: PositiveInt = 128


@dataclass(frozen=True, kw_only=True)
class SnapKVConfig(ScoredWindowConfig):
    """pooling : entries over which the score's maximum is taken"""

    name: ClassVar[str] = "snapkv"
    pooling: Pooling = 7


@dataclass(frozen=True, kw_only=True)
class MorphKVConfig(ScoredWindowConfig):
    name: ClassVar[str] = "morphkv"


@dataclass(frozen=True, kw_only=True)
class RKVConfig(ScoredWindowConfig):
    """
    lam : lambda, the weight of importance against redundancy
    pooling : as for snapkv
    """

    name: ClassVar[str] = "rkv"
    lam: Probability = 0.1
    pooling: Pooling = 7


@dataclass(frozen=True, kw_only=True)
class GKVConfig(ScoredWindowConfig):
    """
    form : of the global score
    alpha : how much the global score keeps of the last
    redundancy : whether repeated keys lose
    lam : lambda, the weight of the score against redundancy
    pooling : as for snapkv
    """

    name: ClassVar[str] = "gkv"
    form: Literal["max", "mean", "sum"] = "max"
    alpha: Probability = 0.8
    redundancy: bool = True
    lam: Probability = 0.7
    pooling: Pooling = 1


@dataclass(frozen=True, kw_only=True)
class CAKEConfig(ScoredWindowConfig):
    """gamma : the weight of the variance of attention over the window"""

    name: ClassVar[str] = "cake"
    gamma: NonNegative = 200.0


@dataclass(frozen=True, kw_only=True)
class AMConfig(EvictingConfig):
    """
    period : as for the others; None: the budget
    reference_queries : of how many of the last tokens the queries say what must be kept; None: 128, where the first
        compaction has as many
    select : attention, the keys that receive most of it; omp, orthogonal matching pursuit of the attention mass
    aggregate : of the attention of the reference queries
    ridge : of the values' fit, which shrinks towards what they were; in units of the attention's mean square
    fit : ridge; or paper, the paper's own solvers, for comparison: no trainer can follow them
    """

    name: ClassVar[str] = "am"
    packs: ClassVar[bool] = False
    window: PositiveInt = 16
    period: PositiveInt | None = None  # type: ignore[assignment]  # a number from here on
    reference_queries: PositiveInt | None = None
    select: Literal["attention", "omp"] = "attention"
    aggregate: Literal["rms", "mean", "max"] = "rms"
    ridge: Positive = 1e-3
    fit: Literal["ridge", "paper"] = "ridge"

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)
        if self.period is None:
            object.__setattr__(self, "period", self.budget)
        most = self.schedule.first(0)  # tokens seen at the first compaction, at least
        if self.reference_queries is None:
            object.__setattr__(self, "reference_queries", min(128, most))
        super().__post_init__()
        if self.reference_queries > most:
            wrong = f"{self.reference_queries}: the first compaction has no more queries than budget + period, {most}"
            raise UserError(wrong, "reference_queries")

    @property
    def refitted(self) -> int:
        """The entries of a kv head that a compaction leaves and fits; sinks and window stay as they are."""
        return self.budget - self.sinks - self.window

    def conditions(self, group: int) -> int:
        """The reference queries of a kv head, to which a group of query heads belongs."""
        assert self.reference_queries is not None
        return self.reference_queries * group

    def unwise(self, group: int) -> str | None:
        if (queries := self.conditions(group)) >= self.refitted:
            return None
        few = f"{self.reference_queries} reference queries of {group} heads are {queries} conditions"
        return f"{few} for the {self.refitted} entries that are fitted; raise reference_queries, or lower the budget"


@dataclass(frozen=True, kw_only=True)
class LearnedConfig(PolicyConfig):
    """What policies have that go by a model's scorers.

    scorer : a scorer, {name: ..., its parameters} or the name alone
    prefill : dense: a prompt sees the whole of itself, and is cut at its end; masked: it is cut from its beginning on,
        as in the paper's appendix C (hf only)
    """

    sinks: NonNegativeInt = 4
    window: PositiveInt = 256
    scorer: ScorerConfig = field(default_factory=MLPConfig)
    prefill: Literal["dense", "masked"] = "dense"

    @property
    def only_hf(self) -> str | None:
        return "vllm does not mask prompts (prefill: masked)" if self.prefill == "masked" else None


@dataclass(frozen=True, kw_only=True)
class KVpopPolicyConfig(LearnedConfig, EvictingConfig):
    """
    budget : B = sinks + window + k (+ state_entries)
    decay_every : n
    state_entries : so many entries of the budget give way to the scorer's state, which takes their memory
    """

    name: ClassVar[str] = "kvpop"
    period: int = field(default=1, init=False)
    decay_every: PositiveInt = 1
    state_entries: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise UserError(f"{self.budget} leaves no entry beside sinks, window and state_entries; raise it", "budget")

    @property
    def k(self) -> int:
        """Long-range entries per kv head."""
        return self.budget - self.sinks - self.window - self.state_entries

    @property
    def schedule(self) -> Schedule:
        return EvictsBeforeAttending(self.budget - self.state_entries)


@dataclass(frozen=True, kw_only=True)
class DMSConfig(LearnedConfig):
    """
    compression : tokens for each entry, which the gates are trained to on average over layers and kv heads
    bias : added to a gate's score; a gate starts there, nearly closed (ours, the papers do not say)
    """

    name: ClassVar[str] = "dms"
    compression: AtLeastOne = 4.0
    bias: Annotated[float, Rule("between -100 and 100", lambda v: -100 <= v <= 100)] = -5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorer.name == "recency" or getattr(self.scorer, "readout", "immediate") == "delayed":
            raise UserError(
                "a gate is known as its token comes: linear, mlp, or mlstm with readout immediate", "scorer"
            )

    @property
    def schedule(self) -> Schedule:
        return GatesDecide(begins=self.sinks + self.window + 1)

    @property
    def only_hf(self) -> str | None:
        return "vllm holds as many entries in every kv head"


@dataclass(frozen=True, kw_only=True)
class ClusteredConfig(PolicyConfig):
    """
    page : tokens of a page
    window : tokens that come after a page before its summary is read instead, at least
    sinks : the first tokens, in no page
    open_pages : pages that a query reads token by token, at most
    bias : log_n, a summary weighs as much as the tokens that it stands for; none, as one
    values : kept, or zero: summaries have keys alone, for comparison
    """

    name: ClassVar[str] = "clustered"
    packs: ClassVar[bool] = False
    page: PositiveInt = 16
    window: NonNegativeInt = 128
    sinks: NonNegativeInt = 0
    open_pages: NonNegativeInt = 3
    bias: Literal["log_n", "none"] = "log_n"
    values: Literal["kept", "zero"] = "kept"

    @property
    def schedule(self) -> Schedule:
        return ReadsPages(begins=self.sinks + self.page + self.window + 1)

    @property
    def only_hf(self) -> str | None:
        return "vllm's kernels read all that a sequence holds"


CONFIGS: dict[str, type[PolicyConfig]] = {
    "full": FullConfig,
    "streaming": StreamingConfig,
    "h2o": H2OConfig,
    "lined": LinedConfig,
    "tova": TovaConfig,
    "snapkv": SnapKVConfig,
    "morphkv": MorphKVConfig,
    "rkv": RKVConfig,
    "gkv": GKVConfig,
    "cake": CAKEConfig,
    "am": AMConfig,
    "kvpop": KVpopPolicyConfig,
    "dms": DMSConfig,
    "clustered": ClusteredConfig,
}


def accepted_parameters(policy: str) -> list[str]:
    """The parameters that a policy of this name takes."""
    return list(yaml_fields(CONFIGS[policy]))
