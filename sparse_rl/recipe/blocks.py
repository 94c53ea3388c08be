"""The blocks of a recipe (`data:`, `rollout:`, `lora:`, `launch:`, ...), each one dataclass with its own checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from sparse_rl.config import (
    AtLeastOne,
    Fraction,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Probability,
    Rule,
    Text,
)
from sparse_rl.data.config import DataConfig
from sparse_rl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The sampling engine: hf, the reference engine; vllm, fast, with its own copy of the weights; auto, which is vllm
    where it is installed and takes the model, else hf.

    max_batch : sequences sampled at a time
    progress : show a progress bar

    The rest is for vllm; hf does without.

    kv_cache_gb : GiB for keys and values; None: what gpu_memory_utilization leaves, or 1 on a CPU
    gpu_memory_utilization : the engine's share of the GPU's memory, its weights included
    tensor_parallel : GPUs that one engine is spread over; not in training
    max_model_len : the longest prompt + completion; None: max_prompt_tokens + max_completion_length, or the model's own
    sleep : in training, give the engine's GPU memory back while the weights are updated
    """

    engine: Literal["auto", "hf", "vllm"] = "auto"
    max_batch: PositiveInt = 64
    progress: bool = True
    kv_cache_gb: Positive | None = None
    gpu_memory_utilization: Fraction = 0.3
    tensor_parallel: PositiveInt = 1
    max_model_len: PositiveInt | None = None
    sleep: bool = False


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The replay guard (DESIGN §2): stop when a batch's mean |Δlogp| exceeds factor × the probe's, or the floor.

    floor : None takes 1e-4 in float32 and 2e-2 in half precision
    """

    enabled: bool = True
    factor: AtLeastOne = 10.0
    floor: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters. They have no dropout: a dropped weight could not be replayed."""

    r: PositiveInt = 16
    alpha: PositiveInt = 32
    target_modules: list[Text] | Text = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Processes over all machines, and what DeepSpeed partitions (zero_stage 0: no DeepSpeed)."""

    processes: PositiveInt = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload: bool = False
    machines: PositiveInt = 1
    machine_rank: NonNegativeInt = 0
    main_process_ip: str | None = None
    main_process_port: Annotated[int, Rule("from 1 to 65535", lambda v: 1 <= v <= 65535)] = 29500

    def __post_init__(self) -> None:
        if self.offload and self.zero_stage == 0:
            raise UserError("needs DeepSpeed; set zero_stage to 1, 2 or 3", "offload")
        if self.processes % self.machines:
            raise UserError(f"{self.processes} processes do not divide among {self.machines} machines", "processes")
        if self.machine_rank >= self.machines:
            raise UserError(f"must be below machines ({self.machines}), got {self.machine_rank}", "machine_rank")
        if self.machines > 1 and not self.main_process_ip:
            raise UserError("needed with several machines: the address of machine 0", "main_process_ip")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """What GRPO measures on held-out problems every so many steps (rewards and entropy of samples), and distillation
    and KVpop also before their first step (KL and cross-entropy; `samples` does not count there).
    """

    data: DataConfig
    every: PositiveInt = 20
    problems: PositiveInt = 32
    samples: PositiveInt = 4


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What KVpop's scorers are to foresee (sparse_rl/attention/learned.py): log(floor + mass of future attention).

    normaliser : of the attention: over what the student's query sees (sparse), or over all before it (dense)
    group : of the query heads of a kv head, the largest logarithm, or the logarithm of their mean
    lookahead : count only so many queries after the window; None: all
    normalise : divide by their number
    """

    normaliser: Literal["sparse", "dense"] = "sparse"
    group: Literal["max", "mean"] = "max"
    lookahead: PositiveInt | None = None
    normalise: bool = True
    floor: Positive = 1e-6


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig:
    """The scorers' loss (trainer/losses.py, BoundaryLoss).

    temperature : tau
    margin, margin_floor, margin_temperature : weigh pairs by the target's margin; omega_min and tau_omega
    balance : the largest weight of the rarer of kept and dropped
    queries : drawn per row; None: all
    late : the share of them that is drawn with a bias towards the row's end
    """

    temperature: Positive = 1.0
    margin: bool = True
    margin_floor: Probability = 0.1
    margin_temperature: Positive = 1.0
    balance: AtLeastOne = 10.0
    queries: PositiveInt | None = 1024
    late: Probability = 0.5


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Evaluate every policy at every budget; an empty list keeps what the cache block says."""

    policy: list[Text] = field(default_factory=list)
    budget: list[PositiveInt] = field(default_factory=list)
