"""`sparse-rl budgets`: measure head budgets of a model; writes output_dir/head_budgets.json.

The key `prompt_cache.budgets` of other recipes names this file. head_budgets_curves.jsonl is the journal from which
`--resume` continues (rollout/evaluation/journal.py).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import add_continuing, add_recipe, print_findings, read_recipe, refuse_used
from sparse_rl.commands.console import Session, print_table, quiet_loading, say
from sparse_rl.commands.rollout import NOT_CHECKED
from sparse_rl.errors import UserError
from sparse_rl.progress import stage
from sparse_rl.recipe import BudgetsRecipe

if TYPE_CHECKING:
    from rich.table import Table

    from rollout.evaluation.budgets import MeasuredContext
    from rollout.evaluation.contexts import Questions
    from rollout.evaluation.journal import Journal
    from sparse_rl.commands.prepared import Prepared

ABOUT = "Measure head budgets of a model, for the compaction of contexts."
RESULTS, CURVES = "head_budgets.json", "head_budgets_curves.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_continuing(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    recipe = read_recipe(options).expect(BudgetsRecipe)
    refuse_used(
        Path(recipe.output_dir), (RESULTS, CURVES), "output_dir", options.overwrite or options.resume, resumable=True
    )
    quiet_loading(session.verbose)
    if options.dry_run:
        print_findings(prepare_measurement(recipe).findings(), NOT_CHECKED)
        return 0
    session.folder = Path(recipe.output_dir)
    content = measure(recipe, progress=recipe.rollout.progress, resume=options.resume)
    if content is None:
        say("unfinished", "other processes still work on contexts; the last process writes the head budgets")
        return 0
    print_table(budgets_table(content))
    print(Path(recipe.output_dir) / RESULTS)
    return 0


@dataclass(frozen=True)
class Measurement:
    """A measurement of head budgets, checked as far as possible before the model is loaded.

    questions : name of a task -> its questions
    chosen : for each context, the name of its task, and the indices of the questions that are asked
    """

    prepared: Prepared[BudgetsRecipe]
    questions: Mapping[str, Questions]
    chosen: list[tuple[str, list[int]]]

    def contexts(self, journal: Journal) -> list[MeasuredContext]:
        from rollout.evaluation.budgets import MeasuredContext, Settings
        from sparse_rl.commands import sampling

        recipe = self.prepared.recipe
        settings = Settings(
            recipe.prompt_caches()[0],
            recipe.ratios,
            recipe.base,
            recipe.global_ratios,
            recipe.sampling(),
            self.prepared.shape[:2],
            sampling.identity(self.prepared),
        )
        contexts = []
        for name, places in self.chosen:
            prompts, about = self.questions[name].prompts, self.questions[name].about
            rest = [prompts[place].rest for place in places]
            first = prompts[places[0]]
            contexts.append(
                MeasuredContext(name, places[0], first.context, first.first, rest, about, settings, journal)
            )
        return contexts

    def findings(self) -> dict[str, str]:
        """Return topic -> text: the lines that --dry-run prints."""
        recipe, (layers, kv_heads, _) = self.prepared.recipe, self.prepared.shape
        lengths = [len(self.questions[name].prompts[places[0]].context) for name, places in self.chosen]
        asked = sum(len(places) for _, places in self.chosen)
        of_layers = f"{layers} layers" + (" without a window" if named_layers(self.prepared.config) else "")
        product = f"{of_layers} x {kv_heads} kv heads x {len(recipe.ratios)} ratios x {len(lengths)} contexts"
        passes = layers * kv_heads * len(recipe.ratios) * len(lengths)
        limit = f"each over all questions and answers of a context (up to {recipe.max_completion_length:,} tokens each)"
        return {
            "recipe": f"{recipe.kind}, into {recipe.output_dir}",
            **self.prepared.findings,
            "contexts": f"{len(lengths)}, of {min(lengths):,} to {max(lengths):,} tokens, with {asked} questions",
            "forward passes": f"at most {product} = {passes:,}, {limit}",
        }


def prepare_measurement(recipe: BudgetsRecipe) -> Measurement:
    """Check everything that can be checked without loading a model."""
    from rollout.evaluation.contexts import check_lengths, problems_by_context
    from sparse_rl.attention.families import context_length
    from sparse_rl.commands import sampling
    from sparse_rl.commands.prepared import prepare
    from sparse_rl.data.problems import load_data

    prepared = prepare(recipe)
    config, chosen = recipe.prompt_caches()[0], list[tuple[str, list[int]]]()
    questions: dict[str, Any] = {}
    for name, data in recipe.tasks.items():
        problems = load_data(data, prepared.tokenizer, require=("prompt",), where=f"tasks.{name}")
        questions[name] = sampling.context_questions(problems, prepared.tokenizer, data)
        for (first, tokens), places in problems_by_context(questions[name]).items():
            try:
                dataclasses.replace(config, first=config.first + first).between(len(tokens))
            except UserError as error:
                raise UserError(f"problem {places[0] + 1}: {error.message}", f"tasks.{name}") from error
            chosen.append((name, places[: recipe.questions]))
    if len(chosen) < recipe.contexts:
        raise UserError(f"the tasks have {len(chosen)} contexts, fewer than {recipe.contexts}; lower it", "contexts")
    longest = recipe.rollout.max_model_len or context_length(prepared.config)
    check_lengths(questions, recipe.max_completion_length, longest)
    return Measurement(prepared, questions, chosen[: recipe.contexts])


def measure(recipe: BudgetsRecipe, progress: bool = True, resume: bool = False) -> dict[str, Any] | None:
    """Measure head budgets, write them to the recipe's output_dir, and return the content of the file. None means that
    another process still works on some contexts.

    resume : True keeps the finished heads of earlier calls

    Raises UserError for errors that the user can fix, if possible before the model is loaded.
    """
    with stage("loading", recipe.model, shown=progress):
        from rollout.context import budgets
        from rollout.evaluation.budgets import measure_curves, results
        from rollout.evaluation.journal import Journal
        from sparse_rl.commands import sampling
        from sparse_rl.models.identity import Identity, identify
        from sparse_rl.policies.registry import make_policy
        from trainer import rundir

        measurement = prepare_measurement(recipe)
        folder = rundir.prepare(recipe.output_dir, recipe.as_yaml())
    say("contexts", measurement.findings()["contexts"])
    with Journal(folder / CURVES, resume=resume) as journal:
        contexts = measurement.contexts(journal)
        if not all(context.complete for context in contexts):
            open_engine, full = sampling.engines(measurement.prepared), make_policy("full")
            measure_curves(contexts, lambda _: open_engine(full), journal, progress)
        if not all(context.complete for context in contexts):
            return None
        shares, content = results(contexts)
        content |= named_layers(measurement.prepared.config)
        model = Identity(recipe.model, identify(recipe.model).fingerprint)
        with journal.writing():
            return budgets.save(folder / RESULTS, shares, model, **content)


def named_layers(config: Any) -> dict[str, list[int]]:
    """Return the key `layers` of the file of a model with sliding windows, whose other layers have head budgets: their
    indices. Return no key for a model without sliding windows.
    """
    from sparse_rl.attention.families import global_layers

    layers = global_layers(config)
    return {"layers": layers} if len(layers) < config.num_hidden_layers else {}


def budgets_table(content: Mapping[str, Any]) -> Table:
    """Return a table of the heads with the largest and the smallest budgets."""
    from rich.table import Table

    layers = content.get("layers", range(len(content["shares"])))
    rows = zip(layers, content["shares"], strict=True)
    heads = sorted(((share, layer, head) for layer, row in rows for head, share in enumerate(row)), reverse=True)
    table = Table(title=f"budgets of {len(heads)} heads, in units of the mean (ratio {content['base']:g})")
    for name in ("layer", "kv head", "budget"):
        table.add_column(name, justify="right")
    few = heads if len(heads) <= 10 else [*heads[:5], None, *heads[-5:]]
    for row in few:
        table.add_row(*("...",) * 3 if row is None else (str(row[1]), str(row[2]), f"{row[0]:.2f}"))
    return table
