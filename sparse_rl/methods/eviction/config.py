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
    """Keeps only the first tokens (sinks) and the newest ones (window). The window is the budget minus the sinks."""

    name: ClassVar[str] = "streaming"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.streaming:Streaming"
    sinks: NonNegativeInt = 4
    window: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True)
class H2OConfig(EvictingConfig):
    """The score of a token is the attention that it has received so far.

    window : number of most recent tokens, never evicted; null means half of the budget
    """

    name: ClassVar[str] = "h2o"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.h2o:H2O"
    window: NonNegativeInt | None = None  # type: ignore[assignment]  # __post_init__ sets a number

    def __post_init__(self) -> None:
        PolicyConfig.__post_init__(self)  # checks the budget before it is halved
        if self.window is None:
            object.__setattr__(self, "window", self.budget // 2)
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
    """The score of an entry is the last query's attention to it. The policy has no parameters of its own."""

    name: ClassVar[str] = "tova"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.tova:Tova"


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
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:SnapKV"
    pooling: Pooling = 7


@dataclass(frozen=True, kw_only=True)
class MorphKVConfig(ScoredWindowConfig):
    """The score of an entry is the mean attention of the window's queries. The policy adds no parameters."""

    name: ClassVar[str] = "morphkv"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:MorphKV"


@dataclass(frozen=True, kw_only=True)
class RKVConfig(ScoredWindowConfig):
    """The score of an entry is the mean attention of the window's queries minus the redundancy of the entry's key.

    lam : lambda, the weight of the attention; the redundancy has the weight 1 - lambda
    pooling : number of neighbouring entries over which the maximum of the attention is taken
    """

    name: ClassVar[str] = "rkv"
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:RKV"
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
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:GKV"
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
    policy_class: ClassVar[str] = "sparse_rl.methods.eviction.scored_window:CAKE"
    gamma: NonNegative = 200.0
