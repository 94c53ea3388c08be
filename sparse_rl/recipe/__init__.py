"""Recipes: one flat YAML file becomes one typed, validated dataclass before any model is loaded.

load.py       finds a recipe, reads it, applies overrides
kinds/        the keys of each kind of recipe, one file per kind
schema.py     reads YAML, and overrides of keys from the command line
tasks.py      the named tasks of evaluations
refused.py    TRL options that a recipe rejects, and why
passed_through.py  TRL options that are passed on unchanged
keys.py       every key with its type, default and description, for reference.py, json_schema.py and `sparse-rl keys`

The configuration dataclasses are defined beside the components that they configure.
"""

from sparse_rl.recipe.kinds import KINDS
from sparse_rl.recipe.kinds.base import Recipe, TrainRecipe
from sparse_rl.recipe.kinds.bench import BenchRecipe
from sparse_rl.recipe.kinds.budgets import BudgetsRecipe
from sparse_rl.recipe.kinds.distill import DistillRecipe
from sparse_rl.recipe.kinds.evaluation import EvalRecipe
from sparse_rl.recipe.kinds.grpo import GRPORecipe
from sparse_rl.recipe.kinds.kvpop import KVpopRecipe
from sparse_rl.recipe.kinds.perplexity import PerplexityRecipe
from sparse_rl.recipe.kinds.sft import SFTRecipe
from sparse_rl.recipe.kinds.swept import SweptRecipe
from sparse_rl.recipe.kinds.taught import TaughtRecipe
from sparse_rl.recipe.load import list_recipes, load_recipe, make_recipe

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
    "SFTRecipe",
    "SweptRecipe",
    "TaughtRecipe",
    "TrainRecipe",
    "list_recipes",
    "load_recipe",
    "make_recipe",
]
