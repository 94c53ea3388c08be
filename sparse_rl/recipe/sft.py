"""kind: sft, supervised fine-tuning with a full cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from rollout.config import read_origin
from sparse_rl.config import flat
from sparse_rl.errors import UserError
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.recipe.distillation import DistillRecipe
from sparse_rl.recipe.options import TAUGHT
from sparse_rl.recipe.run import Run, TrainRecipe, read_rows
from trainer.config import DistillationLossConfig, DistillConfig, SFTConfig, SFTTrainingConfig, TrainingConfig

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

    def on_traces(self) -> DistillRecipe:
        """Return the same training under recorded evictions: a distillation with cross-entropy alone, and no teacher.

        Raises UserError for keys that it does not have, and if the folders have different policies.
        """
        training = TrainingConfig(**{f.name: getattr(self.training, f.name) for f in fields(TrainingConfig)})
        for key in ("from_scratch", "completion_only_loss", "stop_at_accuracy", "stop_check_every"):
            if getattr(self.sft, key) != getattr(SFTConfig, key):
                raise UserError("has no effect on recorded rollouts; remove this key", key)
        for key in self.trainer_options.keys() - TAUGHT.keys():
            raise UserError("is an option of TRL's SFT, which recorded rollouts do not use; remove it", key)
        assert self.data.traces is not None
        try:
            origins = [read_origin(Path(folder)) for folder in self.data.traces]
        except UserError as error:
            raise UserError(error.message, "data.traces") from error
        policies = {origin.made_by.get("policy", "{}") for origin in origins}
        if len(policies) > 1:
            wrong = "the folders have several policies; use kind distill with kl_weight 0, ce_weight 1 and a cache"
            raise UserError(wrong, "data.traces")
        longest = max(origin.sampling.max_tokens for origin in origins)
        return DistillRecipe(
            **{f.name: getattr(self, f.name) for f in fields(TrainRecipe) if f.init and f.name != "training"},
            training=training,
            cache=PolicyConfig.from_block({"policy": "full", **json.loads(policies.pop())}),
            loss=DistillationLossConfig(kl_weight=0.0, ce_weight=1.0),
            distill=DistillConfig(max_completion_length=longest, max_length=self.sft.max_length, overlong="drop"),
        )

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
