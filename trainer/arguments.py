"""What TRL and transformers are given: their arguments made from our configurations, and their refusals as ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from sparse_rl.attention.config import ATTENTION_KERNELS
from sparse_rl.errors import UserError, did_you_mean, without_room
from trainer.config import LaunchConfig, LoraConfig, TrainingConfig
from trainer.deepspeed import deepspeed_config, prepare_deepspeed
from trainer.options import check_options

CHECKPOINTING = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop", "debug")


@contextmanager
def refusals(*further: type[Exception]) -> Iterator[None]:
    """The errors with which a constructor of TRL, transformers or PEFT refuses its options, as a UserError.

    Their messages name the option. Only around such constructors: elsewhere a ValueError of theirs is a fault.

    further : errors with which this constructor refuses beside ValueError and NotImplementedError
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if without_room(error) is not None or not isinstance(error, (ValueError, NotImplementedError, *further)):
            raise
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


def check_adapters(model: Any, config: Any = None) -> None:
    """Raise UserError for adapters, of PEFT's, under which evictions cannot be replayed.

    model : which may carry some already; config : of those that it is to be given, or None
    """
    for one in getattr(model, "peft_config", {}).values() if config is None else [config]:
        if getattr(one, "peft_type", None) != "LORA":
            kind = type(one).__name__
            raise UserError(f"of PEFT's adapters only LoRA's can be trained under evictions, got {kind}", "peft_config")
        if one.lora_dropout:
            raise UserError("a dropped weight cannot be replayed; set it to 0", "peft_config.lora_dropout")


@dataclass
class ReplayedArguments:
    """Before transformers' TrainingArguments, or TRL's: `class Mine(ReplayedArguments, TrainingArguments)`, a dataclass
    that adds our configurations as fields. kind : of recipe, whose options it takes.

    attention_kernel : one of ATTENTION_KERNELS
    match_gradient : through or constant; see trainer.config.ReplayConfig
    """

    kind: ClassVar[str]
    attention_kernel: str = "gather"
    match_gradient: str = "through"

    def __post_init__(self) -> None:
        usual = {
            f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            for f in dataclasses.fields(self)
        }
        check_options({k: v for k, default in usual.items() if (v := getattr(self, k)) != default}, self.kind)
        if self.attention_kernel not in ATTENTION_KERNELS:
            close = did_you_mean(self.attention_kernel, ATTENTION_KERNELS)
            wrong = f"must be one of {ATTENTION_KERNELS}, got {self.attention_kernel!r}{close}"
            raise UserError(wrong, "attention_kernel")
        with refusals():
            super().__post_init__()  # type: ignore[misc]  # that of the class it stands before
        ours: Any = self
        checkpointing = ours.gradient_checkpointing_kwargs
        if isinstance(checkpointing, dict):
            if checkpointing.get("use_reentrant", False) is not False:
                raise UserError("reentrant gradient checkpointing is not supported; leave use_reentrant out")
            if unknown := [name for name in checkpointing if name not in CHECKPOINTING]:
                wrong = f"{unknown[0]!r} is none of {', '.join(CHECKPOINTING)}"
                raise UserError(wrong, "gradient_checkpointing_kwargs")
            ours.gradient_checkpointing_kwargs = {"use_reentrant": False, **checkpointing}  # else torch's default: True

    def to_dict(self) -> dict[str, Any]:
        """As transformers has it for its logs: plain values."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return {k: dataclasses.asdict(cast(Any, v)) if dataclasses.is_dataclass(v) else v for k, v in values.items()}
