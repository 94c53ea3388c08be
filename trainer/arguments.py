"""From settings to the arguments of TRL and transformers: options, dtypes, DeepSpeed's configuration, LoRA adapters."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform

import torch
from torch.nn import Linear
from trl import import_utils

from sparse_rl.attention.config import ATTENTION_KERNELS
from sparse_rl.attention.startup import choose_kernel
from sparse_rl.config import default_of, own_fields
from sparse_rl.errors import UserError, listed, without_room
from sparse_rl.experts import routed_experts
from trainer.config import ALL_LINEAR, LaunchConfig, LoraConfig, TrainingConfig
from trainer.memory import adapted_modules, lora_parameters
from trainer.options import check_options, instead

T = TypeVar("T")


@contextmanager
def without_vllm() -> Iterator[None]:
    """Import TRL's GRPOTrainer without vLLM, which would take ten seconds. TRL imports it when it first asks for it."""
    installed, absent = import_utils.is_vllm_available, lambda min_version=None: False
    import_utils.is_vllm_available = absent
    try:
        yield
    finally:
        import_utils.is_vllm_available = installed
    for module in map(sys.modules.get, ("trl.generation.vllm_client", "trl.generation.vllm_generation")):
        if module and module.is_vllm_available is absent:
            vars(module)["is_vllm_available"] = lambda again=module: importlib.reload(again).is_vllm_available()


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

    more : further options of TRL and transformers, name -> value; they override all other options
    """
    deepspeed = deepspeed_config(launch)
    if deepspeed is not None:
        prepare_deepspeed()
    return {
        **{field.name: getattr(training, field.name) for field in dataclasses.fields(TrainingConfig)},
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


def weights_dtype(dtype: str, zero_stage: int, lora: bool) -> str:
    """Return the dtype in which the weights are kept: `dtype` with DeepSpeed or LoRA, else float32 (with autocast).
    AdamW then updates these weights directly, and bfloat16 would lose small updates."""
    return dtype if zero_stage or lora else "float32"


def model_options(dtype: str) -> dict[str, Any]:
    """Return the `model_init_kwargs` with which TRL loads the model."""
    return {"dtype": dtype, "device_map": None, "use_safetensors": True}


def adapters(lora: LoraConfig | None, model: Any) -> Any:
    """Return PEFT's configuration of the adapters for a model, which may be on the meta device."""
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


def describe_adapters(lora: LoraConfig, model: Any) -> str:
    """Describe the adapters of a recipe. Raises UserError if they match no layer, or routers or experts."""
    adapters(lora, model)
    adapted = adapted_modules(model, lora)
    if not adapted:
        linear = (name for name, module in model.named_modules() if isinstance(module, Linear))
        names = sorted({name.rpartition(".")[2] for name in linear})
        raise UserError(f"matches no layer of the model, which has {listed(names)}", "lora.target_modules")
    return f"{lora_parameters(model, lora):,} parameters in {len(adapted)} layers"


def check_adapters(model: Any, config: Any = None) -> None:
    """Raise UserError if evictions cannot be replayed with the PEFT adapters of `config`, or of the model if None."""
    for adapter in getattr(model, "peft_config", {}).values() if config is None else [config]:
        if getattr(adapter, "peft_type", None) != "LORA":
            kind = type(adapter).__name__
            raise UserError(f"only LoRA adapters can be trained under evictions, got {kind}", "peft_config")
        if adapter.lora_dropout:
            raise UserError("adapter dropout cannot be replayed; set lora_dropout to 0", "peft_config.lora_dropout")
        _refuse_experts(adapter, model, "peft_config.target_modules")


def _refuse_experts(adapter: Any, model: Any, key: str) -> None:
    """Raise UserError if PEFT adapts routers or experts, which it does also for their names in older checkpoints."""
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


@dataclass_transform(field_specifiers=(dataclasses.field,))
def with_settings(*configurations: type) -> Callable[[type[T]], type[T]]:
    """Make a class of arguments a dataclass that also takes each setting of `configurations`, with its default."""

    def decorate(cls: type[T]) -> type[T]:
        for configuration in configurations:
            for f in dataclasses.fields(configuration):
                default: Any = {"default": f.default, "default_factory": f.default_factory}
                setattr(cls, f.name, dataclasses.field(**default))
                cls.__annotations__[f.name] = own_fields(configuration)[f.name]
        cls.configurations = configurations  # type: ignore[attr-defined]
        return dataclass(cls)

    return decorate


@dataclass
class ReplayedArguments:
    """Mixin for classes of training arguments of transformers and TRL: `class X(ReplayedArguments, TrainingArguments)`.

    kind : kind of recipe, which decides which options are refused (trainer/options.py)
    library : the class of transformers or TRL that this class extends
    attention_kernel : kernel that computes attention, as in a recipe; a trainer replaces "auto" by its choice
    match_gradient : "through" lets gradients flow into the fits of policy am; "constant" treats the fits as constants
    """

    kind: ClassVar[str]
    library: ClassVar[Any]
    attention_kernel: str = "auto"
    match_gradient: str = "through"

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return `given` as arguments of this class. An instance of `library` keeps its values; None is the defaults.

        Raises UserError for an object of another class, and for an option that is refused.
        """
        if given is None or isinstance(given, cls):
            return cls() if given is None else copy.copy(given)  # a trainer changes some of them
        if type(given) is not cls.library:
            wanted = f"{cls.__name__} (from trainer) or {cls.library.__name__}"
            raise UserError(f"must be of class {wanted}, got {type(given).__name__}", "args")
        values = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.init}
        values.pop("generation_batch_size", None)  # TRL has computed it from steps_per_generation, or the reverse
        with refusals():
            unset = cls.library(**{name: values[name] for name in ("output_dir", "use_cpu", "bf16", "fp16")})
        # An option that is refused is passed on only if it was set: the library itself changes some of them.
        return cls(**{n: v for n, v in values.items() if v != getattr(unset, n) or not instead(n, cls.kind)})

    def settings(self, configuration: type[T], **changed: Any) -> T:
        """Return the settings of a class that `with_settings` has added to these arguments."""
        return configuration(**{name: getattr(self, name) for name in own_fields(configuration)} | changed)

    @property
    def dtype(self) -> str:
        """Name of the dtype of the computation."""
        return "bfloat16" if cast(Any, self).bf16 else "float16" if cast(Any, self).fp16 else "float32"

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of DeepSpeed; 0 means no DeepSpeed."""
        plugin = cast(Any, self).deepspeed_plugin
        return 0 if plugin is None else plugin.zero_stage

    def settle_kernel(self, config: Any) -> None:
        """Replace the attention kernel "auto" by the one to use for a model with this configuration."""
        if self.attention_kernel == "auto":
            self.attention_kernel = choose_kernel("auto", [config], self.dtype)[0]

    def __post_init__(self) -> None:
        self.use_cpu = getattr(self, "use_cpu", False) or not torch.cuda.is_available()
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        defaults = {f.name: default_of(f) for f in dataclasses.fields(self)}
        check_options({name: value for name, value in given.items() if value != defaults[name]}, self.kind)
        if self.attention_kernel not in ("auto", *ATTENTION_KERNELS):
            kernels = ", ".join(("auto", *ATTENTION_KERNELS))
            raise UserError(f"must be one of {kernels}, got {self.attention_kernel!r}", "attention_kernel")
        if self.match_gradient not in ("through", "constant"):
            raise UserError(f"must be through or constant, got {self.match_gradient!r}", "match_gradient")
        with refusals():
            super().__post_init__()  # type: ignore[misc]  # calls TrainingArguments, the next class in the MRO
        args: Any = self
        checkpointing = args.gradient_checkpointing_kwargs
        if isinstance(checkpointing, dict):
            if checkpointing.get("use_reentrant", False) is not False:
                raise UserError("reentrant gradient checkpointing is not supported; remove use_reentrant")
            args.gradient_checkpointing_kwargs = {"use_reentrant": False, **checkpointing}  # torch's default is True

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return {k: dataclasses.asdict(cast(Any, v)) if dataclasses.is_dataclass(v) else v for k, v in values.items()}


def deepspeed_config(launch: LaunchConfig) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration, or None if `launch` uses no DeepSpeed. It has no optimizer block, with which
    DeepSpeed would compile its own Adam and not use torch's AdamW."""
    if not launch.zero_stage:
        return None
    zero: dict[str, Any] = {"stage": launch.zero_stage}
    if launch.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if launch.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if launch.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    gradients = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    batches = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    return {
        **(gradients if launch.gradient_dtype == "float32" else {}),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        **dict.fromkeys(("gradient_clipping", *batches), "auto"),
    }


def prepare_deepspeed() -> None:
    """Without a GPU, let DeepSpeed use gloo and compile no C++ extension; before training arguments are made."""
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
