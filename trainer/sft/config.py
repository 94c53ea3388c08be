"""Settings of supervised fine-tuning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_rl.config import Configuration, Fraction, Positive, PositiveInt
from trainer.config import Scheduler, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class SFTTrainingConfig(TrainingConfig):
    """TrainingConfig with the usual learning rate and schedule of fine-tuning."""

    learning_rate: Positive = 2e-5
    lr_scheduler_type: Scheduler = "linear"


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Configuration):
    """Supervised fine-tuning with a full cache: for the quickstart's first stage, cold starts, and uptraining.

    Packing is TRL's: packing: true keeps documents apart; with packing_strategy: wrapped they see each other.

    from_scratch : initialise new weights from the recipe's seed; only configuration and tokenizer come from the model
    stop_at_accuracy : stop once full-cache accuracy on fresh problems reaches this value
    stop_check_every : number of steps between these checks of the accuracy
    """

    max_length: PositiveInt | None = 4096
    completion_only_loss: bool = True
    from_scratch: bool = False
    stop_at_accuracy: Fraction | None = None
    stop_check_every: PositiveInt = 50
