"""What supervised fine-tuning is told. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_rl.config import Configuration, Fraction, Positive, PositiveInt
from trainer.config import Scheduler, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class SFTTrainingConfig(TrainingConfig):
    """TrainingConfig with fine-tuning's usual rate and schedule."""

    learning_rate: Positive = 2e-5
    lr_scheduler_type: Scheduler = "linear"


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Configuration):
    """Supervised fine-tuning with a full cache: the start of the quickstart, of cold starts, and uptraining.

    Packing is TRL's: packing: true keeps documents apart, with packing_strategy: wrapped they see each other.

    from_scratch : draw new weights, from the recipe's seed; the model gives its configuration and tokenizer only
    stop_at_accuracy : stop once full-cache accuracy on fresh problems reaches it, looked at every stop_check_every
    """

    max_length: PositiveInt | None = 4096
    completion_only_loss: bool = True
    from_scratch: bool = False
    stop_at_accuracy: Fraction | None = None
    stop_check_every: PositiveInt = 50
