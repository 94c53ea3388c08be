"""The common parts of `sparse-rl eval`, `perplexity` and `budgets`: the command, its dry run, journal and results.

Each is a subclass of `Measurement`. Its points are measured one after the other, and each finished unit of work is a
line of a journal in output_dir, from which `--resume` continues, and through which several processes share the work
(rollout/measure/journal.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sparse_rl.commands.arguments import print_findings, refuse_used
from sparse_rl.commands.console import Session, print_table, quiet_loading
from sparse_rl.files import replace_text
from sparse_rl.metrics import ENVIRONMENT_FILE
from sparse_rl.progress import say, stage
from sparse_rl.recipe import Recipe, Run

if TYPE_CHECKING:
    from rollout.measure.journal import Journal, Point

FORMAT_VERSION = 1
NOT_CHECKED = "the values of the weights; memory (sparse-rl doctor RECIPE)"


class Measurement(ABC):
    """A measurement of one model, checked as far as possible before the model is loaded.

    files : names of the file of results and of the journal, in the recipe's output_dir
    told : topics of `findings` that are printed before the measurement
    not_checked : what a dry run does not check
    settings : further keys of the file of results
    """

    run: Run[Any]
    files: ClassVar[tuple[str, str]]
    told: Sequence[str] = ("rollouts",)
    not_checked = NOT_CHECKED
    settings: ClassVar[dict[str, str]] = {}

    @classmethod
    @abstractmethod
    def prepare(cls, recipe: Any) -> Sequence[Measurement]:
        """Check everything that can be checked without loading a model. Returns one measurement for each model."""

    @abstractmethod
    def findings(self) -> dict[str, str]:
        """Return topic -> text: the lines that --dry-run prints, after the recipe's own."""

    @abstractmethod
    def points(self, journal: Journal) -> list[Any]:
        """Return the points, one for each row of the results."""

    @staticmethod
    @abstractmethod
    def table(result: Any) -> Any:
        """Return a table of what `write` returns."""

    def finish(
        self, points: Sequence[Point], folder: Path, journal: Journal, on_point: Callable[[], Any], progress: bool
    ) -> None:
        """Measure what is not in the journal yet, and call `on_point` after each point. `folder` is the output_dir."""
        from rollout.measure.journal import measure_points
        from sparse_rl.recipe import sampling

        measure_points(points, sampling.engines(self.run, progress), journal, on_point, progress)

    @classmethod
    def write(cls, file: Path, recipe: Recipe, journal: Journal, points: Sequence[Any]) -> Any:
        """Write {format_version, recipe, versions, seed, rows} as JSON, with the rows of all complete points.

        Returns the rows. Only one process at a time writes, so the file of the last call has the rows of all processes.
        """
        versions = json.loads((file.parent / ENVIRONMENT_FILE).read_text())
        with journal.writing():
            journal.refresh()
            rows = [point.row() for point in points if point.complete]
            content = {
                "format_version": FORMAT_VERSION,
                "recipe": recipe.resolved(),
                "versions": versions,
                "seed": recipe.seed,
                **cls.settings,
                "rows": [{**dataclasses.asdict(row), "budget": row.parameters.get("budget")} for row in rows],
            }
            replace_text(file, json.dumps(content, indent=2) + "\n")
        return rows

    @staticmethod
    def unfinished(recipe: Any, result: Any) -> str | None:
        """Return what other processes still work on, in words; None if there is nothing."""
        missing = recipe.count_points() - len(result)
        return f"{missing} rows; the last process writes these rows" if missing else None

    def all_findings(self) -> dict[str, str]:
        recipe = self.run.recipe
        return {"recipe": f"{recipe.kind}, into {recipe.output_dir}", **self.run.findings, **self.findings()}


def measured(
    kind: type[Measurement], recipe: Recipe, progress: bool = True, resume: bool = False, **options: Any
) -> Any:
    """Measure, write the results to the recipe's output_dir after each point, and return what `kind.write` returns. A
    row is missing if another process still works on it.

    resume : True keeps what earlier calls finished
    options : arguments of `kind.prepare`

    Raises UserError for errors that the user can fix, if possible before a model is loaded.
    """
    with stage("loading", recipe.model, shown=progress):
        from rollout.measure.journal import Journal
        from trainer import rundir

        measurements = kind.prepare(recipe, **options)
    for one in measurements:
        findings = one.all_findings()
        for topic in one.told:
            say(topic, findings[topic])
    folder = rundir.prepare(recipe.output_dir, recipe.as_yaml())
    with Journal(folder / kind.files[1], resume=resume) as journal:
        points = [one.points(journal) for one in measurements]
        every = [point for of_model in points for point in of_model]
        write = partial(kind.write, folder / kind.files[0], recipe, journal, every)
        for one, of_model in zip(measurements, points, strict=True):
            if not all(point.complete for point in of_model):
                one.finish(of_model, folder, journal, write, progress)
        return write()


def run_measurement(kind: type[Measurement], options: argparse.Namespace, session: Session, recipe: Any) -> int:
    folder = Path(recipe.output_dir)
    refuse_used(folder, kind.files, "output_dir", options.overwrite or options.resume, resumable=True)
    quiet_loading(session.verbose)
    if options.dry_run:
        for one in kind.prepare(recipe):
            print_findings(one.all_findings(), one.not_checked)
        return 0
    session.folder = folder
    result = measured(kind, recipe, recipe.rollout.progress, options.resume)
    if result:
        print_table(kind.table(result))
    if waiting := kind.unfinished(recipe, result):
        say("unfinished", f"other processes still work on {waiting}")
    if result is not None:
        print(folder / kind.files[0])
    return 0
