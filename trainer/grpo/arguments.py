"""What a SparseGRPOTrainer is given: TRL's GRPOConfig, made from ours in one place; and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import trl

from sparse_rl.attention.interface import ATTENTION
from sparse_rl.errors import UserError
from trainer.arguments import ReplayedArguments, check_adapters
from trainer.grpo.config import SparseGRPOConfig
from trainer.scored.config import ScorersConfig


@dataclass
class SparseGRPOArguments(ReplayedArguments, trl.GRPOConfig):
    """TRL's GRPOConfig with our configuration in it; made by `grpo_arguments`, so that both say the same.

    sparse : what is asked for; the trainer reads from here what TRL does not know
    scorers : how a learned policy's go on learning; None: they do not
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
    """The arguments of a SparseGRPOTrainer.

    options : further ones of TRL and transformers (trainer.arguments.training_options), and the above
    Raises UserError for what we or they refuse.
    """
    theirs = {one.name for one in dataclasses.fields(trl.GRPOConfig)}
    shared = {one.name: getattr(sparse, one.name) for one in dataclasses.fields(sparse) if one.name in theirs}
    shared["top_k"] = sparse.top_k or 0
    shared["model_init_kwargs"] = {**(model_init_kwargs or {}), "attn_implementation": ATTENTION}
    return SparseGRPOArguments(sparse=sparse, **shared, **options)


def check_given(given: Mapping[str, Any]) -> None:
    """Before a model is loaded: raise UserError for what cannot be trained with. given : GRPOTrainer's parameters"""
    if not isinstance(args := given.get("args"), SparseGRPOArguments):
        wrong = f"must be made by grpo_arguments (trainer/grpo/arguments.py), got {type(args).__name__}"
        raise UserError(wrong, "args")
    for name in ("tools", "environment_factory", "rollout_func"):
        if given.get(name):
            raise UserError("a trace covers one completion, sampled in one go by our engine; remove it", name)
    check_adapters(given["model"], given.get("peft_config"))


def check_made(trainer: Any) -> None:
    """Raise UserError for what TRL has switched on by itself, for this model or this launch."""
    if (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        wrong = "LoRA under ZeRO-3 makes gradient checkpointing reentrant, which cannot be replayed; take a lower stage"
        raise UserError(wrong)
    if trainer.aux_loss_enabled:
        raise UserError("there is no auxiliary loss of experts under evictions; set it to 0", "router_aux_loss_coef")
