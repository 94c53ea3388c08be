"""Base classes for training under evictions, and for training on sequences that an engine samples or simulates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

from rollout.config import RolloutConfig
from sparse_rl.config import flat
from sparse_rl.errors import UserError
from sparse_rl.methods.config import KVpopPolicyConfig, LearnedConfig, PolicyConfig
from sparse_rl.recipe.kinds.base import TrainRecipe, ValidationConfig
from trainer.config import ReplayConfig
from trainer.scored.config import ScorersConfig

GROUPS_OF_THEIR_OWN = ("lomo", "adalomo", "galore", "apollo")  # optimizers with their own parameter groups


@dataclass(frozen=True, kw_only=True)
class ReplayedRecipe(TrainRecipe):
    """Training whose attention reads only the entries that a cache under evictions would have held.

    The evictions were recorded when the sequences were sampled or simulated, or are decided in training's forward pass.
    """

    replay: ReplayConfig = flat(ReplayConfig)
    validation: ValidationConfig | None = None

    def attending_models(self) -> list[str]:
        """Return the names of the models that use the recipe's attention kernel."""
        return [self.model]

    def foresees(self) -> bool:
        """True if KVpop's scorers are trained, which requires their target, the mass of future attention."""
        raise NotImplementedError

    def refuse_own_groups(self) -> None:
        """Raise UserError for an optimizer that cannot use separate learning rates for model and scorers."""
        if str(self.trainer_options.get("optim")).startswith(GROUPS_OF_THEIR_OWN):
            raise UserError(
                "groups parameters itself, but model and scorers need separate learning rates; use another optimizer",
                "optim",
            )

    def with_attention_kernel(self, kernel: str) -> Self:
        """Return a copy of the recipe that uses the attention kernel `kernel`."""
        replay = dataclasses.replace(self.replay, attention_kernel=kernel)  # type: ignore[arg-type]  # a kernel's name
        return dataclasses.replace(self, replay=replay)


@dataclass(frozen=True, kw_only=True)
class SampledRecipe(ReplayedRecipe):
    """Training on sequences that an engine samples, or simulates, under a cache.

    cache : cache policy: {policy: name, parameters of the policy}, or just the name
    scorers : settings for training a learned policy's scorers further; null leaves the scorers unchanged
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
            wrong = "in training each process has an engine of its own; use launch.processes instead of tensor_parallel"
            raise UserError(wrong, "rollout.tensor_parallel")
        self.check_model_len()

    def _check_learned(self) -> None:
        """Raise UserError for settings that do not work with a learned policy, or with training its scorers."""
        if isinstance(self.cache, LearnedConfig) and self.lora is not None:
            raise UserError(f"does not work with cache.policy {self.cache.name}; remove lora", "lora")
        if self.scorers is None:
            return
        if not isinstance(self.cache, KVpopPolicyConfig):
            raise UserError(
                f"{self.cache.name} has no scorers to train; remove scorers, or set cache.policy to kvpop", "scorers"
            )
        if self.cache.scorer.name == "recency":
            raise UserError(
                "the scorer recency has no parameters, so there is nothing to learn; remove scorers", "scorers"
            )
        self.refuse_own_groups()

    def foresees(self) -> bool:
        return self.scorers is not None

    def caches(self) -> list[PolicyConfig | None]:
        return [self.cache]

    def longest_row(self, prompt: int) -> int | None:
        return prompt + self.sampling().max_tokens

    def keeps_traces(self) -> bool:
        return self.cache.schedule.evicts
