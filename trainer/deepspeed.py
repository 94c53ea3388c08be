"""Configures DeepSpeed ZeRO for transformers' integration, and sets DeepSpeed up on a machine without a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.config import LaunchConfig


def deepspeed_config(launch: LaunchConfig) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration, or None if `launch` uses no DeepSpeed.

    The configuration has no optimizer block. With one, DeepSpeed would compile its own Adam and not use torch's AdamW.
    """
    if not launch.zero_stage:
        return None
    zero: dict[str, Any] = {"stage": launch.zero_stage}
    if launch.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if launch.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if launch.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


def prepare_deepspeed() -> None:
    """Set up DeepSpeed on a machine without a GPU: use gloo, and compile no C++ extension.

    Call this before the training arguments are made.
    """
    if torch.cuda.is_available():
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else DeepSpeed compiles it, for minutes
    # With use_cpu, transformers does not call init_distributed itself, and ZeRO-3 would see a world size of 1.
    deepspeed.init_distributed(dist_backend="gloo")


@contextmanager
def outside_deepspeed(args: Any) -> Iterator[None]:
    """Keep ZeRO-3 from partitioning the models that are loaded in this block."""
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if getattr(args, "hf_deepspeed_config", None) is not None:
            deepspeed.set_hf_deepspeed_config(args.hf_deepspeed_config)


def deepspeed_classes() -> list[Any]:
    """Return the classes that torch may unpickle from DeepSpeed's files."""
    if "deepspeed" not in sys.modules:
        return []
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
