"""The part of a report about accuracy: tables and pictures of evaluations and perplexities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sparse_rl.commands.console import warn
from sparse_rl.errors import UserError, reason
from sparse_rl.files import read_text

if TYPE_CHECKING:
    from sparse_rl.analysis.report.runs import Run

SWEEPS = (  # (metric, axis, caption) of the pictures of an evaluation; None is the default of `sparse-rl plot`
    (None, None, "one line for each method."),
    ("retention_correct", None, "share of the tokens held at the end of right answers (G-KV figures 6, 19)."),
    ("log_perplexity", "seconds", "log-perplexity against seconds (Attention Matching figure 10, left)."),
    ("accuracy", "log_perplexity", "accuracy against log-perplexity (Attention Matching figure 10, right)."),
)
BEFORE = "before training"  # name of the model that the trainings of a report start from
COLUMNS = (
    "n: problems × samples of each. kept: share of a sequence's tokens that the cache holds at the end, of all "
    "answers and of the right ones. peak: largest number of entries of a kv head. tokens: mean length of a "
    "completion. cut off: completions that reached the largest length. tok/s: sampled tokens per second."
)


def accuracy(evaluations: Sequence[Path], perplexities: Sequence[Path], runs: Sequence[Run], folder: Path) -> str:
    """Return tables and pictures of evaluations and perplexities.

    evaluations, perplexities : files eval.json and perplexity.json
    runs : runs of the report;  folder : folder of the pictures
    """
    from sparse_rl.analysis.evaluation import accuracy_table
    from sparse_rl.analysis.report.page import heading, note
    from sparse_rl.analysis.report.published import beside_published
    from sparse_rl.analysis.report.tables import from_terminal
    from sparse_rl.analysis.sweeps import points_table, read_sweep

    rows = [row for file in evaluations for row in eval_rows(file)]
    drawn = trainings_picture(rows, runs, folder / "trainings.png")
    made = [drawn] if drawn else []
    for compacted in (False, True):  # rows of compacted contexts have further columns
        if some := [row for row in rows if (row.contexts is not None) is compacted]:
            made.append(from_terminal(accuracy_table(some), "of compacted contexts" if compacted else ""))
            made.append(note(COLUMNS))
    made.append(beside_published(rows))
    for number, file in enumerate([*evaluations, *perplexities]):
        try:
            sweep = read_sweep(file)
        except UserError as error:
            warn(f"{file} is left out: {error.message}")
            continue
        if file in perplexities:
            made += [heading(str(file.parent)), from_terminal(points_table(sweep), str(file))]
        made.append(sweep_pictures(file, folder, f"sweep{number}"))
    return "".join(made)


def sweep_pictures(file: Path, folder: Path, name: str) -> str:
    """Return the pictures of SWEEPS that the rows of an eval.json or perplexity.json have numbers for."""
    from sparse_rl.analysis.report.page import picture, pictures
    from sparse_rl.analysis.sweeps import plot_sweep, read_sweep, varied

    drawn = []
    for number, (metric, axis, about) in enumerate(SWEEPS):
        try:
            sweep = read_sweep(file, metric)
        except UserError:  # no row has this metric
            continue
        if axis is None and not varied(sweep):
            continue
        if axis is not None and not any(axis in point.measured for point in sweep.points):
            continue
        if metric == "retention_correct" and any("seconds" in point.measured for point in sweep.points):
            continue  # compacted contexts; the figures are about caches that evict
        lines = plot_sweep(sweep, folder / f"{name}_{number}.png", axis)
        drawn.append(picture(lines, f"{file.parent}, {sweep.subject}: {about}"))
    return pictures(drawn)


def eval_rows(file: Path) -> list[Any]:
    """Return the rows of an eval.json with the attributes of EvalRow; [] after a warning if the file is damaged."""
    try:
        rows = [
            {"log_perplexity": None, "log_perplexity_error": None, **row} for row in json.loads(read_text(file))["rows"]
        ]
        for row in rows:
            row["further_accuracy"] = {name: SimpleNamespace(**one) for name, one in row["further_accuracy"].items()}
            row["contexts"] = None if row.get("contexts") is None else SimpleNamespace(**row["contexts"])
            for name in ("pass_at_k", "pass_at_k_error"):
                row[name] = {int(k): value for k, value in row[name].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        warn(f"{file} is left out: {reason(error)}")
        return []
    return [SimpleNamespace(**row) for row in rows]


def trainings_picture(rows: Sequence[Any], runs: Sequence[Run], out: Path) -> str:
    """Return a picture of the accuracy of each trained model under caches that evict, and with a full cache. It is
    empty if fewer than two trainings were evaluated under both.
    """
    from sparse_rl.analysis.accuracy import plot_accuracy
    from sparse_rl.analysis.report.page import note, picture, pictures
    from sparse_rl.analysis.report.runs import groups

    methods: dict[str, tuple[list[float], list[float]]] = {}
    of_method: dict[str, str | None] = {}

    def add(name: str, method: str | None, folders: set[Path]) -> None:
        own = [row for row in rows if folders & {Path(row.model).resolve(), Path(row.model).resolve().parent}]
        scored = [row for row in own if row.accuracy is not None]
        caches = [[row.accuracy for row in scored if (row.policy == "full") is full] for full in (False, True)]
        if all(caches):
            methods[name], of_method[name] = (caches[0], caches[1]), method

    add(BEFORE, "sft", {Path(str(run.recipe["model"])).resolve() for run in runs if run.recipe.get("model")})
    for group in groups(runs):
        add(group.name, group.method, {folder.resolve() for folder in group.folders})
    if len(methods) < 2:
        return ""
    budgets_used = sorted({str(row.parameters.get("budget", row.policy)) for row in rows if row.policy != "full"})
    title = f"Accuracy after each training; the small cache has a budget of {' or '.join(budgets_used)}"
    about = "Accuracy after each training, under caches that evict and with a full cache."
    if any(len(values) > 1 for caches in methods.values() for values in caches):
        about += " Dots: single evaluations."
    drawn = picture(plot_accuracy(methods, out, title, of_method), about)
    best = [max(methods, key=lambda name: fmean(methods[name][full])) for full in (0, 1)]
    words = (
        f"Best {cache}: {name}, {fmean(methods[name][full]):.1%}"
        + (f" ({BEFORE}: {fmean(methods[BEFORE][full]):.1%})." if BEFORE in methods and name != BEFORE else ".")
        for full, (name, cache) in enumerate(zip(best, ("with the small cache", "with a full cache"), strict=True))
    )
    return note(" ".join(words)) + pictures([drawn])
