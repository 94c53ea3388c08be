"""The settings of KVpop and DMS: scorers, policies, their training target and boundary loss. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from sparse_rl.config import (
    AtLeastOne,
    Configuration,
    NamedConfiguration,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Probability,
    Rule,
)
from sparse_rl.errors import UserError
from sparse_rl.policies.config import EvictingConfig, PolicyConfig
from sparse_rl.policies.schedule import EvictsBeforeAttending, GatesDecide, Schedule

ATTACHED_AS = "cache_scorers"  # name of the model's attribute with its scorers, one per layer
GAMMA = (0.999, 0.999999)  # the bounds between which a kv head's decay is learned
Gamma = Annotated[float, Rule(f"between {GAMMA[0]} and {GAMMA[1]}", lambda v: GAMMA[0] < v < GAMMA[1])]


@dataclass(frozen=True, kw_only=True)
class ScorerConfig(NamedConfiguration):
    """Base class of all scorers' settings. A subclass has a `name`, and one field for each parameter."""

    family: ClassVar[str] = "scorer"
    name_key: ClassVar[str] = "name"

    @classmethod
    def members(cls) -> Mapping[str, type[ScorerConfig]]:
        return SCORER_CONFIGS


@dataclass(frozen=True, kw_only=True)
class RecencyConfig(ScorerConfig):
    """The most recent tokens rank best, as under StreamingLLM. The scorer has no parameters."""

    name: ClassVar[str] = "recency"


@dataclass(frozen=True, kw_only=True)
class DecayingConfig(ScorerConfig):
    """Settings of scorers whose scores decay with age.

    gamma : initial value of the decay, between 0.999 and 0.999999; null means that log gamma starts half way between
        the logarithms of these bounds (our choice, the papers give no value)
    """

    gamma: Gamma | None = None


@dataclass(frozen=True, kw_only=True)
class LinearConfig(DecayingConfig):
    """The score is a linear function of a token's key and value."""

    name: ClassVar[str] = "linear"


@dataclass(frozen=True, kw_only=True)
class MLPConfig(DecayingConfig):
    """The score is computed from a token's key and value by a network with one hidden layer.

    hidden : number of hidden units per kv head; null means twice the dimensions of a key (our choice)
    """

    name: ClassVar[str] = "mlp"
    hidden: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class MLSTMConfig(DecayingConfig):
    """The score is read from a matrix-valued LSTM over keys and values when a token leaves the window.

    features : feature map of the memory's queries and keys, which gives d features for keys of d dimensions: hedgehog,
        from a projection to d / 2 numbers, or softmax, from a projection to d numbers
    value : what the memory stores of a token: half or full, a projection of its key and value to d / 2 or d numbers;
        cached, its value as in the KV cache. The projections of both papers are half; the d x d memory of the workshop
        paper's section 2 is full
    readout : delayed scores a token when it leaves the window; immediate scores it when it arrives (ablation)
    norm : true adds an RMS norm to the readout of each kv head, which is optional in equation 42 of the full paper;
        equation 11 of that paper and appendix F of the workshop paper have none
    softcap : bound of the absolute value of both gates before their exp or sigmoid; null means no bound
    skip : true adds a linear function of the token's key and value to the readout
    chunk : number of tokens that training and prefill process together
    """

    name: ClassVar[str] = "mlstm"
    features: Literal["hedgehog", "softmax"] = "hedgehog"
    value: Literal["half", "full", "cached"] = "half"
    readout: Literal["delayed", "immediate"] = "delayed"
    norm: bool = False
    softcap: Positive | None = 15.0
    skip: bool = False
    chunk: PositiveInt = 64


SCORER_CONFIGS: dict[str, type[ScorerConfig]] = {
    "recency": RecencyConfig,
    "linear": LinearConfig,
    "mlp": MLPConfig,
    "mlstm": MLSTMConfig,
}


@dataclass(frozen=True, kw_only=True)
class LearnedConfig(PolicyConfig):
    """Settings of policies whose evictions depend on the scores of a model's scorers.

    sinks : number of first tokens, never evicted
    window : number of most recent tokens, never evicted
    scorer : the scorer: {name: ..., its parameters}, or the name alone
    prefill : with dense, each prompt token sees all tokens before it, and evictions begin at the end of the prompt;
        with masked, evictions begin within the prompt, as in the paper's appendix C (hf engine only)
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
    """KVpop: keeps sinks, window, and the k other tokens that the model's scorers rank highest.

    budget : number of entries of a kv head: sinks + window + k + state_entries; it cannot grow
    decay_every : number of positions after which a score decays by one step
    state_entries : number of entries of the budget that are not used, because the scorer's state takes their memory
    """

    name: ClassVar[str] = "kvpop"
    policy_class: ClassVar[str] = "sparse_rl.methods.kvpop.policy:KVpop"
    learned_view_class: ClassVar[str] = "sparse_rl.methods.kvpop.view:LearnedView"
    budget: PositiveInt  # if k grew, the running top-k would take evicted tokens back
    period: int = field(default=1, init=False)
    decay_every: PositiveInt = 1
    state_entries: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            others = "sinks, window and state_entries"
            raise UserError(f"{self.budget} leaves no entry besides {others}; raise the budget", "budget")

    @property
    def k(self) -> int:
        """Number of long-range entries of a kv head: the budget minus sinks, window and state_entries."""
        return self.budget - self.sinks - self.window - self.state_entries

    @property
    def schedule(self) -> Schedule:
        return EvictsBeforeAttending(self.budget - self.state_entries)


@dataclass(frozen=True, kw_only=True)
class TargetConfig(Configuration):
    """Settings of the training target of KVpop's scorers: log(floor + mass), where mass is a token's future attention.

    normaliser : with sparse, a query's attention is normalised over the tokens that it sees under evictions; with
        dense, over all tokens up to the query
    group : reduction over the query heads that share a kv head: max takes the largest logarithm, mean takes the mean of
        the mass before the logarithm
    lookahead : number of queries that count, in addition to the first query for which the token is outside the window;
        null means that all later queries count
    normalise : with true, mass is the mean over the queries that count; with false, it is their sum
    floor : number that is added to the mass before the logarithm is taken
    """

    normaliser: Literal["sparse", "dense"] = "sparse"
    group: Literal["max", "mean"] = "max"
    lookahead: PositiveInt | None = None
    normalise: bool = True
    floor: Positive = 1e-6


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig(Configuration):
    """Settings of the scorers' boundary loss over pairs of tokens; sparse_rl/methods/kvpop/loss.py has its equations.

    temperature : tau, divides the difference between the scores of a pair
    margin : true weights pairs by the margin between the training target's scores of the two tokens
    margin_floor : omega_min, the minimum of the margin weight
    margin_temperature : tau_omega, divides the margin in the margin weight
    balance_min, balance_max : c_min and c_max, bounds of the weight 1 / (2 x the share of pairs of the same kind), by
        which kept and dropped pairs are balanced
    queries : number of queries sampled at random per row; null means all
    late : share of these queries that is drawn with a density that grows towards the row's end
    """

    temperature: Positive = 1.0
    margin: bool = True
    margin_floor: Probability = 0.1
    margin_temperature: Positive = 1.0
    balance_min: Probability = 0.0
    balance_max: AtLeastOne = 10.0
    queries: PositiveInt | None = 1024
    late: Probability = 0.5


@dataclass(frozen=True, kw_only=True)
class DMSConfig(LearnedConfig):
    """DMS: when a token arrives, a gate decides whether the token is dropped when it leaves the window.

    Our gates read the token's key and value, and there are sinks. NVIDIA's published code has no sinks, and its gates
    read a channel of the next token's query, or the next token's hidden state.

    compression : number of tokens per entry held, averaged over layers and kv heads; the gates are trained to reach it
    bias : added to the score of every gate; with a negative bias, gates start nearly closed (KVpop's papers give no
        value; the default is that of NVIDIA's published model)
    """

    in_parts: ClassVar[bool] = False
    name: ClassVar[str] = "dms"
    policy_class: ClassVar[str] = "sparse_rl.methods.kvpop.dms:DMS"
    learned_view_class: ClassVar[str] = "sparse_rl.methods.kvpop.dms:GatedView"
    cache_class: ClassVar[str] = "sparse_rl.methods.kvpop.dms:GatedCache"
    compression: AtLeastOne = 4.0
    bias: Annotated[float, Rule("between -100 and 100", lambda v: -100 <= v <= 100)] = -5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorer.name == "recency" or getattr(self.scorer, "readout", "immediate") == "delayed":
            use = "use linear, mlp, or mlstm with readout immediate"
            raise UserError(f"a gate must decide as soon as its token arrives: {use}", "scorer")

    @property
    def schedule(self) -> Schedule:
        return GatesDecide(begins=self.sinks + self.window + 1)

    @property
    def only_hf(self) -> str | None:
        return "vllm holds the same number of entries in every kv head"
