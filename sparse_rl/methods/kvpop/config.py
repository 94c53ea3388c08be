"""The settings of the policies that go by scorers, which a model has learned."""

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
    """What policies have that go by a model's scorers.

    sinks : the first tokens, never evicted
    window : the most recent tokens, never evicted
    scorer : a scorer, {name: ..., its parameters} or the name alone
    prefill : dense: a prompt sees the whole of itself, and is cut at its end; masked: it is cut from its beginning on,
        as in the paper's appendix C (hf only)
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
    """KVpop: beside sinks and window the k tokens stay that the model's scorers rank highest.

    budget : entries of a kv head, B = sinks + window + k (+ state_entries)
    decay_every : n, a score decays once in so many positions
    state_entries : so many entries of the budget give way to the scorer's state, which takes their memory
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
            raise UserError(f"{self.budget} leaves no entry beside sinks, window and state_entries; raise it", "budget")

    @property
    def k(self) -> int:
        """The long-range entries of a kv head: what sinks, window and state_entries leave of the budget."""
        return self.budget - self.sinks - self.window - self.state_entries

    @property
    def schedule(self) -> Schedule:
        return EvictsBeforeAttending(self.budget - self.state_entries)


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig(Configuration):
    """The scorers' loss (loss.py).

    temperature : tau
    margin, margin_floor, margin_temperature : weigh pairs by the target's margin; omega_min and tau_omega
    balance_min, balance_max : c_min and c_max: the weights of kept and dropped pairs, 1 / (2 their share), stay between
    queries : drawn per row; None: all
    late : the share of them that is drawn with a bias towards the row's end
    """

    temperature: Positive = 1.0
    margin: bool = True
    margin_floor: Probability = 0.1
    margin_temperature: Positive = 1.0
    balance_min: Probability = 0.0
    balance_max: AtLeastOne = 10.0
    queries: PositiveInt | None = 1024
    late: Probability = 0.5
