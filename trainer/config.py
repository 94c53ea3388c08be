"""The settings that several kinds of training share. Imports no torch.

The settings of one component are in its own config.py: trainer/grpo/, distill/, kvpop/, sft/, losses/, teacher/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from sparse_rl.attention.config import AttentionKernel
from sparse_rl.config import (
    BelowOne,
    Configuration,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Rule,
    Text,
    at_most,
)
from sparse_rl.errors import UserError

Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
]
MaxSteps = Annotated[int, Rule(">= 1, or -1 to count epochs", lambda v: v >= 1 or v == -1), at_most(2**31 - 1)]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Configuration):
    """Settings of every training. Names and meanings are as in TRL, except for the fields described here.

    warmup_steps : number of warm-up steps; a value below 1 is a share of all steps
    max_steps : number of steps; overrides num_train_epochs
    save_steps : number of steps between checkpoints; 0 writes only the final model
    """

    learning_rate: Positive = 1e-6
    lr_scheduler_type: Scheduler = "constant"
    warmup_steps: NonNegative = 0.0
    max_steps: MaxSteps = -1
    num_train_epochs: Annotated[Positive, at_most(1_000_000)] = 1.0
    per_device_train_batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1
    gradient_checkpointing: bool = True
    max_grad_norm: NonNegative = 1.0
    weight_decay: NonNegative = 0.0
    adam_beta1: BelowOne = 0.9
    adam_beta2: BelowOne = 0.999
    logging_steps: PositiveInt = 1
    save_steps: NonNegativeInt = 100
    save_total_limit: PositiveInt | None = 2
    report_to: list[Literal["wandb", "tensorboard", "trackio"]] = field(default_factory=list)
    run_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Configuration):
    """Attention in training under evictions.

    attention_kernel : kernel that computes attention. gather collects, for each chunk of queries, the keys that any
        query of the chunk sees. flex and flex_sorted (FlexAttention, on a GPU) visit only those 128 x 128 tiles in
        which a query sees a key; flex_sorted first sorts the keys by the time of their eviction. sdpa builds a [tokens,
        tokens] mask for each layer. dense is the reference. auto takes flex_sorted, else flex, if it passes a check of
        exactness on this machine, else gather
    match_gradient : gradient of the biases and values that policy am fits. `through` lets the gradient flow to the
        keys, values and queries of the fit; `constant` treats the fitted biases and values as constants
    """

    attention_kernel: Literal["auto", AttentionKernel] = "auto"
    match_gradient: Literal["through", "constant"] = "through"


ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Configuration):
    """Settings of low-rank adapters. They have no dropout, because dropout cannot be replayed.

    target_modules : adapted layers: a list of the last parts of their names, or a regular expression for whole names.
        all-linear adapts all linear layers except the head and, in a model with experts, only those of the attention.
        Routers and experts cannot be adapted
    """

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    target_modules: list[Text] | Text = ALL_LINEAR

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except (re.error, RecursionError, OverflowError) as error:
                wrong = f"is not a valid regular expression ({error}); correct it, or give a list of names"
                raise UserError(wrong, "target_modules") from None


MOST_PROCESSES = 256  # per machine; no machine has more GPUs


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Configuration):
    """Settings of the launch. `processes` counts the processes of all machines; zero_stage 0 means no DeepSpeed."""

    processes: PositiveInt = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: bool = False
    machines: PositiveInt = 1
    machine_rank: NonNegativeInt = 0
    main_process_ip: str | None = None
    main_process_port: Annotated[int, Rule("from 1 to 65535", lambda v: 1 <= v <= 65535)] = 29500

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload and self.zero_stage == 0:
            raise UserError("needs DeepSpeed; set zero_stage to 1, 2 or 3", "offload")
        if self.processes % self.machines:
            raise UserError(f"{self.processes} is not divisible by machines ({self.machines})", "processes")
        if (local := self.processes // self.machines) > MOST_PROCESSES:
            wrong = f"{local:,} processes on each machine are too many; at most {MOST_PROCESSES} are allowed"
            raise UserError(wrong, "processes")
        if self.machine_rank >= self.machines:
            raise UserError(f"must be below machines ({self.machines}), got {self.machine_rank}", "machine_rank")
        if self.machines > 1 and not self.main_process_ip:
            raise UserError("is required with several machines; set it to the address of machine 0", "main_process_ip")
