"""kind: sft, supervised fine-tuning with a full cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparse_rl.config import flat
from sparse_rl.errors import UserError
from sparse_rl.recipe.kinds.base import TrainRecipe
from trainer.sft.config import SFTConfig, SFTTrainingConfig


@dataclass(frozen=True, kw_only=True)
class SFTRecipe(TrainRecipe):
    """Supervised fine-tuning with a full cache: the first stage of the quickstart, cold starts, and uptraining."""

    kind: ClassVar[str] = "sft"
    training: SFTTrainingConfig = flat(SFTTrainingConfig)
    sft: SFTConfig = flat(SFTConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sft.stop_at_accuracy is not None:
            if self.data.synthetic is None:
                raise UserError("needs fresh problems: use data.synthetic, or remove this key", "stop_at_accuracy")
            if self.data.synthetic.task != "running_sum":
                raise UserError("can only grade answers to the task running_sum; remove this key", "stop_at_accuracy")
        if self.sft.from_scratch and self.lora is not None:
            raise UserError("adapters on random weights learn nothing useful; remove from_scratch or lora", "lora")

    def longest_row(self, prompt: int) -> int | None:
        return self.sft.max_length
