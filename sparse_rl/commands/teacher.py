"""`sparse-rl teacher`: write down what a distillation's teacher says of its dataset."""

from __future__ import annotations

import argparse

from sparse_rl.commands.arguments import add_recipe, read_recipe
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.errors import UserError

ABOUT = "Write down what a distillation's teacher says, once; training then needs none."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.recipe import TaughtRecipe
    from trainer.train import write_teacher

    recipe = read_recipe(options)
    if not isinstance(recipe, TaughtRecipe):
        raise UserError(f"a recipe of kind {recipe.kind} has no teacher; use one of distill or kvpop", "kind")
    quiet_loading(session.verbose)
    folder, rows, found = write_teacher(recipe)
    print(f"{folder}: {rows} sequences" + (f"; {found} shards were there already" if found else ""))
    return 0
