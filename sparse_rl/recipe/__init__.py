"""A user's words, checked: one flat YAML file becomes one typed dataclass before any model is loaded.

schema.py   YAML and overrides;  refused.py  keys of TRL that are not taken, and why
kinds.py    what each kind of recipe may say;  load.py  finds a recipe, reads it, applies overrides
"""

from sparse_rl.recipe.blocks import (
    DataConfig,
    SweepConfig,
    ValidationConfig,
)
from sparse_rl.recipe.kinds import (
    KINDS,
    DistillRecipe,
    EvalRecipe,
    GRPORecipe,
    KVpopRecipe,
    Recipe,
    ReplayedRecipe,
    SampledRecipe,
    SFTRecipe,
    TaughtRecipe,
    TrainRecipe,
    check_cache,
)
from sparse_rl.recipe.load import list_recipes, load_recipe, make_recipe
from trainer.config import LaunchConfig, LoraConfig
from trainer.grpo.config import GuardConfig

__all__ = [
    "KINDS",
    "DataConfig",
    "DistillRecipe",
    "EvalRecipe",
    "GRPORecipe",
    "GuardConfig",
    "KVpopRecipe",
    "LaunchConfig",
    "LoraConfig",
    "Recipe",
    "ReplayedRecipe",
    "SFTRecipe",
    "SampledRecipe",
    "SweepConfig",
    "TaughtRecipe",
    "TrainRecipe",
    "ValidationConfig",
    "check_cache",
    "list_recipes",
    "load_recipe",
    "make_recipe",
]
