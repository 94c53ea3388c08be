"""Arguments that several commands share: a recipe with overrides and shell completion, whole numbers, amounts."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import shtab

from sparse_rl.commands.console import ERROR_LOG
from sparse_rl.config import names_a_file, show
from sparse_rl.errors import UserError, did_you_mean, one_line
from sparse_rl.files import check_folder
from sparse_rl.metrics import ENVIRONMENT_FILE, METRICS_FILE, RECIPE_FILE
from sparse_rl.models.directory import model_directory
from sparse_rl.models.hub import check_available
from sparse_rl.progress import warn
from sparse_rl.recipe import Recipe, load_recipe


class CommandParser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line long."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message = error.message.replace(" (", f"{did_you_mean(value, map(str, action.choices or ()))} (", 1)
            raise

    def error(self, message: str) -> NoReturn:
        print(f"sparse-rl: error: {one_line(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def add_completion(top: argparse.ArgumentParser) -> None:
    about = "print the completion script of a shell; for bash, eval it in ~/.bashrc"
    shtab.add_argument_to(top, "--print-completion", help=about)


def add_recipe(
    parser: argparse.ArgumentParser, about: str = "a YAML file or a name", *, optional: bool = False
) -> None:
    number = "?" if optional else None
    recipe = parser.add_argument("recipe", metavar="RECIPE", nargs=number, help=about)
    recipe.complete = shtab.FILE  # type: ignore[attr-defined]  # read by shtab
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[])


def read_recipe(
    options: argparse.Namespace, load: Callable[[str, list[str]], Recipe] = load_recipe, available: bool = True
) -> Recipe:
    """Load the named recipe with its overrides, replace model names by directories, and print the recipe's warnings.

    Raises UserError for mistakes in the recipe or, if `available`, for a model that cannot be found or downloaded.
    """
    recipe = load(options.recipe, list(options.overrides)).with_models(model_directory)
    for warning in recipe.warnings:
        warn(warning)
    if available:
        for model in recipe.models():
            check_available(model)
    return recipe


def add_overwrite(parser: argparse._ActionsContainer) -> None:
    """Add the option --overwrite, whose value is passed to `refuse_used`."""
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the files that an earlier call wrote to the output folder"
    )


def add_continuing(parser: argparse.ArgumentParser) -> None:
    """Add the options --resume, --overwrite and --dry-run of an evaluation."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--resume",
        action="store_true",
        help="keep what earlier calls finished, and do the rest; processes with the same command share the work",
    )
    add_overwrite(either)
    add_dry_run(parser)


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="check everything that needs no model, then stop")


def print_findings(findings: Mapping[str, str], not_checked: str) -> None:
    """Print the findings of --dry-run, one topic a line, and what was not checked."""
    for topic, finding in {**findings, "not checked": not_checked}.items():
        print(f"{topic:<17} {finding}")


def refuse_used(folder: Path, patterns: Iterable[str], key: str, overwrite: bool, resumable: bool = False) -> None:
    """Raise UserError if `folder` is a training run's directory, cannot be written or, unless `overwrite`, holds files
    that would be lost.

    patterns : glob patterns of the files that would be lost
    key : option or recipe key that names the folder
    resumable : True if the command has the option --resume
    """
    if (folder / METRICS_FILE).is_file():
        raise UserError(
            f"{folder} is the directory of a training run, whose files would be overwritten; name another folder", key
        )
    existing = sorted(file.name for pattern in patterns for file in folder.glob(pattern))
    if existing and not overwrite:
        mend = "add --resume to continue, --overwrite to replace it" if resumable else "add --overwrite to replace it"
        raise UserError(f"{folder} already holds {existing[0]}; {mend}, or name another folder", key)
    check_folder(folder, key, (*patterns, "*.lock", RECIPE_FILE, ENVIRONMENT_FILE, ERROR_LOG))


def positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1 (below 2^31), got {show(text)}")
    return int(text)


def number(text: str, most: float = math.inf, zero: bool = False) -> float:
    """Parse a finite number > 0 that is at most `most`; if `zero`, also 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 < value <= most or (zero and value == 0)) or value == math.inf:
        bound = f"of at most {most:,}" if value > most else ">= 0" if zero else "> 0"
        raise argparse.ArgumentTypeError(f"expected a number {bound}, got {show(text)}")
    return value


def file_name(text: str) -> str:
    if not names_a_file(text):
        raise argparse.ArgumentTypeError(f"no file can have the name {show(text)}")
    return text


def file_path(text: str) -> Path:
    """Parse the path of a file or folder, which need not exist."""
    return Path(file_name(text))
