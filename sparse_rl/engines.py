"""What a recipe's engine is given, and which attention trains: what `attention: auto` means on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from rollout.choice import engine_options
from sparse_rl.errors import UserError
from sparse_rl.recipe import DistillRecipe, EvalRecipe, ReplayedRecipe, SampledRecipe

if TYPE_CHECKING:
    from sparse_rl.attention.parity import Parity

logger = logging.getLogger("sparse_rl")
Replayed = TypeVar("Replayed", bound=ReplayedRecipe)

BEST_FIRST = ("flex_sorted", "flex")  # paths of attention that a GPU must be found exact with


def recipe_engine_options(recipe: SampledRecipe | EvalRecipe) -> dict[str, Any]:
    """`rollout.choice.engine_options` of a recipe whose engine is chosen."""
    return engine_options(
        recipe.rollout,
        dtype=recipe.dtype,
        prompt_bounds=[data.max_prompt_tokens for data in recipe.prompt_sources],
        max_completion_length=recipe.max_completion_length,
    )


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
