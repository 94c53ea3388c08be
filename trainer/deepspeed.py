"""DeepSpeed ZeRO through transformers' own integration: the configuration, and what a machine without a GPU needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.config import LaunchConfig


def deepspeed_config(launch: LaunchConfig) -> dict[str, Any] | None:
    """The DeepSpeed configuration that is asked for; None where none is.

    There is no optimizer block: it would compile DeepSpeed's own Adam; torch's AdamW is used.
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
    """Before the training arguments are made. Without a GPU: gloo, and no C++ extension to compile."""
    if torch.cuda.is_available():
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for minutes
    # use_cpu skips the integration's own call; ZeRO-3 would then see a world of one.
    deepspeed.init_distributed(dist_backend="gloo")


@contextmanager
def outside_deepspeed(args: Any) -> Iterator[None]:
    """A model that is loaded here is whole, and not partitioned by ZeRO-3."""
    from transformers.integrations import deepspeed

    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if getattr(args, "hf_deepspeed_config", None) is not None:
            deepspeed.set_hf_deepspeed_config(args.hf_deepspeed_config)


def deepspeed_classes() -> list[Any]:
    """The classes in what DeepSpeed writes, which torch may make of data; none where it is not in use."""
    if "deepspeed" not in sys.modules:
        return []
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
