"""Settings of supervised fine-tuning. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_rl.config import Configuration, Fraction, Positive, PositiveInt
from trainer.config import Scheduler, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class SFTTrainingConfig(TrainingConfig):
    """TrainingConfig with the usual learning rate and schedule of fine-tuning as defaults."""

    learning_rate: Positive = 2e-5
    lr_scheduler_type: Scheduler = "linear"


@dataclass(frozen=True, kw_only=True)
class SFTConfig(Configuration):
    """Settings of supervised fine-tuning with a full cache.

    With `packing: true`, TRL packs several documents into a row, and a token sees only its own document. With
    `packing_strategy: wrapped`, a token also sees the documents before its own in the row.

    from_scratch : initialise new weights from the recipe's seed; only configuration and tokenizer come from the model
    stop_at_accuracy : accuracy on newly generated problems, with a full cache, at which the training stops
    stop_check_every : number of steps between measurements of this accuracy
    """

    max_length: PositiveInt | None = 4096
    completion_only_loss: bool = True
    from_scratch: bool = False
    stop_at_accuracy: Fraction | None = None
    stop_check_every: PositiveInt = 50
