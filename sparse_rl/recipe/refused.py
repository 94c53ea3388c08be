"""Keys of TRL and its scripts that a recipe does not take, each with what to write instead.

Refused is what would silently do nothing here, or break eviction replay; all else that TRL offers passes through.
"""

from __future__ import annotations

_ENGINE = "the rollout engine does not sample with it; remove it"
_VALIDATION = "use the validation block"
_ATTENTION = "attention under evictions is made here; remove it, or use attention_kernel (not in kinds sft and eval)"
_DEVICE = "the device is the one that is present; remove it"

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
    "lora_dropout": "a dropped weight cannot be replayed; remove it",
    "lora_target_modules": "use lora.target_modules",
    "num_processes": "use launch.processes",
    # what this project decides
    "model_init_kwargs": "use model and dtype",
    "bf16": "use dtype: bfloat16",
    "fp16": "use dtype: float16",
    "bf16_full_eval": "use dtype",
    "fp16_full_eval": "use dtype",
    "use_cpu": _DEVICE,
    "local_rank": "use the launch block",
    "deepspeed": "use launch.zero_stage and launch.offload",
    "parallelism_config": "use the launch block",
    "remove_unused_columns": "it is always false, since rewards read the other columns; remove it",
    "resume_from_checkpoint": "use the option --resume of the command",
    "save_strategy": "use save_steps",
    "generation_batch_size": "use steps_per_generation",
    "cast_lm_head_to_fp32": "the engine computes the head in the model's dtype, and both must agree; remove it",
    "auto_find_batch_size": "groups must be whole; lower per_device_train_batch_size instead",
    "save_only_model": "resuming needs the optimizer too; remove it",
    "hub_token": "a recipe is saved with the run; log in with `hf auth login` instead",
    "hub_strategy": "push_to_hub pushes the final model, at the end; remove it",
    "hub_always_push": "push_to_hub pushes the final model, at the end; remove it",
    "ignore_data_skip": "a resumed run is exact; remove it",
    "chat_template_kwargs": "use data.thinking",
    "use_liger_kernel": "its fused forward does not see the eviction trace; remove it",
    "liger_kernel_config": "its fused forward does not see the eviction trace; remove it",
    # the engine
    "use_vllm": "use rollout.engine",
    "use_transformers_paged": _ENGINE,
    "use_transformers_continuous_batching": _ENGINE,
    "transformers_continuous_batching_config": _ENGINE,
    "cache_implementation": "use the cache block",
    "generation_kwargs": _ENGINE,
    "min_p": _ENGINE,
    "repetition_penalty": _ENGINE,
    "max_tool_calling_iterations": _ENGINE,
    # evaluation while training
    "do_train": "the command decides; remove it",
    "do_eval": _VALIDATION,
    "eval_steps": "use validation.every",
    "per_device_eval_batch_size": _VALIDATION,
    "num_generations_eval": "use validation.samples",
    "load_best_model_at_end": "it needs TRL's evaluation, which the validation block replaces; remove it",
}

PREFIXES: dict[str, str] = {
    "vllm_importance_sampling": "use importance_correction and importance_clip",
    "vllm_": "use the rollout block",
    "eval_": _VALIDATION,
    "fsdp": "use launch.zero_stage; only DeepSpeed shards here",
}


def refusal(key: str) -> str | None:
    """What to write instead of `key`, or None if it is not refused."""
    if key in REFUSED:
        return f"not a key here: {REFUSED[key]}"
    for prefix, mend in PREFIXES.items():
        if key.startswith(prefix):
            return f"not a key here: {mend}"
    return None
