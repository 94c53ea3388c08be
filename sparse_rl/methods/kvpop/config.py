"""The settings of the learned policies, which evict by the scores of a model's scorers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from sparse_rl.config import AtLeastOne, Configuration, NonNegativeInt, Positive, PositiveInt, Probability
from sparse_rl.errors import UserError
from sparse_rl.methods.eviction.config import EvictingConfig
from sparse_rl.methods.kvpop.scorers.config import MLPConfig, ScorerConfig
from sparse_rl.policies.config import PolicyConfig
from sparse_rl.policies.schedule import EvictsBeforeAttending, Schedule


@dataclass(frozen=True, kw_only=True)
class LearnedConfig(PolicyConfig):
    """Settings of policies whose evictions depend on the scores of a model's scorers.

    sinks : number of first tokens, never evicted
    window : number of most recent tokens, never evicted
    scorer : the scorer: {name: ..., its parameters}, or the name alone
    prefill : with dense, each prompt token sees all tokens before it, and evictions begin at the end of the prompt;
        with masked, evictions begin within the prompt, as in the paper's appendix C (hf engine only)
    """

    in_parts: ClassVar[bool] = False
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

    budget : number of entries of a kv head: sinks + window + k + state_entries
    decay_every : number of positions after which a score decays by one step
    state_entries : number of entries of the budget that are not used, because the scorer's state takes their memory
    """

    name: ClassVar[str] = "kvpop"
    policy_class: ClassVar[str] = "sparse_rl.methods.kvpop.policy:KVpop"
    learned_view_class: ClassVar[str] = "sparse_rl.methods.kvpop.view:LearnedView"
    period: int = field(default=1, init=False)
    decay_every: PositiveInt = 1
    state_entries: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise UserError(
                f"{self.budget} leaves no entry besides sinks, window and state_entries; raise the budget", "budget"
            )

    @property
    def k(self) -> int:
        """Number of long-range entries of a kv head: the budget minus sinks, window and state_entries."""
        return self.budget - self.sinks - self.window - self.state_entries

    @property
    def schedule(self) -> Schedule:
        return EvictsBeforeAttending(self.budget - self.state_entries)


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
