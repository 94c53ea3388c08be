"""`sparse-rl train`: check a recipe, start its processes, train."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparse_rl.commands.arguments import add_recipe, read_recipe
from sparse_rl.commands.console import Session, quiet_loading, rank, readable_progress

ABOUT = "Train as the recipe says; starts its processes itself."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument(
        "--resume", nargs="?", const="newest", metavar="DIR", help="a checkpoint; without DIR the newest"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything that needs no model, then stop")


def separate_override_from_resume(options: argparse.Namespace) -> None:
    """`--resume seed=1` is `--resume`, and an override."""
    if "=" in (options.resume or "") and not Path(options.resume).exists():
        options.overrides.append(options.resume)
        options.resume = "newest"


def run(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.commands.checks import NOT_CHECKED, check_training
    from sparse_rl.recipe import TrainRecipe
    from trainer.launch import launch, launched, needs_launch

    recipe = read_recipe(options)
    if not options.dry_run:
        session.folder = Path(recipe.output_dir)
    quiet_loading(session.verbose)
    if not launched():  # once, before any process is started or anything is loaded
        findings = check_training(recipe, options.resume)
        if options.dry_run:
            for what, finding in findings:
                print(f"{what:<11} {finding}")
            print(f"not checked {NOT_CHECKED}")
            return 0
        words = options.arguments
        if options.resume is not None:  # the processes resume what was found here, and say no more about it
            options.resume = dict(findings)["resume"]
            words = ["train", options.recipe, *options.overrides, "--resume", options.resume]
            words += ["--verbose"] if options.verbose else []
        if isinstance(recipe, TrainRecipe) and needs_launch(recipe.launch):
            return launch(recipe.launch, words)
    from trainer.train import train

    with readable_progress():
        model = train(recipe, options.resume)
    if rank() == 0:
        print(f"model: {model}")
    return 0
