"""The kinds of recipe, one file each: what its YAML may say, and what it answers about itself.

A kind nests the configurations of the components that it sets up (trainer/*/config.py, rollout/config.py, ...). Where
it holds one `flat`, its keys stand at the top level of the YAML. So a new key of a component is one edit, there.

To add a kind: a file here with a subclass of Recipe, one entry in KINDS, and, if it is trained, what makes its trainer
in TRAINERS of sparse_rl/commands/trainers.py, and the options that it hands on to TRL in PASSED_THROUGH of
passed_through.py. Then make docs/recipes.md anew (reference.py).
"""

from __future__ import annotations

from sparse_rl.recipe.kinds.base import Recipe
from sparse_rl.recipe.kinds.distill import DistillRecipe
from sparse_rl.recipe.kinds.evaluation import EvalRecipe
from sparse_rl.recipe.kinds.grpo import GRPORecipe
from sparse_rl.recipe.kinds.kvpop import KVpopRecipe
from sparse_rl.recipe.kinds.perplexity import PerplexityRecipe
from sparse_rl.recipe.kinds.sft import SFTRecipe

KINDS: dict[str, type[Recipe]] = {
    "grpo": GRPORecipe,
    "distill": DistillRecipe,
    "kvpop": KVpopRecipe,
    "sft": SFTRecipe,
    "eval": EvalRecipe,
    "perplexity": PerplexityRecipe,
}
"""The class of each kind of recipe, by what the key `kind` says."""
