"""Settings of RL under a sparse cache. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from sparse_rl.config import AtLeastOne, Configuration, Fraction, NonNegative, Positive, PositiveInt, Rule, at_most
from sparse_rl.errors import UserError

Loss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True, kw_only=True)
class GuardConfig(Configuration):
    """Settings of the replay guard, which stops a run whose trainer and sampler disagree on log-probs.

    The guard limits the mean gap |log p_trainer - log p_sampler| of a batch. The limit is `floor`, or `factor` times
    the mean gap of the probe (texts that are sampled without evictions) if that is larger.

    factor : multiple of the probe's mean gap; None means 10 in float32 and 3 in half precision
    floor : minimum of the limit; None means 1e-4 in float32, 0.1 in bfloat16 and 0.02 in float16
    """

    enabled: bool = True
    factor: AtLeastOne | None = None
    floor: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class SparseGRPOConfig(Configuration):
    """Settings of RL under a sparse cache. Fields that TRL has too have the same meaning as in TRL.

    train_attention : `replay` applies the recorded evictions in training. `full` attends to all tokens, as the sampler
        did not; it is meant for comparison
    importance_correction : use of the importance ratio p_trainer / p_sampler in the loss: truncated or masked, per
        token or per sequence. With `none` the loss has no such ratio, and the old log-probs are the trainer's own
    importance_clip : value above which importance_correction truncates or masks the ratio
    zero_truncated_advantages : give advantage 0, and therefore no gradient, to outputs that reach max_completion_length
    uniform_groups : groups without reward variance have advantage 0; `drop` also excludes them from the loss's mean
    """

    num_generations: Annotated[int, Rule(">= 2", lambda v: v >= 2)] = 8
    max_completion_length: PositiveInt = 4096
    temperature: Positive = 1.0
    top_p: Fraction = 1.0
    top_k: PositiveInt | None = None
    loss_type: Loss = "grpo"
    epsilon: Annotated[Positive, at_most(1000)] = 0.2
    epsilon_high: Annotated[Positive, at_most(1000)] | None = None
    beta: Annotated[NonNegative, at_most(1000)] = 0.0
    scale_rewards: Literal["group", "batch", "none"] = "group"
    num_iterations: Annotated[PositiveInt, at_most(1000)] = 1
    steps_per_generation: PositiveInt | None = None
    train_attention: Literal["replay", "full"] = "replay"
    importance_correction: Correction = "token_truncate"
    importance_clip: Annotated[AtLeastOne, at_most(1_000_000)] = 2.0
    zero_truncated_advantages: bool = True
    uniform_groups: Literal["keep", "drop"] = "keep"
    replay_guard: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_type == "vespo" and self.importance_correction.startswith("sequence"):
            raise UserError("loss_type vespo needs token_truncate, token_mask or none", "importance_correction")
        if self.uniform_groups == "drop" and (self.beta or self.loss_type not in ("grpo", "sapo")):
            mend = "drop needs beta 0, and loss_type grpo or sapo, which average over responses"
            raise UserError(mend, "uniform_groups")

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise UserError if an option of TRL (name -> value) contradicts these settings."""
        if options.get("sync_ref_model") and not self.beta:
            raise UserError("needs beta above 0, without which there is no reference model", "sync_ref_model")
        if self.uniform_groups == "drop" and options.get("multi_objective_aggregation") == "normalize_then_sum":
            raise UserError("drop needs multi_objective_aggregation sum_then_normalize", "uniform_groups")
