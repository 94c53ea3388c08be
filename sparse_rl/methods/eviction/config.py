"""The settings of the policies that compact a cache on a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from sparse_rl.config import NonNegative, NonNegativeInt, PositiveInt, Probability, Rule
from sparse_rl.errors import UserError
from sparse_rl.policies.config import PolicyConfig
from sparse_rl.policies.schedule import KeepsAFraction, Schedule

Pooling = Annotated[int, Rule(">= 1 and odd (1 is off)", lambda v: v >= 1 and v % 2 == 1)]


@dataclass(frozen=True, kw_only=True)
class EvictingConfig(PolicyConfig):
    """Settings of policies that compact a cache to a fixed budget.

    budget : number of entries kept per kv head, sinks and window included
    sinks : number of first tokens, never evicted
    window : number of most recent tokens, never evicted
    period : number of entries that are added between two compactions; the peak in decoding is budget + period
    """

    budget: PositiveInt
    sinks: NonNegativeInt = 0
    window: NonNegativeInt = 0
    period: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget <= self.window + self.sinks:
            message = f"{self.budget} must exceed window {self.window} + sinks {self.sinks}; raise it or lower them"
            raise UserError(message, "budget")

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.budget, self.period)


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(EvictingConfig):
    """Only sinks and window stay. The window is the budget minus the sinks."""

    name: ClassVar[str] = "streaming"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.streaming:Streaming"
    sinks: NonNegativeInt = 4
    window: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True)
class H2OConfig(EvictingConfig):
    """The score of a token is the attention that it has received so far.

    window : number of most recent tokens, never evicted; None means half of the budget
    """

    name: ClassVar[str] = "h2o"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.h2o:H2O"
    window: NonNegativeInt | None = None  # type: ignore[assignment]  # a number from here on

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # checks the budget before it is halved
        if self.window is None:
            object.__setattr__(self, "window", self.budget // 2)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class LinedConfig(PolicyConfig):
    """Keeps a fraction of the tokens besides sinks and window, by H2O's scores (LuKA sections 3.1 and 4.2).

    compression : one of every `compression` tokens is kept
    of : tokens that the fraction counts: seen, all tokens seen beyond sinks and window, so that the cache grows;
        prompt, all tokens of the prompt
    sinks : number of first tokens, never evicted
    window : number of most recent tokens, never evicted
    period : number of tokens between two compactions
    """

    name: ClassVar[str] = "lined"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.lined:Lined"
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
    """The last query's attention scores the entries. The policy has no parameters of its own."""

    name: ClassVar[str] = "tova"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.tova:Tova"


@dataclass(frozen=True, kw_only=True)
class ScoredWindowConfig(EvictingConfig):
    """Settings of policies that score by the attention of the window's queries.

    window : number of most recent tokens, never evicted; their queries score the other entries
    """

    window: PositiveInt = 16
    period: PositiveInt = 128


@dataclass(frozen=True, kw_only=True)
class SnapKVConfig(ScoredWindowConfig):
    """The score is the window's mean attention, max-pooled over neighbouring entries.

    pooling : number of neighbouring entries over which the maximum of the score is taken
    """

    name: ClassVar[str] = "snapkv"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:SnapKV"
    pooling: Pooling = 7


@dataclass(frozen=True, kw_only=True)
class MorphKVConfig(ScoredWindowConfig):
    """The score is the window's mean attention. The policy has no parameters of its own."""

    name: ClassVar[str] = "morphkv"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:MorphKV"


@dataclass(frozen=True, kw_only=True)
class RKVConfig(ScoredWindowConfig):
    """The score is the window's mean attention minus the redundancy of the key.

    lam : lambda, the weight of importance against redundancy
    pooling : as for snapkv
    """

    name: ClassVar[str] = "rkv"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:RKV"
    lam: Probability = 0.1
    pooling: Pooling = 7


@dataclass(frozen=True, kw_only=True)
class GKVConfig(ScoredWindowConfig):
    """The score is a global score, over this compaction and the earlier ones, minus the redundancy of the key.

    form : combination of the previous global score with the local score: max, mean or sum (G-KV eqs. 3 to 5)
    alpha : weight of the previous global score
    redundancy : true lowers the score of keys that repeat other keys
    lam : lambda, the weight of the score against redundancy
    pooling : as for snapkv
    """

    name: ClassVar[str] = "gkv"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:GKV"
    form: Literal["max", "mean", "sum"] = "max"
    alpha: Probability = 0.8
    redundancy: bool = True
    lam: Probability = 0.7
    pooling: Pooling = 1


@dataclass(frozen=True, kw_only=True)
class CAKEConfig(ScoredWindowConfig):
    """The score is the mean plus gamma times the variance of the window's attention.

    gamma : the weight of the variance of attention over the window
    """

    name: ClassVar[str] = "cake"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:CAKE"
    gamma: NonNegative = 200.0
