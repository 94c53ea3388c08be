"""`sparse-rl perplexity`: measure the perplexity of a text under cache policies; writes output_dir/perplexity.json.

perplexity_pieces.jsonl is the journal from which `--resume` continues (rollout/evaluation/journal.py).
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_rl.commands.arguments import add_continuing, add_recipe, print_findings, read_recipe, refuse_used
from sparse_rl.commands.console import Session, print_table, quiet_loading, say
from sparse_rl.commands.eval import NOT_CHECKED, tell_unfinished, write_results
from sparse_rl.progress import stage
from sparse_rl.recipe import PerplexityRecipe

if TYPE_CHECKING:
    from rollout.evaluation.perplexity import PerplexityRow
    from sparse_rl.commands.prepared import Prepared

ABOUT = "Measure the perplexity of a text over models and cache policies."
RESULTS, PIECES = "perplexity.json", "perplexity_pieces.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_continuing(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.analysis.evaluation import perplexity_table

    recipe = read_recipe(options).expect(PerplexityRecipe)
    refuse_used(
        Path(recipe.output_dir), (RESULTS, PIECES), "output_dir", options.overwrite or options.resume, resumable=True
    )
    quiet_loading(session.verbose)
    if options.dry_run:
        for prepared, pieces in read_texts(recipe):
            findings = {"recipe": f"{recipe.kind}, into {recipe.output_dir}", **prepared.findings}
            print_findings({**findings, "text": _describe(recipe, pieces)}, NOT_CHECKED)
        return 0
    session.folder = Path(recipe.output_dir)
    rows = measure(recipe, progress=recipe.rollout.progress, resume=options.resume)
    if rows:
        print_table(perplexity_table(rows))
    tell_unfinished(recipe.count_points() - len(rows))
    print(Path(recipe.output_dir) / RESULTS)
    return 0


def read_texts(recipe: PerplexityRecipe) -> list[tuple[Prepared[PerplexityRecipe], list[list[int]]]]:
    """Check everything that can be checked without loading a model. Returns (prepared recipe, token ids of the text's
    pieces) for each model.
    """
    from sparse_rl.commands.prepared import prepare
    from sparse_rl.data.text import read_pieces

    length = recipe.prompt_tokens + recipe.completion_tokens
    prepared = [prepare(one) for one in recipe.by_model()]
    return [(one, read_pieces(recipe.text, one.tokenizer, length, recipe.pieces)) for one in prepared]


def _describe(recipe: PerplexityRecipe, pieces: list[list[int]]) -> str:
    return f"{len(pieces)} pieces of {recipe.prompt_tokens} + {recipe.completion_tokens} tokens"


def measure(recipe: PerplexityRecipe, progress: bool = True, resume: bool = False) -> list[PerplexityRow]:
    """Measure the perplexity, write the rows to the recipe's output_dir, and return them: one row per model and cache
    policy. A row is missing if another process still works on its pieces.

    resume : True keeps the finished pieces of earlier calls

    Raises UserError for errors that the user can fix, if possible before a model is loaded.
    """
    with stage("loading", recipe.model, shown=progress):
        from rollout.evaluation.journal import Journal
        from rollout.evaluation.perplexity import TextPoint, measure_perplexity
        from sparse_rl.commands import sampling
        from trainer import rundir

        texts = read_texts(recipe)
    for prepared, pieces in texts:
        say("rollouts", prepared.findings["rollouts"])
        say("text", _describe(recipe, pieces))
    folder = rundir.prepare(recipe.output_dir, recipe.as_yaml())
    with Journal(folder / PIECES, resume=resume) as journal:
        points = [
            [
                TextPoint(
                    prepared.recipe.model, pieces, recipe.prompt_tokens, journal, policy, sampling.identity(prepared)
                )
                for policy in prepared.policies
            ]
            for prepared, pieces in texts
        ]
        in_order = [point for points_of_model in points for point in points_of_model]
        write = partial(write_results, folder / RESULTS, recipe, journal, in_order)
        for (prepared, _), points_of_model in zip(texts, points, strict=True):
            if not all(point.complete for point in points_of_model):
                opened = sampling.engines(prepared, progress)
                measure_perplexity(points_of_model, opened, journal, on_point=write, progress=progress)
        return write()
