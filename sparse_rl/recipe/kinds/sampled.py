"""Training under evictions, and training on sequences that an engine samples, or simulates, under a cache."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

from rollout.config import RolloutConfig
from sparse_rl.config import flat
from sparse_rl.errors import UserError
from sparse_rl.methods.config import KVpopPolicyConfig, LearnedConfig, PolicyConfig
from sparse_rl.recipe.kinds.base import TrainRecipe, ValidationConfig
from sparse_rl.recipe.kinds.caches import check_model_len
from trainer.config import ReplayConfig
from trainer.scored.config import ScorersConfig


@dataclass(frozen=True, kw_only=True)
class ReplayedRecipe(TrainRecipe):
    """Training whose attention sees what a cache under evictions would have held, recorded or decided as it trains."""

    replay: ReplayConfig = flat(ReplayConfig)
    validation: ValidationConfig | None = None

    def held_out(self) -> ValidationConfig | None:
        return self.validation

    def attention_kernel(self) -> str | None:
        return self.replay.attention_kernel

    def with_attention_kernel(self, kernel: str) -> Self:
        replay = dataclasses.replace(self.replay, attention_kernel=kernel)  # type: ignore[arg-type]  # a kernel's name
        return dataclasses.replace(self, replay=replay)


@dataclass(frozen=True, kw_only=True)
class SampledRecipe(ReplayedRecipe):
    """Training on sequences that an engine samples, or simulates, under a cache.

    cache : {policy: a name, its parameters}, or the name alone
    scorers : how a learned policy's scorers go on learning; null: they stay as they are
    """

    cache: PolicyConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    scorers: ScorersConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_learned()
        try:
            self.cache.check_trainable()
        except UserError as error:
            raise UserError(error.message, f"cache.{error.key}") from None
        if self.rollout.tensor_parallel > 1:
            wrong = "in training each process has an engine of its own; set it to 1, and use launch.processes"
            raise UserError(wrong, "rollout.tensor_parallel")
        check_model_len(self.rollout, self.prompt_bounds(), self.sampling().max_tokens)

    def _check_learned(self) -> None:
        """What a learned policy, and scorers that go on learning, ask of the rest."""
        if isinstance(self.cache, LearnedConfig) and self.lora is not None:
            raise UserError(f"not under {self.cache.name}; remove one of them", "lora")
        if self.scorers is None:
            return
        if not isinstance(self.cache, KVpopPolicyConfig):
            raise UserError(
                f"{self.cache.name} has none that learn on; remove this, or name kvpop as cache.policy", "scorers"
            )
        if self.cache.scorer.name == "recency":
            raise UserError(
                "the scorer recency has no parameters, so there is nothing to learn; remove this", "scorers"
            )
        self.refuse_own_groups()

    def foresees(self) -> bool:
        return self.scorers is not None

    def engine_config(self) -> RolloutConfig | None:
        return self.rollout

    def with_engine_config(self, rollout: RolloutConfig) -> Self:
        return dataclasses.replace(self, rollout=rollout)

    def caches(self) -> list[PolicyConfig | None]:
        return [self.cache]

    def exported_cache(self) -> PolicyConfig | None:
        return self.cache

    def evicts(self) -> bool:
        """Whether its cache evicts at all."""
        return self.cache.schedule.evicts

    def longest_row(self, prompt: int) -> int | None:
        return prompt + self.sampling().max_tokens

    def keeps_traces(self) -> bool:
        return self.evicts()
