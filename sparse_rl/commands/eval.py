"""`sparse-rl eval`: pass@1 of a model over tasks, cache policies and budgets."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sparse_rl.commands.arguments import add_recipe, read_recipe
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.errors import UserError

ABOUT = "pass@1 of a model over tasks, cache policies and budgets."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--model", metavar="DIR", help="the same as model=DIR")


def run(options: argparse.Namespace, session: Session) -> int:
    from rich.console import Console

    from sparse_rl.analysis.evaluation import accuracy_table
    from sparse_rl.evaluate import evaluate
    from sparse_rl.recipe import EvalRecipe

    recipe = read_recipe(options, *([f"model={json.dumps(options.model)}"] if options.model else []))
    if not isinstance(recipe, EvalRecipe):
        raise UserError(f"a recipe of kind {recipe.kind} is not evaluated; it needs kind: eval", "kind")
    session.folder = Path(recipe.output_dir)
    quiet_loading(session.verbose)
    rows = evaluate(recipe, progress=recipe.rollout.progress)
    wide = None if sys.stdout.isatty() else 200
    Console(width=wide).print(accuracy_table(rows))
    print(Path(recipe.output_dir) / "eval.json")
    return 0
