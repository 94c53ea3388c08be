"""`sparse-rl bench`: time sampling over cache policies, batch sizes and lengths, and the compaction of contexts.

Writes output_dir/bench.json (recipe, machine, rows of medians), after each point, and bench.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import (
    add_dry_run,
    add_overwrite,
    add_recipe,
    print_findings,
    read_recipe,
    refuse_used,
)
from sparse_rl.commands.console import Session, print_table, quiet_loading
from sparse_rl.errors import UserError
from sparse_rl.files import replace_text
from sparse_rl.metrics import ENVIRONMENT_FILE
from sparse_rl.progress import say, stage
from sparse_rl.recipe import BenchRecipe, Recipe, SweptRecipe, load_recipe, make_recipe

if TYPE_CHECKING:
    from sparse_rl.commands.bench_runs import Bench

ABOUT = "Time sampling under cache policies, and compactions of contexts, on a model and this machine."
FORMAT_VERSION = 1
RESULTS, PICTURE = "bench.json", "bench.png"
NOT_CHECKED = "the values of the weights; memory (sparse-rl doctor RECIPE)"
CONTEXT = 8192  # tokens of a context, for a recipe that names compactions but no length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "a YAML file or a name; of another kind than bench, its model and its caches are timed")
    add_overwrite(parser)
    add_dry_run(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options, load=load_bench, available=False).expect(BenchRecipe)
    folder = Path(recipe.output_dir)
    refuse_used(folder, (RESULTS,), "output_dir", options.overwrite)
    quiet_loading(session.verbose)
    from sparse_rl.commands.bench_runs import prepare_benches  # imports torch, after the recipe is checked

    with stage("preparing", recipe.model, shown=recipe.rollout.progress):
        benches = prepare_benches(recipe)
    if options.dry_run:
        for bench in benches:
            print_findings(bench.findings(), NOT_CHECKED)
        return 0
    session.folder = folder
    content = measure(recipe, benches)
    print_tables(content)
    for file in (RESULTS, PICTURE):
        print(folder / file)
    return 0


def load_bench(name: str, overrides: list[str]) -> Recipe:
    """Load a recipe of kind bench; of another kind, one that times its model under its caches."""
    try:
        recipe = load_recipe(name)
    except UserError:
        return load_recipe(name, overrides)  # an override may mend the error
    if isinstance(recipe, BenchRecipe):
        return load_recipe(name, overrides)
    return make_recipe(timing_of(recipe), overrides, name)


def timing_of(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe of kind bench, as a mapping, that times the model of `recipe` under its caches."""
    if recipe.rollout is None or not (recipe.caches() or recipe.prompt_caches()):
        raise UserError(f"a recipe of kind {recipe.kind} that samples nothing has nothing to time", "kind")
    whole = recipe.resolved()
    bench: dict[str, Any] = {
        "kind": BenchRecipe.kind,
        "model": recipe.model,
        "output_dir": f"{recipe.output_dir}_bench",
        "seed": recipe.seed,
        "dtype": recipe.dtype,
        "rollout": {key: value for key, value in whole["rollout"].items() if key not in ("sleep", "ahead")},
        "batch": [min(recipe.rollout.max_batch, recipe.sequences() or recipe.rollout.max_batch)],
    }
    if recipe.prompt_caches():
        blocks = whole["prompt_cache"]
        compactions = blocks if isinstance(blocks, list) else [blocks]
        return {**bench, "length": [], "contexts": {"length": [CONTEXT], "compactions": compactions}}
    prompt = max(bound or 1 for bound in recipe.prompt_bounds())
    prompt = prompt if prompt > 1 else BenchRecipe.prompt_tokens
    caches: dict[str, Any] = {"cache": whole["cache"]}
    if isinstance(recipe, SweptRecipe):
        caches["sweep"] = whole["sweep"]
    return {**bench, **caches, "prompt_tokens": prompt, "length": [prompt + recipe.sampling().max_tokens]}


def measure(recipe: BenchRecipe, benches: list[Bench]) -> dict[str, Any]:
    """Time everything, draw the picture, and return the content of bench.json, which is written after each point."""
    from sparse_rl.analysis.timing import plot_timing
    from sparse_rl.commands.bench_runs import describe_machine
    from trainer import rundir

    folder = rundir.prepare(recipe.output_dir, recipe.as_yaml())
    content: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "recipe": recipe.resolved(),
        "versions": json.loads((folder / ENVIRONMENT_FILE).read_text()),
        "machine": describe_machine(),
        "rows": [],
        "contexts": [],
    }
    total = sum(bench.points for bench in benches)
    with stage("timing", total=total, unit="point", shown=recipe.rollout.progress) as shown:
        for bench in benches:
            say("rollouts", bench.prepared.findings["rollouts"])
            for key, rows in bench.run(shown):
                shown.advance()
                content[key] += rows
                replace_text(folder / RESULTS, json.dumps(content, indent=2) + "\n")
    plot_timing(content, folder / PICTURE)
    return content


def print_tables(content: dict[str, Any]) -> None:
    from sparse_rl.analysis.timing import timing_tables

    for table in timing_tables(content):
        print_table(table, 140)
