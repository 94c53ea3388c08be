"""Builds the arguments of a SparseGRPOTrainer, a subclass of TRL's GRPOConfig, and refuses unsupported features."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import trl

from sparse_rl.attention.interface import ATTENTION
from sparse_rl.errors import UserError
from sparse_rl.experts.routing import has_experts
from sparse_rl.models.base import base_of
from trainer.arguments import ReplayedArguments, check_adapters
from trainer.grpo.config import SparseGRPOConfig
from trainer.scored.config import ScorersConfig


@dataclass
class SparseGRPOArguments(ReplayedArguments, trl.GRPOConfig):
    """TRL's GRPOConfig with our configuration as additional fields. Use `grpo_arguments` to build it.

    scorers : settings for training the scorers of a learned policy; None keeps the scorers fixed
    """

    kind: ClassVar[str] = "grpo"
    sparse: SparseGRPOConfig = field(default_factory=SparseGRPOConfig)
    scorers: ScorersConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sparse.check_options(vars(self))
        if self.sparse.importance_correction != "none":
            self.vllm_importance_sampling_mode = self.sparse.importance_correction
            self.vllm_importance_sampling_clip_max = self.sparse.importance_clip


def grpo_arguments(
    sparse: SparseGRPOConfig, *, model_init_kwargs: dict[str, Any] | None = None, **options: Any
) -> SparseGRPOArguments:
    """Return the arguments of a SparseGRPOTrainer. Fields that TRL and `sparse` share get the values of `sparse`.

    options : options of TRL and transformers (trainer.arguments.training_options), and fields of SparseGRPOArguments

    Raises UserError for an option that this project, TRL or transformers refuses.
    """
    trl_names = {f.name for f in dataclasses.fields(trl.GRPOConfig)}
    shared = {f.name: getattr(sparse, f.name) for f in dataclasses.fields(sparse) if f.name in trl_names}
    shared["top_k"] = sparse.top_k or 0
    shared["model_init_kwargs"] = {**(model_init_kwargs or {}), "attn_implementation": ATTENTION}
    return SparseGRPOArguments(sparse=sparse, **shared, **options)


def check_given(given: Mapping[str, Any]) -> None:
    """Raise UserError if SparseGRPOTrainer does not support one of the parameters `given` to GRPOTrainer."""
    if not isinstance(args := given.get("args"), SparseGRPOArguments):
        wrong = f"must be made by grpo_arguments (trainer/grpo/arguments.py), got {type(args).__name__}"
        raise UserError(wrong, "args")
    for name in ("tools", "environment_factory", "rollout_func"):
        if given.get(name):
            raise UserError(f"a trace covers one completion, sampled in one call of our engine; remove {name}", name)
    check_adapters(given["model"], given.get("peft_config"))


def check_made(trainer: Any) -> None:
    """Raise UserError if TRL or PEFT has enabled an unsupported feature because of the model or the launch.

    The balancing loss of experts is switched off in a dense model.
    """
    check_adapters(trainer.model)
    if (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        wrong = "LoRA under ZeRO-3 makes gradient checkpointing reentrant, which cannot be replayed; lower zero_stage"
        raise UserError(wrong)
    # A dense model's config.json may have the keys of experts.
    trainer.aux_loss_enabled = trainer.aux_loss_enabled and has_experts(base_of(trainer.model))
