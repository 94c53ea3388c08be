"""The blocks of a recipe (`data:`, `rollout:`, `lora:`, `launch:`, ...), each one dataclass with its own checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sparse_rl.config import (
    Fraction,
    Positive,
    PositiveInt,
    Text,
)
from sparse_rl.data.config import DataConfig


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
class ValidationConfig:
    """What GRPO measures on held-out problems every so many steps (rewards and entropy of samples), and distillation
    and KVpop also before their first step (KL and cross-entropy; `samples` does not count there).
    """

    data: DataConfig
    every: PositiveInt = 20
    problems: PositiveInt = 32
    samples: PositiveInt = 4


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Evaluate every policy at every budget; an empty list keeps what the cache block says."""

    policy: list[Text] = field(default_factory=list)
    budget: list[PositiveInt] = field(default_factory=list)
