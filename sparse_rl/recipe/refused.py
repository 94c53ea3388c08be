"""Options of TRL and its scripts that a recipe rejects, each with a hint on what to write instead.

This file lists the options that a recipe expresses with other keys. trainer/options.py lists the options that would
silently do nothing or break eviction replay. All other options of TRL are passed on (passed_through.py).
"""

from __future__ import annotations

from trainer.options import instead

_VALIDATION = "use the validation block"
_ATTENTION = "sparse-rl computes attention itself; use attention_kernel, or remove this option in kinds sft and eval"
_DEVICE = "the device is detected automatically; remove this option"

REFUSED: dict[str, str] = {
    # names of TRL's scripts and of older versions
    "model_name_or_path": "use model",
    "torch_dtype": "use dtype",
    "attn_implementation": _ATTENTION,
    "dataset_name": "use data.path",
    "dataset_config": "use data.subset",
    "dataset_train_split": "use data.split",
    "dataset_prompt_column": "use data.columns, as in {prompt: problem}",
    "system_prompt": "use data.system_prompt",
    "max_prompt_length": "use data.max_prompt_tokens",
    "reward_funcs": "use rewards",
    "reward_weights": "give each reward its weight in rewards",
    "use_peft": "use the lora block",
    "lora_r": "use lora.r",
    "lora_alpha": "use lora.alpha",
    "lora_dropout": "a dropped weight cannot be replayed; remove this option",
    "lora_target_modules": "use lora.target_modules",
    "num_processes": "use launch.processes",
    # set by other keys of the recipe, or by the command
    "model_init_kwargs": "use model and dtype",
    "bf16": "use dtype: bfloat16",
    "fp16": "use dtype: float16",
    "use_cpu": _DEVICE,
    "local_rank": "use the launch block",
    "deepspeed": "use launch.zero_stage and launch.offload",
    "remove_unused_columns": "always false, because rewards read the other columns; remove this option",
    "resume_from_checkpoint": "use the option --resume of the command",
    "restore_callback_states_from_checkpoint": "the callbacks of a recipe have no state; remove this option",
    "save_strategy": "use save_steps",
    "generation_batch_size": "use steps_per_generation",
    "hub_token": "a recipe is saved with the run; log in with `hf auth login` instead",
    "hub_strategy": "push_to_hub pushes only the final model, at the end; remove this option",
    "hub_always_push": "push_to_hub pushes only the final model, at the end; remove this option",
    # evaluation during training
    "do_train": "the command decides; remove this option",
    "do_eval": _VALIDATION,
    "eval_steps": "use validation.every",
    "per_device_eval_batch_size": _VALIDATION,
    "num_generations_eval": "use validation.samples",
    "load_best_model_at_end": "needs TRL's evaluation, which the validation block replaces; remove this option",
}

PREFIXES: dict[str, str] = {"eval_": _VALIDATION}


def refusal(key: str, kind: str) -> str | None:
    """Return the error for a refused key, with a hint on what to write instead; None for other keys."""
    prefix_hints = (hint for prefix, hint in PREFIXES.items() if key.startswith(prefix))
    hint = REFUSED.get(key) or next(prefix_hints, None) or instead(key, kind)
    return hint and f"not a key here: {hint}"
