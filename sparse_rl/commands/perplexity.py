"""`sparse-rl perplexity`: measure the perplexity of a text under cache policies; writes output_dir/perplexity.json.

perplexity_pieces.jsonl is the journal from which `--resume` continues (rollout/measure/journal.py).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.arguments import add_continuing, add_recipe, read_recipe
from sparse_rl.commands.console import Session
from sparse_rl.commands.measurement import Measurement, measured, run_measurement
from sparse_rl.recipe import PerplexityRecipe, Run

if TYPE_CHECKING:
    from rollout.measure.journal import Journal
    from rollout.measure.perplexity import TextPoint

ABOUT = "Measure the perplexity of a text over models and cache policies."
RESULTS, PIECES = FILES = "perplexity.json", "perplexity_pieces.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_continuing(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    return run_measurement(TextMeasurement, options, session, read_recipe(options).expect(PerplexityRecipe))


@dataclass(frozen=True)
class TextMeasurement(Measurement):
    """The perplexity of a text for one model. pieces : token ids of the text's pieces"""

    run: Run[PerplexityRecipe]
    pieces: list[list[int]]
    files = FILES
    told = ("rollouts", "text")

    @classmethod
    def prepare(cls, recipe: PerplexityRecipe) -> list[TextMeasurement]:
        from sparse_rl.data.tokens import read_pieces

        length = recipe.prompt_tokens + recipe.completion_tokens
        runs = [one.prepare() for one in recipe.by_model()]
        return [cls(run, read_pieces(recipe.text, run.tokenizer, length, recipe.pieces)) for run in runs]

    def findings(self) -> dict[str, str]:
        recipe = self.run.recipe
        return {"text": f"{len(self.pieces)} pieces of {recipe.prompt_tokens} + {recipe.completion_tokens} tokens"}

    def points(self, journal: Journal) -> list[TextPoint]:
        from rollout.measure.perplexity import TextPoint
        from sparse_rl.recipe import sampling

        recipe, identity = self.run.recipe, sampling.identity(self.run)
        point = partial(TextPoint, recipe.model, self.pieces, recipe.prompt_tokens, journal)
        return [point(policy, identity) for policy in self.run.policies]

    @staticmethod
    def table(result: Any) -> Any:
        from sparse_rl.analysis.tables import perplexity_table

        return perplexity_table(result)


measure = partial(measured, TextMeasurement)
