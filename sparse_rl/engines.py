"""What a recipe's engine is given."""

from __future__ import annotations

from typing import Any

from rollout.choice import engine_options
from sparse_rl.recipe import EvalRecipe, SampledRecipe


def recipe_engine_options(recipe: SampledRecipe | EvalRecipe) -> dict[str, Any]:
    """`rollout.choice.engine_options` of a recipe whose engine is chosen."""
    return engine_options(
        recipe.rollout,
        dtype=recipe.dtype,
        prompt_bounds=[data.max_prompt_tokens for data in recipe.prompt_sources],
        max_completion_length=recipe.max_completion_length,
    )
