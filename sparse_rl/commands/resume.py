"""The checkpoint that `--resume` selects, and the recipe keys that may differ in the resumed run."""

from __future__ import annotations

from pathlib import Path

from sparse_rl.recipe import TrainRecipe

MAY_CHANGE = (
    *("output_dir", "run_name", "report_to", "logging_steps", "save_steps", "save_total_limit", "disable_tqdm"),
    *("log_completions", "num_completions_to_print", "rollout.progress", "replay_guard.enabled"),
    *("launch.machines", "launch.machine_rank", "launch.main_process_ip", "launch.main_process_port"),
)
MAY_CHANGE_BUT_FOR_ROUNDING = (
    *("gradient_checkpointing", "rollout.max_batch", "rollout.kv_cache_gb", "rollout.gpu_memory_utilization"),
    *("rollout.max_model_len", "rollout.sleep", "rollout.full_graphs", "rollout.exact", "attention_kernel"),
)
LENGTH = ("max_steps", "num_train_epochs")  # may also change if the learning rate does not depend on these keys
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")


def checkpoint_to_resume(recipe: TrainRecipe, resume: str) -> Path:
    """Return the checkpoint that `--resume` selects. Raises UserError if a key that must not change differs."""
    from trainer.resume import MayChange, checkpoint_of

    changeable: tuple[str, ...] = MAY_CHANGE
    training = recipe.training
    if training.lr_scheduler_type in ENDLESS and (training.warmup_steps == 0 or training.warmup_steps >= 1):
        changeable += LENGTH
    if recipe.resolved().get("attention_kernel") == "auto":
        changeable += ("attention_kernel",)  # not chosen yet: the training processes choose a kernel and check again
    may_change = MayChange(changeable, MAY_CHANGE_BUT_FOR_ROUNDING)
    return checkpoint_of(recipe.output_dir, resume, recipe.resolved(), may_change)
