"""Supervised fine-tuning with a full cache, based on TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import trl
from transformers import TrainerCallback
from trl.trainer import sft_trainer

from rollout.engine import SamplingConfig, make_engine
from sparse_rl.attention.families import refuse_states
from sparse_rl.attention.interface import adopt
from sparse_rl.data.synthetic import grade
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.experts import has_experts
from sparse_rl.models.load import base_of
from sparse_rl.progress import stage
from trainer.arguments import refusals
from trainer.base import Resumable, text_parts
from trainer.config import SFTConfig
from trainer.options import check_options


class ResumableSFTTrainer(Resumable, trl.SFTTrainer):
    """TRL's SFTTrainer, extended so that its runs resume exactly."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with text_parts(sft_trainer):
            super().__init__(*args, **kwargs)
        model: Any = base_of(self.model)
        own: Any = self.args
        if own.packing or own.padding_free:
            refuse_states(model.config, "the texts of a packed row would share one state", "packing")
        if not has_experts(model):  # its config.json may still have the keys of experts
            self.aux_loss_enabled = False
            if hasattr(model.config, "output_router_logits"):
                model.config.output_router_logits = False


def make_trainer(
    model: Any,
    config: SFTConfig,
    options: dict[str, Any],
    tokenizer: Any,
    data: Any,
    lora: Any,
    callbacks: Sequence[TrainerCallback],
    problems: Any = None,
) -> ResumableSFTTrainer:
    """Return a trainer for rows with a prompt and a completion. options : of TRL, which override `config`; problems :
    rows with prompt and answer on which `stop_at_accuracy` is measured"""
    check_options(options, "sft")
    ours = {"completion_only_loss": config.completion_only_loss, "max_length": config.max_length}
    with refusals():
        args = trl.SFTConfig(**{**ours, **options})
    trainer = ResumableSFTTrainer(
        model=model,
        args=args,
        train_dataset=data.select_columns(["prompt", "completion"]),
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=list(callbacks),
    )
    if config.stop_at_accuracy is not None:
        trainer.add_callback(StopAtAccuracy(config, trainer, tokenizer, problems))
    return trainer


class StopAtAccuracy(TrainerCallback):
    """Stops the training when the accuracy on `problems` with a full cache reaches `stop_at_accuracy`."""

    def __init__(self, config: SFTConfig, trainer: ResumableSFTTrainer, tokenizer: Any, problems: Any) -> None:
        self.config, self.every, self.problems = config, config.stop_check_every, problems
        self.trainer, self.tokenizer = trainer, tokenizer
        self.max_tokens = max(map(len, cast(Any, trainer.train_dataset)["input_ids"]))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Before the checkpoint of a resumed run, a check of the accuracy had switched the model to our attention.
        if state.global_step >= self.every:
            adopt(self.trainer.accelerator.unwrap_model(self.trainer.model))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.every:
            return
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        engine = make_engine("hf", model=model, policy="full", max_batch=256)
        prompts = [prompt_ids(p, self.tokenizer) for p in self.problems["prompt"]]
        with stage("evaluating"):
            rollouts = engine.generate(prompts, SamplingConfig(self.max_tokens, seed=args.seed))
        texts = self.tokenizer.batch_decode([r.completion_ids for r in rollouts], skip_special_tokens=True)
        correct = [grade(text, answer) for text, answer in zip(texts, self.problems["answer"], strict=True)]
        accuracy = sum(correct) / len(correct)
        due = control.should_log  # `log` resets should_log, which would suppress the log of this step's loss
        self.trainer.log({"accuracy_full": accuracy})
        control.should_log = due
        if accuracy >= cast(float, self.config.stop_at_accuracy):
            control.should_training_stop = True
