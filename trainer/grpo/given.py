"""What a SparseGRPOTrainer may be given, and made of that: before a model is loaded, and once TRL has set it up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_rl.errors import UserError
from trainer.arguments import check_adapters
from trainer.grpo.arguments import SparseGRPOArguments

SEVERAL_TURNS = "a trace covers one completion, sampled in one go by our engine; remove it"


def check_given(given: Mapping[str, Any]) -> None:
    """Raise UserError for what cannot be trained with. given : GRPOTrainer's parameters by their names"""
    args = given.get("args")
    if not isinstance(args, SparseGRPOArguments):
        raise UserError(
            f"must be made by grpo_arguments (trainer/grpo/arguments.py), got {type(args).__name__}", "args"
        )
    for name in ("tools", "environment_factory", "rollout_func"):
        if given.get(name):
            raise UserError(SEVERAL_TURNS, name)
    check_adapters(given["model"], given.get("peft_config"))


def check_made(trainer: Any) -> None:
    """Raise UserError for what TRL has switched on by itself, for this model or this launch."""
    if (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise UserError(
            "LoRA under ZeRO-3 makes gradient checkpointing reentrant, which cannot be replayed; take a lower stage"
        )
    if trainer.aux_loss_enabled:
        raise UserError("there is no auxiliary loss of experts under evictions; set it to 0", "router_aux_loss_coef")
