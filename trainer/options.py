"""Lists the TRL and transformers options that a training refuses, each with the advice to show in the error: a refused
option would have no effect, break replay, or make a resumed run inexact. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_rl.errors import UserError

_SAMPLES = "the rollout engine does not sample with it; remove it"
_IDLE = "it changes nothing here; remove it"
_EXACT = "a resumed run would not be exact with it; remove it"
_FUSED = "its fused forward pass ignores the eviction trace; remove it"

ANY: dict[str, str] = {  # in any training
    "use_vllm": "use the key rollout.engine (in Python: the argument rollout)",
    **dict.fromkeys(("use_transformers_paged", "use_transformers_continuous_batching"), _SAMPLES),
    **dict.fromkeys(("transformers_continuous_batching_config", "generation_kwargs", "repetition_penalty"), _SAMPLES),
    "cache_implementation": "use the cache block (in Python: the argument cache)",
    "chat_template_kwargs": "use the key data.thinking (in Python: the argument thinking)",
    "cast_lm_head_to_fp32": "the engine computes the head in the model's dtype, and both must agree; remove it",
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), _FUSED),
    "trust_remote_code": "code from a model's repository is never run; remove it",
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "validation runs in the dtype of training; remove it"),
    "parallelism_config": "use the launch block instead",
    "auto_find_batch_size": "another batch size could split a group; lower per_device_train_batch_size instead",
    "save_only_model": "resuming needs the optimizer too; remove it",
    **dict.fromkeys(("ignore_data_skip", "accelerator_config", "dataloader_in_order"), _EXACT),
    "enable_jit_checkpoint": "it saves in the middle of a step, where no run can resume exactly; use save_steps",
    "save_on_each_node": "checkpoints need a file system that all machines share; remove it",
    "logging_nan_inf_filter": "a loss that is NaN or infinite stops the run; remove it",
    **dict.fromkeys(("do_predict", "label_names", "length_column_name", "prediction_loss_only"), _IDLE),
    **dict.fromkeys(("include_for_metrics", "batch_eval_metrics"), _IDLE),
}

TAUGHT: dict[str, str] = {  # under evictions
    **ANY,
    "neftune_noise_alpha": "evictions that are sampled without noise cannot be replayed with noise; remove it",
    "use_cache": "training replays the sampler's evictions, without a cache of its own; remove it",
    "label_smoothing_factor": _IDLE,
    "average_tokens_across_devices": _IDLE,
    "include_num_input_tokens_seen": "tokens are counted in any case; remove it",
}

GRPO: dict[str, str] = {
    **TAUGHT,
    "train_sampling_strategy": "use shuffle_dataset",
    "data_seed": "use seed",
    "log_multimodal": _IDLE,
}

SFT: dict[str, str] = {
    **ANY,
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), "this kind has no validation; remove it"),
    "dataset_text_field": "rows have a prompt and a completion; remove it",
    "dataset_kwargs": "rows are always prepared; remove it",
}

REFUSED: dict[str, dict[str, str]] = {"grpo": GRPO, "distill": TAUGHT, "kvpop": TAUGHT, "sft": SFT}  # by kind

PREFIXES: dict[str, str] = {
    "vllm_importance_sampling": "use importance_correction and importance_clip",
    "vllm_": "use the rollout block (in Python: the argument rollout)",
    "fsdp": "use launch.zero_stage; only DeepSpeed shards here",
}


def instead(option: str, kind: str) -> str | None:
    """Return the advice for an option that a kind of training refuses, or None if the option is allowed."""
    by_prefix = (mend for prefix, mend in PREFIXES.items() if option.startswith(prefix))
    return REFUSED.get(kind, ANY).get(option) or next(by_prefix, None)


def check_options(given: Mapping[str, Any], kind: str) -> None:
    """Raise UserError if a training of this kind refuses an option in `given`."""
    for option in given:
        if mend := instead(option, kind):
            raise UserError(f"not an option here: {mend}", option)
