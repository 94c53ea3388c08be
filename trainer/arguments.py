"""Builds the training arguments of TRL and transformers from our configurations."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from sparse_rl.attention.config import ATTENTION_KERNELS
from sparse_rl.errors import UserError, did_you_mean, without_room
from sparse_rl.experts.routing import routed_experts
from trainer.config import ALL_LINEAR, LaunchConfig, LoraConfig, TrainingConfig
from trainer.deepspeed import deepspeed_config, prepare_deepspeed
from trainer.memory import adapted_modules
from trainer.options import check_options

CHECKPOINTING = ("use_reentrant", "preserve_rng_state", "determinism_check", "early_stop", "debug")


@contextmanager
def refusals(*further: type[Exception]) -> Iterator[None]:
    """Raise a UserError in place of an exception with which TRL, transformers or PEFT refuses an option.

    Use this only around calls that check options: anywhere else a ValueError is a bug.

    further : exception classes that mean a refusal, in addition to ValueError and NotImplementedError
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
    """Return the options that transformers' and TRL's training arguments share. Set up DeepSpeed if `launch` uses it.

    dtype : dtype of the computation
    more : further options of TRL and transformers, name -> value; they override all other options
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
        "hub_strategy": "end",  # only the final model is pushed: trainer/export.py
        **more,
    }


def weights_dtype(dtype: str, launch: LaunchConfig, lora: LoraConfig | None) -> str:
    """Return the dtype in which the weights are kept: `dtype` with DeepSpeed or LoRA, else float32 (with autocast).

    Without DeepSpeed and LoRA, AdamW updates these weights directly, and bfloat16 would lose small updates.
    """
    return dtype if launch.zero_stage or lora is not None else "float32"


def model_options(dtype: str) -> dict[str, Any]:
    """Return the `model_init_kwargs` with which TRL loads the model."""
    return {"dtype": dtype, "device_map": None, "use_safetensors": True}


def adapters(lora: LoraConfig | None, model: Any) -> Any:
    """Return PEFT's configuration of the adapters that a recipe asks for.

    model : the model to adapt, which may be on the meta device
    """
    if lora is None:
        return None
    import peft

    targets = lora.target_modules
    if targets == ALL_LINEAR and routed_experts(model):
        targets = sorted({name.rpartition(".")[2] for name, _ in adapted_modules(model, lora)})
    with refusals():
        config = peft.LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    _refuse_experts(config, model, "lora.target_modules")
    return config


def check_adapters(model: Any, config: Any = None) -> None:
    """Raise UserError if evictions cannot be replayed with one of the PEFT adapters.

    model : the model, which may already have adapters
    config : PEFT's configuration of the adapters to add; None means to check the adapters that the model already has
    """
    for adapter in getattr(model, "peft_config", {}).values() if config is None else [config]:
        if getattr(adapter, "peft_type", None) != "LORA":
            kind = type(adapter).__name__
            raise UserError(f"only LoRA adapters can be trained under evictions, got {kind}", "peft_config")
        if adapter.lora_dropout:
            raise UserError("adapter dropout cannot be replayed; set lora_dropout to 0", "peft_config.lora_dropout")
        _refuse_experts(adapter, model, "peft_config.target_modules")


def _refuse_experts(adapter: Any, model: Any, key: str) -> None:
    """Raise UserError if PEFT adapts routers or experts, which it does also for their names in older checkpoints.

    model : the model; the name of a model that is not loaded yet is not checked
    """
    parameters = adapter.target_parameters
    if not parameters and hasattr(model, "get_decoder") and routed_experts(model):
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

        converted = copy.deepcopy(adapter)
        try:
            convert_peft_config_for_transformers(converted, model, None)
            parameters = converted.target_parameters
        except ValueError:  # only one of the two matrices that are one tensor now is named
            parameters = ["gate_up_proj"]
    if parameters:
        wrong = f"PEFT would adapt routers or experts ({', '.join(sorted(parameters))}), which is not supported"
        raise UserError(f"{wrong}; name layers of the attention, such as q_proj", key)


@dataclass
class ReplayedArguments:
    """Mixin for classes of training arguments of transformers and TRL: `class X(ReplayedArguments, TrainingArguments)`.

    kind : kind of recipe, which decides which options are refused (trainer/options.py)
    match_gradient : "through" lets gradients flow into the fits of policy am; "constant" treats the fits as constants
    """

    kind: ClassVar[str]
    attention_kernel: str = "gather"
    match_gradient: str = "through"

    def __post_init__(self) -> None:
        defaults = {
            f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            for f in dataclasses.fields(self)
        }
        check_options({k: v for k, default in defaults.items() if (v := getattr(self, k)) != default}, self.kind)
        if self.attention_kernel not in ATTENTION_KERNELS:
            suggestion = did_you_mean(self.attention_kernel, ATTENTION_KERNELS)
            wrong = f"must be one of {ATTENTION_KERNELS}, got {self.attention_kernel!r}{suggestion}"
            raise UserError(wrong, "attention_kernel")
        with refusals():
            super().__post_init__()  # type: ignore[misc]  # calls TrainingArguments, the next class in the MRO
        args: Any = self
        checkpointing = args.gradient_checkpointing_kwargs
        if isinstance(checkpointing, dict):
            if checkpointing.get("use_reentrant", False) is not False:
                raise UserError("reentrant gradient checkpointing is not supported; remove use_reentrant")
            if unknown := [name for name in checkpointing if name not in CHECKPOINTING]:
                wrong = f"its keys must be among {', '.join(CHECKPOINTING)}, got {unknown[0]!r}"
                raise UserError(wrong, "gradient_checkpointing_kwargs")
            args.gradient_checkpointing_kwargs = {"use_reentrant": False, **checkpointing}  # torch's default is True

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return {k: dataclasses.asdict(cast(Any, v)) if dataclasses.is_dataclass(v) else v for k, v in values.items()}
