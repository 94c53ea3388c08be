"""What KVpop's retrofit is told. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparse_rl.attention.config import TargetConfig
from sparse_rl.config import BelowOne, Configuration, NonNegative, NonNegativeInt, Positive, PositiveInt
from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.config import BoundaryConfig
from trainer.config import TrainingConfig
from trainer.losses.config import DistillationLossConfig


@dataclass(frozen=True, kw_only=True)
class KVpopTrainingConfig(TrainingConfig):
    """TrainingConfig with the papers' optimizer. Its rates are the model's; the scorers' are KVpopConfig's."""

    learning_rate: Positive = 8e-5
    weight_decay: NonNegative = 1e-4
    adam_beta2: BelowOne = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            raise UserError("depends on a metric; name one that depends on the step alone", "lr_scheduler_type")


@dataclass(frozen=True, kw_only=True)
class KVpopLossConfig(DistillationLossConfig):
    """DistillationLossConfig over the teacher's most probable tokens, as in the paper."""

    top_k: PositiveInt | None = 256


@dataclass(frozen=True, kw_only=True)
class GatesConfig(Configuration):
    """How DMS's gates are trained (trainer/kvpop/gates.py); all ours, the papers leave it open.

    temperature : tau of the Gumbel-sigmoid
    weight : of the loss of what is missing of the target ratio
    anneal_steps : over so many the ratio that is aimed at rises to cache.compression
    """

    temperature: Positive = 0.5
    weight: Positive = 5.0
    anneal_steps: NonNegativeInt = 100


@dataclass(frozen=True, kw_only=True)
class KVpopConfig(Configuration):
    """Retrofit of the learned policy `kvpop`: a student under the mask of its own scorers, which are trained beside it.

    A prompt sees the whole of itself where `cache.prefill` is dense, as in decoding. Rows that are packed have none.

    max_length : S; longer texts are dropped
    packing : join texts into rows of S tokens; each sees those before it (the papers' choice). Off: one text to a row,
        and only its completion is learned
    target : what the scorers are to foresee
    boundary, boundary_weight : their loss
    gates : of the policy dms, which has neither target nor boundary
    scorer_learning_rate, scorer_final_learning_rate, scorer_warmup_steps : theirs: it rises, and falls along a cosine;
        learning_rate and lr_scheduler_type are the model's
    train_base : whether the model learns too, from KL and cross-entropy
    """

    max_length: PositiveInt = 16384
    packing: bool = True
    target: TargetConfig = field(default_factory=TargetConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    boundary_weight: NonNegative = 1.0
    gates: GatesConfig = field(default_factory=GatesConfig)
    scorer_learning_rate: Positive = 1e-3
    scorer_final_learning_rate: Positive = 8e-5
    scorer_warmup_steps: NonNegativeInt = 100
    train_base: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scorer_final_learning_rate > self.scorer_learning_rate:
            raise UserError("must not exceed scorer_learning_rate", "scorer_final_learning_rate")
