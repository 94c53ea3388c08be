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
    """What policies have that compact a cache to a fixed budget.

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
    """Only sinks and window stay. The window is what the sinks leave of the budget."""

    name: ClassVar[str] = "streaming"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.streaming:Streaming"
    sinks: NonNegativeInt = 4
    window: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True)
class H2OConfig(EvictingConfig):
    """The attention that a token has received so far scores it.

    window : None: half of the budget
    """

    name: ClassVar[str] = "h2o"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.h2o:H2O"
    window: NonNegativeInt | None = None  # type: ignore[assignment]  # a number from here on

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # what is halved must be a number
        if self.window is None:
            object.__setattr__(self, "window", self.budget // 2)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class LinedConfig(PolicyConfig):
    """Beside sinks and window a fraction of the tokens stays, by H2O's scores (LuKA sections 3.1 and 4.2).

    compression : of so many tokens one is kept
    of : seen, of those seen behind sinks and window, so that the cache grows; prompt, of all tokens of the prompt
    sinks : the first tokens, never evicted
    window : the most recent tokens, never evicted
    period : tokens between two compactions
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
    """The last query scores the rest. It has no parameters of its own."""

    name: ClassVar[str] = "tova"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.tova:Tova"


@dataclass(frozen=True, kw_only=True)
class ScoredWindowConfig(EvictingConfig):
    """What policies have that score by the attention of the window's queries.

    window : its queries are what scores the rest
    """

    window: PositiveInt = 16
    period: PositiveInt = 128


@dataclass(frozen=True, kw_only=True)
class SnapKVConfig(ScoredWindowConfig):
    """The window's mean attention scores the rest, with its maximum over neighbours taken.

    pooling : entries over which the score's maximum is taken
    """

    name: ClassVar[str] = "snapkv"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:SnapKV"
    pooling: Pooling = 7


@dataclass(frozen=True, kw_only=True)
class MorphKVConfig(ScoredWindowConfig):
    """The window's mean attention scores the rest. It has no parameters of its own."""

    name: ClassVar[str] = "morphkv"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:MorphKV"


@dataclass(frozen=True, kw_only=True)
class RKVConfig(ScoredWindowConfig):
    """The window's mean attention scores the rest, less what repeats other keys.

    lam : lambda, the weight of importance against redundancy
    pooling : as for snapkv
    """

    name: ClassVar[str] = "rkv"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:RKV"
    lam: Probability = 0.1
    pooling: Pooling = 7


@dataclass(frozen=True, kw_only=True)
class GKVConfig(ScoredWindowConfig):
    """A global score, of this compaction and those before, less what repeats other keys.

    form : how the global score is made of its last value and the local one: max, mean or sum (G-KV eqs. 3 to 5)
    alpha : how much the global score keeps of the last
    redundancy : whether repeated keys lose
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
    """The mean and the variance of the window's attention score the rest.

    gamma : the weight of the variance of attention over the window
    """

    name: ClassVar[str] = "cake"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:CAKE"
    gamma: NonNegative = 200.0
