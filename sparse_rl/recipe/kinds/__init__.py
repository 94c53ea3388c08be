"""The kinds of recipe. The file of a kind defines the keys of its YAML, and methods that derive facts from these keys.

A kind nests the configurations of its components (trainer/*/config.py, rollout/config.py, ...). The keys of a `flat`
field appear at the top level of the YAML. A new key of a component is therefore added only to the component's
configuration.

To add a kind, write a file here with a subclass of Recipe, and add the class to KINDS. If the kind is trained, also add
a function that creates its trainer to TRAINERS in sparse_rl/commands/trainers.py, and the options that it passes on to
TRL to PASSED_THROUGH in passed_through.py. Then regenerate docs/recipes.md (reference.py).
"""

from __future__ import annotations

from sparse_rl.recipe.kinds.base import Recipe
from sparse_rl.recipe.kinds.bench import BenchRecipe
from sparse_rl.recipe.kinds.budgets import BudgetsRecipe
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
    "bench": BenchRecipe,
    "budgets": BudgetsRecipe,
}
"""The class of each kind of recipe, by the value of the key `kind`."""
