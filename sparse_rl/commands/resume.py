"""Which checkpoint `--resume` means, and which keys of a recipe may differ in the run that continues it."""

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
LENGTH = ("max_steps", "num_train_epochs")  # these may change too where the learning rate does not depend on them
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")


def checkpoint_to_resume(recipe: TrainRecipe, resume: str) -> Path:
    """The checkpoint that `--resume` means for a recipe; see trainer.resume.checkpoint_of."""
    from trainer.resume import MayChange, checkpoint_of

    freely: tuple[str, ...] = MAY_CHANGE
    training = recipe.training
    if training.lr_scheduler_type in ENDLESS and (training.warmup_steps == 0 or training.warmup_steps >= 1):
        freely += LENGTH
    if recipe.resolved().get("attention_kernel") == "auto":
        freely += ("attention_kernel",)  # not chosen yet: the processes that train will ask again
    may_change = MayChange(freely, MAY_CHANGE_BUT_FOR_ROUNDING)
    return checkpoint_of(recipe.output_dir, resume, recipe.resolved(), may_change)
