"""Accuracy, or perplexity, against what a cache may hold, one line for each way to choose it: the budget of a sweep, or
the share that stays of a context that is compacted once.

sweep = read_sweep(Path("eval.json"))
plot_sweep(sweep, "eval.png") if varied(sweep) else points_table(sweep)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sparse_rl.analysis.drawing import MARKERS, label_ends, method_colours, new_figure, save_figure
from sparse_rl.errors import UserError, one_line, reason
from sparse_rl.files import MOST_TEXT, read_text

AXES = {  # what was varied -> the axis' label
    "ratio": "share of the context's tokens that stay",
    "budget": "budget: entries that a compaction leaves in each kv head",
}
MEASURES = {  # the key of a row -> the axis' label
    "accuracy": "accuracy (pass@1)",
    "nll": "log of the perplexity (nats a token)",
}
# setting -> what a budget makes of it: the window of h2o, the period of am
FOLLOWS: dict[str, Callable[[int], int]] = {"window": lambda budget: budget // 2, "period": lambda budget: budget}


@dataclass(frozen=True)
class Point:
    """A row of an evaluation: what was measured on a task under a policy, and its standard error, where it has one."""

    task: str
    policy: str
    parameters: Mapping[str, Any]
    value: float
    error: float | None = None


@dataclass(frozen=True)
class Sweep:
    """The rows of an eval.json or a perplexity.json that have a value.

    measure : of MEASURES
    subject : what it was measured on, in words
    """

    measure: str
    subject: str
    points: Sequence[Point]


def read_sweep(file: Path) -> Sweep:
    """Raises UserError for what is no eval.json or perplexity.json, is damaged, or has no value."""
    try:
        content = json.loads(read_text(file, MOST_TEXT))
        rows = [row for row in content["rows"] if row["parameters"] is not None]
        measure = "nll" if any("nll" in row for row in rows) else "accuracy"
        points = [_point(row, measure) for row in rows if row[measure] is not None]
        recipe = content.get("recipe") or {}
        model, text = str(recipe.get("model") or ""), str(recipe.get("text") or "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else reason(error)
        raise UserError(f"{file} is no eval.json or perplexity.json, or is damaged: {one_line(why, 120)}") from error
    if not points:
        raise UserError(f"no row of {file} has an {measure}: there is nothing to draw")
    tasks = sorted({point.task for point in points})
    of = ", ".join(tasks) if len(tasks) <= 3 else f"{len(tasks)} tasks"
    if measure == "nll":
        of = Path(text).name or "a text"
    name = Path(model).name if Path(model).is_absolute() else model
    return Sweep(measure, one_line(of, 60) + (f"; {one_line(name, 60)}" if name else ""), points)


def _point(row: Mapping[str, Any], measure: str) -> Point:
    """Raises LookupError, TypeError or ValueError for what is no row."""
    value, error, parameters = row[measure], row["standard_error"], row["parameters"]
    task = row["task"] if measure == "accuracy" else ""
    if not isinstance(row["policy"], str) or not isinstance(task, str) or not isinstance(parameters, dict):
        raise TypeError("of a row, task or policy is no text, or parameters are no settings")
    varied = [parameters[key] for key in AXES if key in parameters]
    if not all(_is_number(one) and one > 0 for one in varied):
        raise ValueError("a budget or a ratio is no positive number")
    if not all(_is_number(one) for one in (value, 0 if error is None else error)):
        raise ValueError(f"an {measure} or a standard error is no number")
    return Point(task, row["policy"], parameters, value, error)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9  # no NaN, and nothing that no axis holds


def varied(sweep: Sweep) -> str | None:
    """What the sweep is drawn against: the key of AXES of which some method has several values; None where none has."""
    for axis in AXES:
        for points in _methods(sweep.points, axis).values():
            if len({point.parameters.get(axis) for point in points} - {None}) > 1:
                return axis
    return None


def _methods(points: Sequence[Point], axis: str) -> dict[str, list[Point]]:
    """Name -> its points, the smallest cache first."""
    made: dict[str, list[Point]] = {}
    for point, name in zip(points, method_names(points, axis), strict=True):
        made.setdefault(name, []).append(point)
    return {name: sorted(mine, key=lambda point: point.parameters.get(axis, 0)) for name, mine in made.items()}


def plot_sweep(sweep: Sweep, out: str | Path) -> Path:
    """A line for each method with its values at its ratios, or budgets, and a bar of one standard error; dashed for one
    that has none, such as a full cache. Several tasks are told apart by their names.

    Raises UserError where no method has two points.
    """
    axis = varied(sweep)
    if axis is None:
        raise UserError("no method of this evaluation has two budgets, or ratios: there is no line to draw")
    methods = _methods(sweep.points, axis)
    policies = [mine[0].policy for mine in methods.values()]
    places = sorted({point.parameters[axis] for point in sweep.points if axis in point.parameters})
    what = "Accuracy on" if sweep.measure == "accuracy" else "Perplexity of"
    figure, axes = new_figure(f"{what} {sweep.subject}")
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places], minor=False)
    axes.minorticks_off()
    ends = []
    for line, (colour, (name, mine)) in enumerate(zip(method_colours(policies), methods.items(), strict=True)):
        values = [point.value for point in mine]
        if axis in mine[0].parameters:
            at, errors = [point.parameters[axis] for point in mine], [point.error or 0.0 for point in mine]
            marker = MARKERS[policies[:line].count(policies[line]) % len(MARKERS)]
            axes.errorbar(at, values, errors, color=colour, marker=marker, markersize=4, capsize=2)
        else:
            at = places[-1:]
            axes.plot([places[0], places[-1]], values[-1:] * 2, color=colour, linestyle="--", linewidth=1.2)
        ends.append((at[-1], values[-1], name, colour))
    label_ends(axes, ends, 9)
    axes.set(xlabel=AXES[axis], ylabel=MEASURES[sweep.measure])
    return save_figure(figure, out)


def points_table(sweep: Sweep) -> Table:
    """The points as a table for the terminal: what says all where there is no line to draw."""
    axis = next((key for key in AXES if any(key in point.parameters for point in sweep.points)), "budget")
    accuracy = sweep.measure == "accuracy"
    made = Table(title=escape(f"{'accuracy, in percent' if accuracy else 'perplexity'}: {sweep.subject}"))
    for name in ("cache", axis, *(["pass@1"] if accuracy else ["nll a token, nats", "perplexity"])):
        made.add_column(name, justify="left" if name == "cache" else "right", no_wrap=True)
    for point, name in zip(sweep.points, method_names(sweep.points, axis), strict=True):
        scale, digits = (100, 1) if accuracy else (1, 4)
        measured = f"{scale * point.value:.{digits}f}"
        measured += "" if point.error is None else f" ± {scale * point.error:.{digits}f}"
        further = [] if accuracy else [f"{math.exp(point.value):.2f}" if point.value < 100 else "–"]
        made.add_row(escape(name), str(point.parameters.get(axis, "–")), measured, *further)
    return made


def method_names(points: Sequence[Point], axis: str = "ratio") -> list[str]:
    """What each point calls its method: the policy, and those of its settings, but what was varied (`axis`), that other
    points of the policy have otherwise; in front of it the task, where there are several.
    """
    several = len({point.task for point in points}) > 1
    made = []
    for point in points:
        alike = [other.parameters for other in points if other.policy == point.policy]
        differ = [
            _setting(key, value)
            for key, value in point.parameters.items()
            if key != axis and any(not _agree(point.parameters, other, key) for other in alike)
        ]
        made.append((f"{point.task}: " if several else "") + ", ".join([point.policy, *differ]))
    return made


def _agree(ours: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> bool:
    """Whether two caches have one setting: its value, or what follows from their budgets where it is not given."""
    follows = FOLLOWS.get(key)
    both = follows is not None and all(
        "budget" in one and one.get(key) == follows(one["budget"]) for one in (ours, theirs)
    )
    return both or ours.get(key) == theirs.get(key)


def _setting(key: str, value: Any) -> str:
    """A setting in a name: one of a choice, or several, alone; another behind its key."""
    if isinstance(value, list):
        return "+".join(map(str, value))
    return value if isinstance(value, str) else f"{key} {value}"
