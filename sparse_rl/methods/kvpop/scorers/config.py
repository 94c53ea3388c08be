"""The settings of KVpop's scorers, one dataclass each; importing them needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from sparse_rl.config import NamedConfiguration, Positive, PositiveInt, Rule

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
        return CONFIGS


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


CONFIGS: dict[str, type[ScorerConfig]] = {
    "recency": RecencyConfig,
    "linear": LinearConfig,
    "mlp": MLPConfig,
    "mlstm": MLSTMConfig,
}
