"""What several commands take: a recipe with its overrides, whole numbers, amounts."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from sparse_rl.commands.completion import complete_recipes
from sparse_rl.commands.console import rank
from sparse_rl.models.hub import check_available
from sparse_rl.recipe import Recipe, load_recipe


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"sparse-rl: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def add_recipe(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """RECIPE [KEY=VALUE ...]"""
    number = "?" if optional else None
    complete_recipes(parser.add_argument("recipe", metavar="RECIPE", nargs=number, help="a YAML file or a name"))
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[])


def read_recipe(options: argparse.Namespace, *more_overrides: str) -> Recipe:
    """The recipe that the options name, with its overrides; its warnings are printed.

    Raises UserError for what is wrong in it, and for a model that cannot be had.
    """
    recipe = load_recipe(options.recipe, [*options.overrides, *more_overrides])
    for warning in recipe.warnings if rank() == 0 else ():
        print(f"sparse-rl: warning: {warning}", file=sys.stderr)
    check_available(recipe.model)
    return recipe


def positive(text: str) -> int:
    """A whole number >= 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return int(text)


def amount(text: str) -> float:
    """A finite number > 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value
