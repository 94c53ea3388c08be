"""Options of transformers' and TRL's trainers: those that a recipe passes on unchanged, and those that it rejects.

The first list, option -> type, is written out so that a recipe can be checked without importing TRL. A type is narrower
than the library's if the library would detect a wrong value only during training. The second list, option -> what to
write instead, has what a recipe expresses with other keys; trainer/options.py has what would break eviction replay.
"""

from __future__ import annotations

from typing import Any, Literal

from sparse_rl.config import NonNegative, NonNegativeInt, Positive, PositiveInt, Probability
from trainer.options import instead

LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
Order = Literal["random", "sequential"]
Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adafactor",
    "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd", "adagrad", "adamw_bnb_8bit",
    "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit",
    "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop", "rmsprop_bnb",
    "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor",
    "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo",
    "grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw",
    "apollo_adamw_layerwise", "stable_adamw",
]  # fmt: skip

TRAINING: dict[str, Any] = {
    "lr_scheduler_kwargs": dict | str | None,
    "optim": Optimizer,
    "optim_args": str | None,
    "adam_epsilon": Positive,
    "optim_target_modules": str | list[str] | None,
    "tf32": bool | None,
    "gradient_checkpointing_kwargs": dict[str, Any] | str | None,
    "torch_compile": bool,
    "torch_compile_backend": str | None,
    "torch_compile_mode": str | None,
    "torch_empty_cache_steps": PositiveInt | None,
    "logging_strategy": Literal["no", "steps", "epoch"],
    "logging_first_step": bool,
    "log_on_each_node": bool,
    "log_level": LogLevel,
    "log_level_replica": LogLevel,
    "disable_tqdm": bool | None,
    "project": str,
    "trackio_space_id": str | None,
    "trackio_bucket_id": str | None,
    "trackio_static_space_id": str | Literal[False] | None,
    "push_to_hub": bool,
    "hub_private_repo": bool | None,
    "hub_model_id": str | None,
    "hub_revision": str | None,
    "full_determinism": bool,
    "dataloader_drop_last": bool,
    "dataloader_num_workers": NonNegativeInt,
    "dataloader_pin_memory": bool,
    "dataloader_persistent_workers": bool,
    "dataloader_prefetch_factor": PositiveInt | None,
    "dataloader_multiprocessing_context": Literal["fork", "spawn", "forkserver"] | None,
    "ddp_find_unused_parameters": bool | None,
    "ddp_bucket_cap_mb": PositiveInt | None,
    "ddp_broadcast_buffers": bool | None,
    "ddp_static_graph": bool | None,
    "ddp_backend": Literal["nccl", "gloo", "mpi", "cncl", "hccl", "mccl", "xccl"] | None,
    "ddp_timeout": PositiveInt,
    "debug": Literal["", "underflow_overflow"] | list[Literal["underflow_overflow"]],
    "skip_memory_metrics": bool,
}

VALIDATED: dict[str, Any] = {  # for the kinds that can have a validation dataset
    "metric_for_best_model": str | None,
    "greater_is_better": bool | None,
}

TAUGHT: dict[str, Any] = {
    **TRAINING,
    **VALIDATED,
    "data_seed": int | None,
    "train_sampling_strategy": Order,
}

GRPO: dict[str, Any] = {
    **TRAINING,
    **VALIDATED,
    "router_aux_loss_coef": NonNegative | None,
    "disable_dropout": bool,
    "ds3_gather_for_generation": bool,
    "shuffle_dataset": bool | None,
    "pad_to_multiple_of": PositiveInt | Literal["auto"] | None,
    "delta": Positive | None,
    "sapo_temperature_neg": Positive,
    "sapo_temperature_pos": Positive,
    "vespo_k_pos": float,
    "vespo_lambda_pos": float,
    "vespo_k_neg": float,
    "vespo_lambda_neg": float,
    "importance_sampling_level": Literal["token", "sequence"],
    "multi_objective_aggregation": Literal["sum_then_normalize", "normalize_then_sum"],
    "mask_truncated_completions": bool,
    "sync_ref_model": bool,
    "ref_model_mixup_alpha": Probability,
    "ref_model_sync_steps": PositiveInt,
    "top_entropy_quantile": Probability,
    "entropy_coef": float,
    "use_adaptive_entropy": bool,
    "entropy_coef_min": float,
    "entropy_coef_max": float,
    "entropy_coef_delta": float,
    "entropy_target": float,
    "off_policy_mask_threshold": Positive | None,
    "use_bias_correction_kl": bool,
    "log_completions": bool,
    "num_completions_to_print": PositiveInt | None,
    "log_unique_prompts": bool,
    "log_completions_hub_repo": str | None,
    "max_tool_calling_iterations": PositiveInt | None,
}

SFT: dict[str, Any] = {
    **TRAINING,
    "average_tokens_across_devices": bool,
    "label_smoothing_factor": Probability,
    "use_cache": bool,
    "neftune_noise_alpha": Positive | None,
    "include_num_input_tokens_seen": Literal["all", "non_padding", "no"] | bool,
    "data_seed": int | None,
    # group_by_length is left out: it draws from the process's random state, so a resumed run could not repeat its order
    "train_sampling_strategy": Order | Literal["batch_rebalance"],
    "router_aux_loss_coef": float | None,
    "chat_template_path": str | None,
    "dataset_num_proc": PositiveInt | None,
    "eos_token": str | None,
    "truncation_mode": Literal["keep_start", "keep_end"],
    "shuffle_dataset": bool,
    "packing": bool,
    "packing_strategy": Literal["bfd", "bfd_split", "wrapped"],
    "padding_free": bool,
    "pad_to_multiple_of": PositiveInt | Literal["auto"] | None,
    "assistant_only_loss": bool,
    "loss_type": Literal["nll", "dft", "chunked_nll"],
    "activation_offloading": bool,
    "pad_token": str | None,
}

PASSED_THROUGH: dict[str, dict[str, Any]] = {  # by kind of recipe
    "grpo": GRPO,
    "distill": TAUGHT,
    "kvpop": TAUGHT,
    "sft": SFT,
}

# ---- rejected options ------------------------------------------------------------------------------------------------

_VALIDATION = "use the validation block"
_ATTENTION = "sparse-rl computes attention itself; use attention_kernel, or remove this option in kinds sft and eval"
NOT_HERE = "not a key here: "
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
    return hint and f"{NOT_HERE}{hint}"
