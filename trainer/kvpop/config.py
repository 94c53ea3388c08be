"""Settings of KVpop's retrofit. Imports no torch."""

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
    """TrainingConfig with the papers' optimizer settings as defaults.

    learning_rate is the learning rate of the model; KVpopConfig has the learning rate of the scorers.
    """

    learning_rate: Positive = 8e-5
    weight_decay: NonNegative = 1e-4
    adam_beta2: BelowOne = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            raise UserError("depends on a metric; choose one that depends on the step alone", "lr_scheduler_type")


@dataclass(frozen=True, kw_only=True)
class KVpopLossConfig(DistillationLossConfig):
    """DistillationLossConfig that by default uses only the teacher's most probable tokens, as in the paper."""

    top_k: PositiveInt | None = 256


@dataclass(frozen=True, kw_only=True)
class GatesConfig(Configuration):
    """Settings for the training of DMS's gates (trainer/kvpop/gates.py). KVpop's papers do not give these values.

    NVIDIA's published code has the temperature 0.1 and the weight 1, and raises the compression over all steps, or over
    a given number of them.

    temperature : temperature of the Gumbel-sigmoid (tau)
    weight : weight of the loss that is added if too few gates are open
    anneal_steps : number of steps in which the target compression ratio rises linearly from 1 to cache.compression
    """

    temperature: Positive = 0.5
    weight: Positive = 5.0
    anneal_steps: NonNegativeInt = 100


@dataclass(frozen=True, kw_only=True)
class KVpopConfig(Configuration):
    """Settings of the retrofit of the learned policy `kvpop`.

    The student attends under the mask that its own scorers decide, and the scorers are trained together with it. If
    `cache.prefill` is dense, prompt tokens see all tokens before them, as in sampling. Packed rows have no prompt.

    max_length : maximum number of tokens of a text; longer texts are dropped
    packing : true joins texts into rows of max_length tokens, where each text sees the texts before it (the papers'
        choice); false puts one text into a row, and only the completion of the text is learned
    target : training target of the scorers, a measure of the future attention to each token
    boundary : settings of the scorers' loss
    boundary_weight : weight of the scorers' loss
    gates : settings for the gates of policy dms; under dms, target and boundary have no effect
    scorer_learning_rate : maximum learning rate of the scorers; learning_rate and lr_scheduler_type apply to the model
    scorer_final_learning_rate : final learning rate of the scorers, after a cosine decay
    scorer_warmup_steps : number of steps in which the scorers' learning rate rises to its maximum
    train_base : train the model as well as the scorers, by KL and cross-entropy
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
