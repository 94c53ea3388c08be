"""What several commands take: a recipe with its overrides, which the shell completes, whole numbers, amounts."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import shtab

from sparse_rl.commands.console import warn
from sparse_rl.config import names_a_file, show
from sparse_rl.errors import UserError, one_line
from sparse_rl.metrics import METRICS_FILE
from sparse_rl.models.directory import model_directory
from sparse_rl.models.hub import check_available
from sparse_rl.recipe import Recipe, list_recipes, load_recipe

RECIPE = {"bash": "_sparse_rl_recipes", "zsh": "_sparse_rl_recipes"}  # functions of the shell, below
PREAMBLE = {
    "bash": '_sparse_rl_recipes() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}\n',
    "zsh": "_sparse_rl_recipes() {{ compadd -- {names}; _files }}\n",
}


class HelpFormatter(argparse.HelpFormatter):
    """argparse's, but no line ends within a name: names are there to be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in self._split_lines(text, width - len(indent)))


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": HelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        print(f"sparse-rl: error: {one_line(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def add_completion(top: argparse.ArgumentParser) -> None:
    """--print-completion SHELL"""
    names = " ".join(list_recipes())
    preamble = {shell: text.format(names=names) for shell, text in PREAMBLE.items()}
    shtab.add_argument_to(
        top,
        "--print-completion",
        help="print the completion for a shell; bash: eval it in ~/.bashrc",
        preamble=preamble,
    )


def add_recipe(
    parser: argparse.ArgumentParser, about: str = "a YAML file or a name", *, optional: bool = False
) -> None:
    """RECIPE [KEY=VALUE ...]"""
    number = "?" if optional else None
    recipe = parser.add_argument("recipe", metavar="RECIPE", nargs=number, help=about)
    recipe.complete = RECIPE  # type: ignore[attr-defined]  # where shtab looks for what the shell offers
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[])


def read_recipe(
    options: argparse.Namespace, load: Callable[[str, list[str]], Recipe] = load_recipe, available: bool = True
) -> Recipe:
    """The recipe that the options name, with its overrides, and the directory of each model; its warnings are printed.

    load : makes a recipe of what is named and of the overrides
    available : its model must be there, or to be had

    Raises UserError for what is wrong in it, and for a model that cannot be had.
    """
    recipe = load(options.recipe, list(options.overrides)).with_models(model_directory)
    for warning in recipe.warnings:
        warn(warning)
    if available:
        check_available(recipe.model)
    return recipe


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """--overwrite; `refuse_used` is held against it."""
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier call has written there")


def refuse_used(folder: Path, patterns: Iterable[str], key: str, overwrite: bool) -> None:
    """Raise UserError where a folder holds files of an earlier call that would be lost, unless these may be.

    patterns : of the files' names; the directory of a training is refused whatever it holds
    key : the option or recipe key that names the folder
    """
    if (folder / METRICS_FILE).is_file():
        raise UserError(f"{folder} is the directory of a training, whose files would be overwritten; name another", key)
    found = sorted(file.name for pattern in patterns for file in folder.glob(pattern))
    if found and not overwrite:
        raise UserError(f"{folder} already holds {found[0]}; --overwrite replaces it, or name another folder", key)


def positive(text: str) -> int:
    """A whole number >= 1."""
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1 (below 2^31), got {show(text)}")
    return int(text)


def number(text: str, most: float = math.inf) -> float:
    """A finite number > 0, of at most so much."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most or value == math.inf:
        bound = f"of at most {most:,}" if value > most else "> 0"
        raise argparse.ArgumentTypeError(f"expected a number {bound}, got {show(text)}")
    return value


def file_name(text: str) -> str:
    """The path of a file or folder, which need not be there."""
    if not names_a_file(text):
        raise argparse.ArgumentTypeError(f"no file can have the name {show(text)}")
    return text


def file_path(text: str) -> Path:
    return Path(file_name(text))
