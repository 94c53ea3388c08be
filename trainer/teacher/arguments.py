"""transformers' arguments with the configuration of the taught trainings in them."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments

from trainer.arguments import ReplayedArguments
from trainer.losses.config import DistillationLossConfig


@dataclass
class TaughtArguments(ReplayedArguments, TrainingArguments):
    """What every TaughtTrainer has.

    loss : what is minimised
    attention_kernel : one of ATTENTION_KERNELS
    match_gradient : through or constant; see trainer.config.ReplayConfig
    """

    loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
    attention_kernel: str = "gather"
    match_gradient: str = "through"

    def __post_init__(self) -> None:
        self.remove_unused_columns = False
        super().__post_init__()
