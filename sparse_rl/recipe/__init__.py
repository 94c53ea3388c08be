"""Recipes: one flat YAML file becomes one typed, validated dataclass, which resolves to one `Run`.

The configurations that a recipe nests are defined beside the components that they configure. A kind is a file with a
subclass of Recipe and an entry in KINDS in load.py; if it is trained, the class has the method `make_trainer`, and the
options that it passes on to TRL are in PASSED_THROUGH in options.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from sparse_rl.recipe.distillation import DistillRecipe, KVpopRecipe, TaughtRecipe
    from sparse_rl.recipe.evaluation import BenchRecipe, BudgetsRecipe, EvalRecipe, PerplexityRecipe, SweptRecipe
    from sparse_rl.recipe.grpo import GRPORecipe
    from sparse_rl.recipe.load import KINDS, list_recipes, load_recipe, make_recipe
    from sparse_rl.recipe.run import Recipe, ReplayedRecipe, Run, SampledRecipe, TrainRecipe
    from sparse_rl.recipe.sft import SFTRecipe

__getattr__ = public_names(__name__, "rollout", "trainer", "rewards")

__all__ = [
    "KINDS",
    "BenchRecipe",
    "BudgetsRecipe",
    "DistillRecipe",
    "EvalRecipe",
    "GRPORecipe",
    "KVpopRecipe",
    "PerplexityRecipe",
    "Recipe",
    "ReplayedRecipe",
    "Run",
    "SFTRecipe",
    "SampledRecipe",
    "SweptRecipe",
    "TaughtRecipe",
    "TrainRecipe",
    "list_recipes",
    "load_recipe",
    "make_recipe",
]
