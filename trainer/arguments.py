"""What TRL and transformers are given: their arguments made from our configurations, and their refusals as ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from sparse_rl.attention.config import ATTENTION_KERNELS
from sparse_rl.errors import UserError, did_you_mean
from trainer.config import LaunchConfig, LoraConfig, TrainingConfig
from trainer.deepspeed import deepspeed_config, prepare_deepspeed


@contextmanager
def refusals() -> Iterator[None]:
    """The ValueError with which a constructor of TRL, transformers or PEFT refuses its options, as a UserError.

    Their messages name the option. Only around such constructors: elsewhere a ValueError of theirs is a fault.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"an option is refused: {error}") from error


def training_options(
    training: TrainingConfig, launch: LaunchConfig, *, output_dir: str, seed: int, dtype: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    """What transformers' TrainingArguments, and those of TRL, all take; with DeepSpeed set up where `launch` asks.

    dtype : of the computation
    more : further options by their own names, above all else
    """
    deepspeed = deepspeed_config(launch)
    if deepspeed is not None:
        prepare_deepspeed()
    named = {field.name: getattr(training, field.name) for field in dataclasses.fields(TrainingConfig)}
    return {
        **named,
        "output_dir": output_dir,
        "seed": seed,
        "save_strategy": "steps" if training.save_steps else "no",
        "save_steps": training.save_steps or 1,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "use_cpu": not torch.cuda.is_available(),
        "deepspeed": deepspeed,
        "disable_tqdm": False,
        "hub_strategy": "end",  # what is pushed is the final model: trainer/export.py
        **more,
    }


def weights_dtype(dtype: str, launch: LaunchConfig, lora: LoraConfig | None) -> str:
    """Full training without DeepSpeed keeps float32 weights under autocast: AdamW on bfloat16 ones loses updates."""
    return dtype if launch.zero_stage or lora is not None else "float32"


def model_options(dtype: str) -> dict[str, Any]:
    """What TRL loads the model with, in its `model_init_kwargs`."""
    return {"dtype": dtype, "device_map": None, "use_safetensors": True}


def adapters(lora: LoraConfig | None) -> Any:
    """PEFT's configuration; None where there are no adapters."""
    if lora is None:
        return None
    import peft

    with refusals():
        return peft.LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, target_modules=lora.target_modules, task_type="CAUSAL_LM"
        )


class ReplayedArguments:
    """Before transformers' TrainingArguments, or TRL's: `class Mine(ReplayedArguments, TrainingArguments)`, a dataclass
    that adds our configurations as fields, and `attention_kernel`.
    """

    attention_kernel: str
    gradient_checkpointing_kwargs: Any

    def __post_init__(self) -> None:
        if self.attention_kernel not in ATTENTION_KERNELS:
            close = did_you_mean(self.attention_kernel, ATTENTION_KERNELS)
            wrong = f"must be one of {ATTENTION_KERNELS}, got {self.attention_kernel!r}{close}"
            raise UserError(wrong, "attention_kernel")
        checkpointing = self.gradient_checkpointing_kwargs
        if isinstance(checkpointing, dict) and checkpointing.get("use_reentrant"):
            raise UserError("reentrant gradient checkpointing is not supported; leave use_reentrant out")
        with refusals():
            super().__post_init__()  # type: ignore[misc]  # that of the class it stands before

    def to_dict(self) -> dict[str, Any]:
        """As transformers has it for its logs: plain values."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        ours = {name: value for name, value in values.items() if dataclasses.is_dataclass(value)}
        return {**values, **{name: dataclasses.asdict(cast(Any, value)) for name, value in ours.items()}}
