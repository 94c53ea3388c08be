"""The finding at the top of a report: the effect of each kind of training, or the cost of eviction.

Only evaluations with equal tasks, sampling and caches are compared. An error is a standard error, and a difference of
at most two is "within error". If an evaluation is missing, the finding says so instead of a difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from sparse_rl.analysis.report import ReportedRun, by_kind, groups, logged
from sparse_rl.analysis.results import METRICS, SIZES
from sparse_rl.analysis.tables import model_label
from sparse_rl.methods.config import budget_words
from sparse_rl.metrics import read_metrics

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "max_completion_length", "forced_answer", "accuracy"),
    *("prompt_cache", "dtype"),
)
LOGGED = ("eval_reward", "reward", "kl", "loss")  # the first that a run has logged is shown if it was not evaluated
SHOWN = 3  # trainings without a comparison, and evaluations, that get words
Pair = tuple[Any, Any]  # rows of evaluations: before and after a training, or with a full and a small cache
UNKNOWN = (
    "The effect on accuracy is unknown: no evaluation before training has the task, sampling and cache of one after "
    "it. Run sparse-rl eval on both models, with the cache of the training."
)


@dataclass
class Finding:
    """Findings, each with its cost or ""; the next step; bars (name, accuracy, standard error), all of `measured`."""

    sentences: list[tuple[str, str]] = field(default_factory=list)
    remedy: str = ""
    measured: str = ""
    bars: list[tuple[str, float, float]] = field(default_factory=list)


def conditions(row: Any, recipe: Mapping[str, Any]) -> str:
    """Return the task and the sampling of a row of an evaluation as text. Rows can be compared if their texts agree."""
    task = [row.task, (recipe.get("tasks") or {}).get(row.task), row.problems, row.samples, row.excluded]
    return json.dumps([task, {name: recipe.get(name) for name in SAMPLING}], sort_keys=True)


def averaged(values: Sequence[float], errors: Sequence[float | None]) -> tuple[float, float]:
    """Return the mean of values, one for each seed, and its standard error, which is infinite if an error is None.

    The part over problems does not shrink with more seeds, because all seeds solve the same problems; the part over
    seeds does. errors : standard errors of all numbers in the values, over problems
    """
    problems = sum(math.inf if error is None else error**2 for error in errors) / len(values)
    return fmean(values), math.sqrt(problems + (variance(values) / len(values) if len(values) > 1 else 0.0))


def accuracy(rows: Sequence[Any]) -> tuple[float, float]:
    """Return the mean accuracy of rows, one for each seed, and its standard error."""
    return averaged([row.accuracy for row in rows], [row.standard_error for row in rows])


def difference(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the mean of the second accuracy minus the first, over pairs of rows, and its standard error."""
    errors = [row.standard_error for pair in pairs for row in pair]
    return averaged([after.accuracy - before.accuracy for before, after in pairs], errors)


def find(runs: Sequence[ReportedRun], rows: Sequence[Any]) -> Finding:
    """Return the finding.

    rows : rows of evaluations with the attributes of EvalRow, with `conditions`, and with the time `written`
    """
    result, scored = Finding(), [row for row in rows if row.accuracy is not None]
    for some in by_kind(runs).values():
        _add_trainings(result, some, scored)
    if runs and not result.bars:
        result.remedy = UNKNOWN
    if scored and not runs:
        first = (scored[0].model, scored[0].conditions)
        _add_evaluation(result, [row for row in scored if (row.model, row.conditions) == first])
    return result


def _add_trainings(result: Finding, runs: Sequence[ReportedRun], rows: Sequence[Any]) -> None:
    """Add the effect of the runs of one kind: all under the cache under which most of them can be compared."""
    newest = sorted(rows, key=lambda row: row.written)  # of equal evaluations the newest counts
    table = {(_place(row.model), row.conditions, _cache(row)): row for row in newest}
    run_of = {run.folder: run for run in runs}
    lines = {group.name: [run_of[Path(folder)] for folder in group.folders] for group in groups(runs)}
    own = [(block.get("policy"), block.get("budget")) for run in runs if (block := run.recipe.get("cache"))]

    def pairs(name: str, task: str, cache: str) -> list[Pair]:
        both = [[table.get((_place(at), task, cache)) for at in (r.recipe.get("model"), r.folder)] for r in lines[name]]
        return [(before, after) for before, after in both if before and after]

    def rank(row: Any) -> tuple[int, bool, bool]:
        count = sum(bool(pairs(name, row.conditions, _cache(row))) for name in lines)
        return count, row.policy != "full", (row.policy, row.parameters.get("budget")) in own

    evaluated = [row for row in rows if _place(row.model) in run_of]
    row = max(evaluated, key=rank, default=None)
    compared = {name: both for name in lines if row and (both := pairs(name, row.conditions, _cache(row)))}
    if row is None or not compared:
        _add_uncompared(result, lines, evaluated)
        return
    best = max(compared, key=lambda name: difference(compared[name])[0])
    starts = {name: {_place(before.model) for before, _ in both} for name, both in compared.items()}
    compared = {name: both for name, both in compared.items() if starts[name] == starts[best]}
    bars = {name: accuracy([after for _, after in both]) for name, both in compared.items()}
    (change, error), count = difference(compared[best]), len(compared[best])
    before = accuracy([before for before, _ in compared[best]])
    verb = "changed" if abs(change) <= 2 * error else "raised" if change > 0 else "lowered"
    best_of = f", the best of {len(compared)} trainings under this cache" if len(compared) > 1 else ""
    seconds = [time for run in lines[best] if (time := _seconds(read_metrics(run.folder)))]
    costs = [f"{fmean(seconds) / 60:.1f} minutes of training{' for each seed' * (count > 1)}"] if seconds else []
    if row.policy != "full" and (full := pairs(best, row.conditions, "full")):
        ends = " became ".join(f"{fmean(pair[place].accuracy for pair in full):.1%}" for place in (0, 1))
        costs.append(f"accuracy with a full cache: {ends} ({_points(*difference(full))})")
    about = f"Training {best} ({lines[best][0].training}{best_of}) {verb} the accuracy on {row.task} {_words(row)}"
    ends = f"from {before[0]:.1%} to {bars[best][0]:.1%}: {_points(change, error)}"
    seeds = f"{count} of {len(lines[best])} seeds" if len(lines[best]) > 1 else "1 seed"
    others = len({one.task for one in evaluated} - {row.task})
    counts = f"{row.problems:,} problems, {seeds}" + f"; {others} further tasks are below" * bool(others)
    costs += [] if row.policy == "full" else [_held([after for _, after in compared[best]])]
    costs += ["of repeated evaluations, the newest counts"] if len(table) < len(rows) else []
    result.sentences.append((f"{about} {ends} ({counts}).", "; ".join(costs)))
    if count == 1:
        result.remedy = "This is one seed: train and evaluate others to see the spread."
    if not result.bars:
        result.measured = f"{row.task}, {_words(row)}"
        result.bars = [("before training", *before), *((name, *bar) for name, bar in bars.items())]


def _add_uncompared(result: Finding, lines: Mapping[str, Sequence[ReportedRun]], rows: Sequence[Any]) -> None:
    """Add what was measured of trainings that no evaluation compares with the model before."""
    for name, (run, *_) in list(lines.items())[:SHOWN]:
        log, words = read_metrics(run.folder), "no metric was logged"
        for label, values in ((METRICS[short][2], logged(log, METRICS[short][0])) for short in reversed(LOGGED)):
            if few := -(-len(values) // 10):
                first, last = fmean(values[:few]), fmean(values[-few:])
                words = f"{label}: {first:.3f} in the first tenth of the steps, {last:.3f} in the last"
        after = [_measured(row) for row in rows if _place(row.model) == run.folder]
        result.sentences.append((f"Training {name} ({run.training}): {'; '.join(after[:SHOWN]) or words}.", ""))


def _add_evaluation(result: Finding, rows: Sequence[Any]) -> None:
    """Add the cost of eviction, from rows of one model, task and sampling."""
    whole = next((row for row in rows if row.policy == "full"), None)
    losses = [(row, *difference([(whole, row)])) for row in rows if whole and row.policy != "full"]
    model = model_label(rows[0].model)
    if not losses:
        result.sentences.append((f"{model}: {'; '.join(map(_measured, rows[:SHOWN]))}.", ""))
        other = "under a cache that evicts" if whole else "with a full cache"
        result.remedy = f"The cost of eviction is unknown: evaluate the model {other}, too."
    else:
        close = [loss for loss in losses if -loss[1] <= 2 * loss[2] < math.inf]
        row, *loss = min(close, key=lambda loss: loss[0].retention) if close else max(losses, key=lambda loss: loss[1])
        words = "The smallest cache within error" if close else "None of the smaller caches is within error; the best"
        sentence = f"{model}: {_measured(whole)}. {words}, {_name(row)}: {_points(*loss)}."
        result.sentences.append((sentence, _held([row])))
    result.measured = f"{rows[0].task}, {model}"
    result.bars = [(_name(row), *accuracy([row])) for row in rows]


def _place(model: Any) -> Path:
    path = Path(str(model)).resolve()
    return path.parent if path.name == "model" else path


def _cache(row: Any) -> str:
    return "full" if row.policy == "full" else json.dumps([row.policy, row.parameters], sort_keys=True)


def _name(row: Any) -> str:
    sizes = ((key, row.parameters[key]) for key in SIZES if row.parameters.get(key))
    return ", ".join([row.policy, *(f"{key} {budget_words(size) or size}" for key, size in sizes)])


def _seconds(log: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds of all steps in a log. Its step_time is the mean over the steps since the line before."""
    lines = [line for line in log if line.get("step_time") is not None]
    ends = [0, *(line["step"] for line in lines)]
    return sum(line["step_time"] * (line["step"] - start) for line, start in zip(lines, ends, strict=False))


def _words(row: Any) -> str:
    return "with a full cache" if row.policy == "full" else f"under a small cache ({_name(row)})"


def _measured(row: Any) -> str:
    error = "" if row.standard_error is None else f" ± {100 * row.standard_error:.1f}"
    return f"accuracy {100 * row.accuracy:.1f}{error}% on {row.task} {_words(row)}"


def _points(change: float, error: float) -> str:
    """Return a difference of accuracy in percentage points."""
    bounded = f"± {100 * error:.1f} percentage points"
    size = bounded if math.isfinite(error) else "percentage points, of unknown standard error"
    within = ", within error (2 standard errors)" * (abs(change) <= 2 * error < math.inf)
    return f"{100 * change:+.1f} {size}{within}".replace("-", "−")


def _held(rows: Sequence[Any]) -> str:
    most, parameters = max(row.peak_entries for row in rows), rows[0].parameters
    whole = parameters.get("budget") == most - parameters.get("period", math.inf)
    entries = f"at most {most:,} entries{' (budget + period)' * whole} in each kv head"
    kept = f"{fmean(row.retention for row in rows):.0%} of a sequence's tokens at the end"
    return f"the small cache held {kept}, {entries}"
