"""`sparse-rl perplexity`: measure the perplexity of a text under cache policies (rollout/evaluation/perplexity.py).

Writes output_dir/perplexity.json (recipe, versions, rows).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_rl.commands.arguments import add_overwrite, add_recipe, read_recipe, refuse_used
from sparse_rl.commands.console import Session, print_table, quiet_loading, say
from sparse_rl.commands.eval import write_results
from sparse_rl.progress import stage
from sparse_rl.recipe import PerplexityRecipe

if TYPE_CHECKING:
    from rollout.evaluation.perplexity import PerplexityRow

ABOUT = "Measure the perplexity of a text under cache policies and budgets."
RESULTS = "perplexity.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_overwrite(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.analysis.evaluation import perplexity_table

    recipe = read_recipe(options).expect(PerplexityRecipe)
    refuse_used(Path(recipe.output_dir), (RESULTS,), "output_dir", options.overwrite)
    session.folder = Path(recipe.output_dir)
    quiet_loading(session.verbose)
    print_table(perplexity_table(measure(recipe, progress=recipe.rollout.progress)))
    print(Path(recipe.output_dir) / RESULTS)
    return 0


def measure(recipe: PerplexityRecipe, progress: bool = True) -> list[PerplexityRow]:
    """Measure the perplexity, write the rows to the recipe's output_dir, and return them: one row per cache point.

    Raises UserError for errors that the user can fix, if possible before the model is loaded.
    """
    with stage("loading", recipe.model, shown=progress):
        from rollout.evaluation.perplexity import measure_perplexity
        from sparse_rl.commands import sampling
        from sparse_rl.commands.prepared import prepare
        from sparse_rl.data.text import read_pieces
        from trainer import rundir

        prepared = prepare(recipe)
        recipe, length = prepared.recipe, recipe.prompt_tokens + recipe.completion_tokens
        pieces = read_pieces(recipe.text, prepared.tokenizer, length, recipe.pieces)
    say("rollouts", prepared.findings["rollouts"])
    say("text", f"{len(pieces)} pieces of {recipe.prompt_tokens} + {recipe.completion_tokens} tokens")
    folder = rundir.prepare(recipe.output_dir, recipe.as_yaml())
    opened = sampling.engines(prepared, progress)
    on_row = partial(write_results, folder / RESULTS, recipe)
    return measure_perplexity(pieces, recipe.prompt_tokens, prepared.policies, opened, on_row=on_row, progress=progress)
