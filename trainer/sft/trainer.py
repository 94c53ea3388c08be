"""Supervised fine-tuning with a full cache, based on TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import trl
from transformers import TrainerCallback

from rollout.engine import SamplingConfig
from rollout.make import make_engine
from sparse_rl.attention.interface import adopt
from sparse_rl.data.running_sum import grade
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.errors import UserError
from sparse_rl.experts.routing import has_experts
from sparse_rl.models.base import base_of
from sparse_rl.progress import stage
from trainer.arguments import refusals
from trainer.loading import text_parts
from trainer.options import check_options
from trainer.resumable import Resumable
from trainer.sft.config import SFTConfig


class ResumableSFTTrainer(Resumable, trl.SFTTrainer):
    """TRL's SFTTrainer, extended so that its runs resume exactly."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with text_parts():
            super().__init__(*args, **kwargs)
        model: Any = base_of(self.model)
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
    """Return a trainer for rows with a prompt and a completion.

    options : options of TRL and transformers; they override `config`
    problems : rows with prompt and answer on which `stop_at_accuracy` is measured
    """
    check_options(options, "sft")
    if options.get("activation_offloading") and not torch.cuda.is_available():
        raise UserError("needs a GPU; remove it", "activation_offloading")
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
        stop = StopAtAccuracy(config.stop_at_accuracy, config.stop_check_every, trainer, tokenizer, problems)
        trainer.add_callback(stop)
    return trainer


class StopAtAccuracy(TrainerCallback):
    """Stops the training when the accuracy on `problems` with a full cache reaches `target`."""

    def __init__(self, target: float, every: int, trainer: ResumableSFTTrainer, tokenizer: Any, problems: Any) -> None:
        self.target, self.every, self.problems = target, every, problems
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
        if accuracy >= self.target:
            control.should_training_stop = True
