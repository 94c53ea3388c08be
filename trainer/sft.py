"""Supervised fine-tuning with a full cache, on TRL's SFTTrainer: cold starts, and the quickstart's first stage."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from rollout.config import SamplingConfig
from rollout.make import make_engine
from sparse_rl.attention import adopt
from sparse_rl.data import load_data, prompt_ids
from sparse_rl.recipe import SFTRecipe
from sparse_rl.running_sum import grade
from trainer.resumable import Resumable

CHECK_PROBLEMS = 256


class ResumableSFTTrainer(Resumable, SFTTrainer):
    """TRL's SFTTrainer, whose runs resume exactly."""


def make_trainer(
    recipe: SFTRecipe, arguments: dict[str, Any], tokenizer: Any, data: Any, lora: Any, callbacks: list[TrainerCallback]
) -> SFTTrainer:
    """TRL's trainer on prompt-completion rows; the loss is on the completion."""
    args = SFTConfig(
        **{"completion_only_loss": recipe.completion_only_loss, "max_length": recipe.max_length, **arguments}
    )
    columns = [name for name in data.column_names if name not in ("prompt", "completion")]
    trainer = ResumableSFTTrainer(
        model=recipe.model,
        args=args,
        train_dataset=data.remove_columns(columns),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=callbacks,
    )
    if recipe.stop_at_accuracy is not None:
        trainer.add_callback(StopAtAccuracy(recipe, trainer, tokenizer))
    return trainer


class StopAtAccuracy(TrainerCallback):
    """Stop once full-cache accuracy on fresh problems of the synthetic task reaches the recipe's `stop_at_accuracy`."""

    def __init__(self, recipe: SFTRecipe, trainer: SFTTrainer, tokenizer: Any) -> None:
        self.target, self.every, self.trainer, self.tokenizer = (
            recipe.stop_at_accuracy or 1.0,
            recipe.stop_check_every,
            trainer,
            tokenizer,
        )
        assert recipe.data.synthetic is not None
        fresh = dataclasses.replace(recipe.data.synthetic, split="calibration", size=CHECK_PROBLEMS)
        self.rows = load_data(
            dataclasses.replace(recipe.data, synthetic=fresh), tokenizer, require=("prompt", "answer")
        )
        self.max_tokens = max(map(len, cast(Any, trainer.train_dataset)["input_ids"]))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self.every:  # a resumed run: the first check has left the model under this attention
            adopt(self.trainer.accelerator.unwrap_model(self.trainer.model))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every:
            return
        engine = make_engine(
            "hf", model=self.trainer.accelerator.unwrap_model(self.trainer.model), policy="full", max_batch=256
        )
        prompts = [prompt_ids(p, self.tokenizer) for p in self.rows["prompt"]]
        rollouts = engine.generate(prompts, SamplingConfig(self.max_tokens, seed=args.seed))
        texts = self.tokenizer.batch_decode([r.completion_ids for r in rollouts], skip_special_tokens=True)
        right = [grade(text, answer) for text, answer in zip(texts, self.rows["answer"], strict=True)]
        accuracy = sum(right) / len(right)
        due = control.should_log  # which a log resets: this step's loss would be lost
        self.trainer.log({"accuracy_full": accuracy})
        control.should_log = due
        if accuracy >= self.target:
            control.should_training_stop = True
