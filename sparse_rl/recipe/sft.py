"""kind: sft, supervised fine-tuning with a full cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from sparse_rl.config import flat
from sparse_rl.errors import UserError
from sparse_rl.recipe.run import Run, TrainRecipe, read_rows
from trainer.config import SFTConfig, SFTTrainingConfig

CHECK_PROBLEMS = 256  # problems on which stop_at_accuracy measures the accuracy


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

    @property
    def from_scratch(self) -> bool:
        return self.sft.from_scratch

    def make_trainer(self, run: Run, folder: Path) -> Any:
        from sparse_rl.models.load import untrained_model
        from trainer import rundir
        from trainer.arguments import adapters, model_options
        from trainer.sft import make_trainer

        problems, options = None, self.training_arguments()
        if self.sft.stop_at_accuracy is not None:
            assert self.data.synthetic is not None
            fresh = replace(self.data.synthetic, split="calibration", size=CHECK_PROBLEMS)
            problems = read_rows(replace(self.data, synthetic=fresh), run.tokenizer, ("prompt", "answer"))
        if self.from_scratch:
            model = untrained_model(self.model, self.seed, self.weights_dtype())
        else:
            model, options["model_init_kwargs"] = self.model, model_options(self.weights_dtype())
        further = adapters(self.lora, run.skeleton), [rundir.RunLog(folder)], problems
        return make_trainer(model, self.sft, options, run.tokenizer, run.rows, *further)
