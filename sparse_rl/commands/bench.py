"""`sparse-rl bench`: time sampling over cache policies, batch sizes and lengths, and the compaction of contexts.

Writes output_dir/bench.json (recipe, machine, rows) and bench.png. bench_runs.jsonl has a line for every run, from
which `--resume` continues. The runs are interleaved: every point is measured once before any is measured again, so that
other work on the machine affects all points alike. Rows have medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import add_continuing, add_recipe, print_findings, read_recipe, refuse_used
from sparse_rl.commands.console import Session, print_table, quiet_loading, say
from sparse_rl.errors import UserError
from sparse_rl.files import replace_text
from sparse_rl.progress import stage
from sparse_rl.recipe import BenchRecipe, Recipe, SweptRecipe, load_recipe, make_recipe

if TYPE_CHECKING:
    from sparse_rl.commands.bench_points import Bench

ABOUT = "Time sampling under cache policies, and compactions of contexts, on a model and this machine."
FORMAT_VERSION = 1
RESULTS, RUNS, PICTURE = "bench.json", "bench_runs.jsonl", "bench.png"
NOT_CHECKED = "the values of the weights; memory (sparse-rl doctor RECIPE)"
CONTEXT = 8192  # tokens of a context, for a recipe that names compactions but no length


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "a YAML file or a name; of another kind than bench, its model and its caches are timed")
    add_continuing(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options, load=load_bench, available=False).expect(BenchRecipe)
    folder = Path(recipe.output_dir)
    refuse_used(folder, (RESULTS, RUNS), "output_dir", options.overwrite or options.resume, resumable=True)
    quiet_loading(session.verbose)
    from sparse_rl.commands.bench_points import prepare_benches  # imports torch, after the recipe is checked

    with stage("preparing", recipe.model, shown=recipe.rollout.progress):
        benches = prepare_benches(recipe)
    if options.dry_run:
        for bench in benches:
            print_findings(bench.findings(), NOT_CHECKED)
        return 0
    content = measure(recipe, benches, options.resume, lambda: setattr(session, "folder", folder))
    print_tables(content)
    for file in (RESULTS, PICTURE):
        print(folder / file)
    return 0


def load_bench(name: str, overrides: list[str]) -> Recipe:
    """Load a recipe of kind bench. For a recipe of another kind, return one that times its model under its caches."""
    try:
        recipe = load_recipe(name)
    except UserError:
        return load_recipe(name, overrides)  # an override may mend the error
    if isinstance(recipe, BenchRecipe):
        return load_recipe(name, overrides)
    return make_recipe(timing_of(recipe), overrides, name)


def timing_of(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe of kind bench, as a mapping, that times the model of `recipe` under its caches.

    Raises UserError if the recipe does not sample.
    """
    if recipe.rollout is None or not (recipe.caches() or recipe.prompt_caches()):
        raise UserError(f"a recipe of kind {recipe.kind} that samples nothing has nothing to time", "kind")
    whole = recipe.resolved()
    bench: dict[str, Any] = {
        "kind": BenchRecipe.kind,
        "model": recipe.model,
        "output_dir": f"{recipe.output_dir}_bench",
        "seed": recipe.seed,
        "dtype": recipe.dtype,
        "rollout": {key: value for key, value in whole["rollout"].items() if key != "sleep"},
        "batch": [min(recipe.rollout.max_batch, _sequences(recipe) or recipe.rollout.max_batch)],
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


def _sequences(recipe: Recipe) -> int | None:
    sampled = getattr(recipe, "sequences_sampled", None) or getattr(recipe, "sequences", None)
    return sampled() if sampled is not None else None


def measure(
    recipe: BenchRecipe, benches: list[Bench], resume: bool = False, on_start: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Run everything that is not in the journal yet, and return the content of bench.json.

    on_start : called once the folder belongs to this process

    Raises UserError if another process measures into the same folder.
    """
    from rollout.evaluation.journal import Journal, point_key
    from sparse_rl.commands.bench_runs import time_benches
    from trainer import rundir

    folder = Path(recipe.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}", "output_dir") from error
    with Journal(folder / RUNS, resume=True) as journal, journal.take(point_key(RUNS)) as alone:
        if not alone:
            wrong = f"{folder} is in use by another process, which would disturb the timing; wait, or name another"
            raise UserError(wrong, "output_dir")
        if not resume:
            journal.clear()
        rundir.prepare(recipe.output_dir, recipe.as_yaml())
        on_start()
        for bench in benches:
            say("rollouts", bench.prepared.findings["rollouts"])
            for line in bench.left_out:
                say("left out", line)
        for _ in time_benches(recipe, benches, journal):
            write_results(folder, recipe, benches)
        content = write_results(folder, recipe, benches)
    draw(content, folder / PICTURE)
    return content


def write_results(folder: Path, recipe: BenchRecipe, benches: list[Bench]) -> dict[str, Any]:
    """Write bench.json with the rows of all points that have been measured, and return its content."""
    from sparse_rl.commands.bench_points import describe_machine

    content = {
        "format_version": FORMAT_VERSION,
        "recipe": recipe.resolved(),
        "versions": json.loads((folder / "environment.json").read_text()),
        "machine": describe_machine(),
        "left_out": [line for bench in benches for line in bench.left_out],
        "rows": [row for bench in benches for row in bench.rows()],
        "contexts": [row for bench in benches for row in bench.context_rows()],
    }
    replace_text(folder / RESULTS, json.dumps(content, indent=2) + "\n")
    return content


def print_tables(content: dict[str, Any]) -> None:
    from sparse_rl.analysis.timing import timing_tables

    for table in timing_tables(content):
        print_table(table, 140)


def draw(content: dict[str, Any], out: Path) -> Path:
    from sparse_rl.analysis.timing import plot_timing

    return plot_timing(content, out)
