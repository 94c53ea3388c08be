"""`sparse-rl budgets`: measure head budgets of a model; writes output_dir/head_budgets.json.

The key `prompt_cache.budgets` of other recipes names this file. head_budgets_curves.jsonl is the journal from which
`--resume` continues (rollout/measure/journal.py).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import add_continuing, add_recipe, read_recipe
from sparse_rl.commands.console import Session
from sparse_rl.commands.measurement import Measurement, measured, run_measurement
from sparse_rl.errors import UserError
from sparse_rl.recipe import BudgetsRecipe, Recipe, Run

if TYPE_CHECKING:
    from rich.table import Table

    from rollout.measure.contexts import Questions
    from rollout.measure.head_budgets import MeasuredContext
    from rollout.measure.journal import Journal

ABOUT = "Measure head budgets of a model, for the compaction of contexts."
RESULTS, CURVES = FILES = "head_budgets.json", "head_budgets_curves.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_continuing(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    return run_measurement(BudgetsMeasurement, options, session, read_recipe(options).expect(BudgetsRecipe))


@dataclass(frozen=True)
class BudgetsMeasurement(Measurement):
    """A measurement of head budgets, checked as far as possible before the model is loaded.

    chosen : for each context, the name of its task, and the indices of the questions that are asked
    """

    run: Run[BudgetsRecipe]
    questions: Mapping[str, Questions]
    chosen: list[tuple[str, list[int]]]
    files = FILES
    told = ("contexts",)

    @classmethod
    def prepare(cls, recipe: BudgetsRecipe) -> list[BudgetsMeasurement]:
        from rollout.measure.contexts import check_lengths, problems_by_context
        from sparse_rl.attention.families import context_length
        from sparse_rl.data.problems import load_data
        from sparse_rl.recipe import sampling

        prepared = recipe.prepare()
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
            raise UserError(
                f"the tasks have {len(chosen)} contexts, fewer than {recipe.contexts}; lower it", "contexts"
            )
        longest = recipe.rollout.max_model_len or context_length(prepared.config)
        check_lengths(questions, recipe.max_completion_length, longest)
        return [cls(prepared, questions, chosen[: recipe.contexts])]

    def points(self, journal: Journal) -> list[MeasuredContext]:
        from rollout.measure.head_budgets import MeasuredContext, Settings
        from sparse_rl.recipe import sampling

        recipe = self.run.recipe
        settings = Settings(
            recipe.prompt_caches()[0],
            recipe.ratios,
            recipe.base,
            recipe.global_ratios,
            recipe.sampling(),
            self.run.shape[:2],
            sampling.identity(self.run),
        )
        contexts = []
        for number, (name, places) in enumerate(self.chosen, start=1):
            label = f"context {number} of {len(self.chosen)}"
            prompts, about = self.questions[name].prompts, self.questions[name].about
            rest = [prompts[place].rest for place in places]
            first = prompts[places[0]]
            contexts.append(
                MeasuredContext(label, name, places[0], first.context, first.first, rest, about, settings, journal)
            )
        return contexts

    def findings(self) -> dict[str, str]:
        recipe, (layers, kv_heads, _) = self.run.recipe, self.run.shape
        lengths = [len(self.questions[name].prompts[places[0]].context) for name, places in self.chosen]
        asked = sum(len(places) for _, places in self.chosen)
        of_layers = f"{layers} layers" + (" without a window" if named_layers(self.run.config) else "")
        product = f"{of_layers} x {kv_heads} kv heads x {len(recipe.ratios)} ratios x {len(lengths)} contexts"
        passes = layers * kv_heads * len(recipe.ratios) * len(lengths)
        limit = f"each over all questions and answers of a context (up to {recipe.max_completion_length:,} tokens each)"
        return {
            "contexts": f"{len(lengths)}, of {min(lengths):,} to {max(lengths):,} tokens, with {asked} questions",
            "forward passes": f"at most {product} = {passes:,}, {limit}",
        }

    def finish(
        self, points: Sequence[Any], folder: Path, journal: Journal, on_point: Callable[[], Any], progress: bool
    ) -> None:
        from rollout.measure.journal import measure_points
        from sparse_rl.policies.make import make_policy
        from sparse_rl.recipe import sampling

        open_engine, full = sampling.engines(self.run), make_policy("full")
        measure_points(points, lambda _: open_engine(full), journal, lambda: None, progress)

    @classmethod
    def write(cls, file: Path, recipe: Recipe, journal: Journal, points: Sequence[Any]) -> dict[str, Any] | None:
        """Write the head budgets and return the content of the file; return None if the contexts are not complete."""
        from rollout.context import budgets
        from rollout.measure.head_budgets import results
        from sparse_rl.models.load import load_config
        from sparse_rl.models.weights import Identity, identify

        if not all(context.complete for context in points):
            return None
        shares, content = results(points)
        content |= named_layers(load_config(recipe.model))
        model = Identity(recipe.model, identify(recipe.model).fingerprint)
        with journal.writing():
            return budgets.save(file, shares, model, **content)

    @staticmethod
    def unfinished(recipe: Any, result: Any) -> str | None:
        return None if result else "contexts; the last process writes the head budgets"

    @staticmethod
    def table(result: Mapping[str, Any]) -> Table:
        from sparse_rl.analysis.tables import table

        layers = result.get("layers", range(len(result["shares"])))
        rows = zip(layers, result["shares"], strict=True)
        heads = sorted(((share, layer, head) for layer, row in rows for head, share in enumerate(row)), reverse=True)
        cells = [[str(layer), str(head), f"{share:.2f}"] for share, layer, head in heads]
        few = cells if len(cells) <= 10 else [*cells[:5], ["..."] * 3, *cells[-5:]]
        title = f"budgets of {len(heads)} heads, in units of the mean (ratio {result['base']:g})"
        return table(title, ("layer", "kv head", "budget"), few, ())


measure = partial(measured, BudgetsMeasurement)


def named_layers(config: Any) -> dict[str, list[int]]:
    """Return the key `layers` of the file: the layers without a sliding window, if some have one."""
    from sparse_rl.attention.families import global_layers

    layers = global_layers(config)
    return {"layers": layers} if len(layers) < config.num_hidden_layers else {}
