"""Accuracy, log-perplexity or perplexity, one line per method, against a setting of the cache or a measured number.

The setting is the kept share of a context that is compacted once, or the budget, or any other parameter of a policy.
The measured numbers are the seconds in which a context was made, accuracy and log-perplexity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator, StrMethodFormatter
from rich.markup import escape
from rich.table import Table

from sparse_rl.analysis.drawing import MARKERS, label_ends, method_colours, new_figure, save_figure
from sparse_rl.analysis.evaluation import model_label
from sparse_rl.errors import UserError, one_line, reason
from sparse_rl.files import MOST_TEXT, read_text

AXES = {  # size of the cache -> axis label; a size is preferred as x axis, and drawn on a logarithmic scale
    "ratio": "share of the context's tokens that are kept",
    "budget": "budget: entries that a compaction leaves in each kv head",
}
MEASURES = {  # key of a row -> axis label
    "accuracy": "accuracy (pass@1)",
    "log_perplexity": "log-perplexity of the full cache's answers (nats a token)",
    "nll": "log of the perplexity (nats a token)",
    "retention": "share of the tokens held at the end",
    "retention_correct": "share of the tokens held at the end",
}
ERRORS = {  # key of a row -> key of its standard error, if it has one
    "accuracy": "standard_error", "nll": "standard_error", "log_perplexity": "log_perplexity_error"
}  # fmt: skip
TITLES = {
    "accuracy": "Accuracy on",
    "log_perplexity": "Log-perplexity on",
    "nll": "Perplexity of",
    "retention": "Token retention on",
    "retention_correct": "Token retention of correct answers on",
}
RETENTION = ("retention", "retention_correct")
WHY_MISSING = {  # key of a row -> reason why no row may have it
    "log_perplexity": "; add policy: full to the recipe's prompt_cache",
    "retention_correct": "; no answer is correct",
}
MEASURED_AXES = {  # numbers of a row, not settings, that can be the x axis -> axis label
    "seconds": "seconds to make a context: prefill, reference queries, compaction",
    "log_perplexity": MEASURES["log_perplexity"],
    "accuracy": MEASURES["accuracy"],
}
# setting whose default depends on the budget (window of h2o, period of am) -> that default, given the budget
FOLLOWS: dict[str, Callable[[int], int]] = {"window": lambda budget: budget // 2, "period": lambda budget: budget}


@dataclass(frozen=True)
class Point:
    """A row of an evaluation: the value measured on a task under a policy, and its standard error, if any.

    task : name of the task, or "MODEL, TASK" if there are several models
    measured : key of MEASURED_AXES -> the row's number, if it has one
    """

    task: str
    policy: str
    parameters: Mapping[str, Any]
    value: float
    error: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def uncompacted(self) -> bool:
        """True if a context was not compacted: all of it, or nothing of it, was kept."""
        return self.policy in ("full", "none") and not self.parameters.get("summary")


@dataclass(frozen=True)
class Sweep:
    """The rows of an eval.json or a perplexity.json with a value of `measure`, a key of MEASURES."""

    measure: str
    subject: str
    points: Sequence[Point]


def read_sweep(file: Path, metric: str | None = None) -> Sweep:
    """Read an eval.json or a perplexity.json.

    metric : key of MEASURES; None means nll for a perplexity.json, which has no other, and accuracy for an eval.json

    Raises UserError if the file is neither, is damaged, or has no values of the metric.
    """
    try:
        content = json.loads(read_text(file, MOST_TEXT))
        rows = [row for row in content["rows"] if row["parameters"] is not None]
        choices = ["nll"] if any("nll" in row for row in rows) else [key for key in MEASURES if key != "nll"]
        measure = metric if metric in choices else choices[0]
        several = len({row.get("model") for row in rows}) > 1
        points = [_point(row, measure, several) for row in rows if _value(row, measure) is not None]
        if measure in RETENTION:  # a full cache holds all tokens, so its line would only shrink the others
            points = [point for point in points if point.policy != "full"] or points
        recipe = content.get("recipe") or {}
        model, text = str(recipe.get("model") or ""), str(recipe.get("text") or "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else reason(error)
        raise UserError(
            f"{file} is not an eval.json or perplexity.json, or is damaged: {one_line(why, 120)}"
        ) from error
    if metric not in (None, measure):
        raise UserError(f"{file} has no metric {metric}; use {', '.join(choices)}", "--metric")
    if not points:
        article = "an" if measure in ("accuracy", "nll") else "a"
        why = WHY_MISSING.get(measure, "")
        raise UserError(f"no row of {file} has {article} {measure}, so there is nothing to draw{why}")
    tasks = sorted({point.task for point in points})
    measured_on = ", ".join(tasks) if len(tasks) <= 3 else f"{len(tasks)} tasks"
    if measure == "nll":
        measured_on = Path(text).name or "a text"
    name = Path(model).name if Path(model).is_absolute() else model
    return Sweep(measure, one_line(measured_on, 60) + (f"; {one_line(name, 60)}" if name else ""), points)


def _value(row: Mapping[str, Any], measure: str) -> Any:
    """Return a row's value of a measure. Files of earlier versions, and those of contexts, may lack some measures."""
    return row[measure] if measure in ("accuracy", "nll") else row.get(measure)


def _measured(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row that can be an x axis. Raises TypeError or LookupError for an invalid row."""
    costs = row.get("contexts")
    numbers = {key: row.get(key) for key in ("accuracy", "log_perplexity")}
    numbers["seconds"] = None if costs is None else sum(costs["seconds"].values())
    return {key: number for key, number in numbers.items() if number is not None}


def _point(row: Mapping[str, Any], measure: str, several_models: bool) -> Point:
    """Return the point that a row describes. Raises LookupError, TypeError or ValueError for an invalid row."""
    value, parameters = row[measure], row["parameters"]
    error = row[ERRORS[measure]] if measure in ERRORS else None
    task, measured = row["task"] if measure != "nll" else "", _measured(row)
    if several_models:
        task = ", ".join(filter(None, (model_label(row["model"]), task)))
    if not isinstance(row["policy"], str) or not isinstance(task, str) or not isinstance(parameters, dict):
        raise TypeError("a row's task or policy is not text, or its parameters are not a mapping")
    varied = [parameters[key] for key in AXES if key in parameters]
    if not all(_is_number(item) and item > 0 for item in varied):
        raise ValueError("a budget or a ratio is not a positive number")
    if not all(_is_number(item) for item in (value, 0 if error is None else error, *measured.values())):
        raise ValueError(f"{measure} or a standard error is not a number")
    return Point(task, row["policy"], parameters, value, error, measured)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9  # no NaN, and no number too large for an axis


def varied(sweep: Sweep) -> list[str]:
    """Return the settings with several values in one method, the most suitable x axis first: sizes of the cache, then
    numbers, then texts. Among numbers, and among texts, settings with more values come first.
    """
    values: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for point in sweep.points for key in point.parameters):
        for points in _methods(sweep.points, key).values():
            own = [point.parameters[key] for point in points if point.parameters.get(key) is not None]
            if len(own) > 1 and all(_is_number(value) or isinstance(value, str) for value in own):
                values.setdefault(key, []).extend(value for value in own if value not in values.get(key, []))
    sizes = list(AXES)
    return sorted(
        values,
        key=lambda key: (
            sizes.index(key) if key in AXES else len(AXES),
            any(isinstance(value, str) for value in values[key]),
            -len(values[key]),
        ),
    )


def _methods(points: Sequence[Point], axis: str) -> dict[str, list[Point]]:
    """Return method name -> points of that method, sorted along `axis`, smallest first."""
    result: dict[str, list[Point]] = {}
    for point, name in zip(points, method_names(points, axis), strict=True):
        result.setdefault(name, []).append(point)
    return {
        name: sorted(points_of_method, key=lambda point: _place(point, axis))
        for name, points_of_method in result.items()
    }


def _place(point: Point, axis: str) -> tuple[bool, float, str]:
    """Return the key by which points are sorted along an axis: numbers by size, then texts."""
    value = point.parameters.get(axis, 0)
    return (False, value, "") if _is_number(value) else (True, 0.0, str(value))


def plot_sweep(sweep: Sweep, out: str | Path, axis: str | None = None) -> Path:
    """Draw the values of each method as a line against a setting, with error bars of one standard error.

    A method without this setting, such as a full cache, is a dashed line.

    axis : the setting, or a key of MEASURED_AXES (`plot_measured`); None means the first setting of `varied`

    Raises UserError if no method has two values of the setting, so that there is no line.
    """
    if axis in MEASURED_AXES:
        return plot_measured(sweep, out, axis)
    possible = varied(sweep)
    if not possible:
        raise UserError("no method of this evaluation has two values of a setting, so there is no line to draw")
    axis = axis or possible[0]
    if axis not in possible:
        raise UserError(f"no method has two values of {axis}; settings with several values: {', '.join(possible)}")
    methods = _methods(sweep.points, axis)
    policies = [points_of_method[0].policy for points_of_method in methods.values()]
    with_axis = sorted((point for point in sweep.points if axis in point.parameters), key=lambda p: _place(p, axis))
    settings = list(dict.fromkeys(point.parameters[axis] for point in with_axis))
    numeric = all(map(_is_number, settings))
    place_of = {setting: setting if numeric else place for place, setting in enumerate(settings)}
    places = list(place_of.values())
    figure, axes = new_figure(f"{TITLES[sweep.measure]} {sweep.subject}")
    if axis in AXES:
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{setting:g}" if numeric else setting for setting in settings], minor=False)
    axes.minorticks_off()
    ends = []
    for line, (colour, (name, points_of_method)) in enumerate(
        zip(method_colours(policies), methods.items(), strict=True)
    ):
        values = [point.value for point in points_of_method]
        if axis in points_of_method[0].parameters:
            x_values, errors = (
                [place_of[point.parameters[axis]] for point in points_of_method],
                [point.error or 0.0 for point in points_of_method],
            )
            marker = MARKERS[policies[:line].count(policies[line]) % len(MARKERS)]
            axes.errorbar(x_values, values, errors, color=colour, marker=marker, markersize=4, capsize=2)
        else:
            x_values = places[-1:]
            axes.plot([places[0], places[-1]], values[-1:] * 2, color=colour, linestyle="--", linewidth=1.2)
        ends.append((x_values[-1], values[-1], name, colour))
    label_ends(axes, ends, 9)
    axes.set(xlabel=AXES.get(axis, axis), ylabel=MEASURES[sweep.measure])
    return save_figure(figure, out)


def plot_measured(sweep: Sweep, out: str | Path, axis: str) -> Path:
    """Draw each row at a measured number of its own, such as seconds. Points of a method that differ only in the size
    of the cache are joined, in the order of the sizes.

    Against seconds, a context that is not compacted (full, none) is a dashed line across the figure.

    axis : key of MEASURED_AXES

    Raises UserError if the rows have no such number.
    """
    points = [point for point in sweep.points if axis in point.measured]
    if not points or axis == sweep.measure:
        remedy = "use another axis" if points else "only rows of an evaluation with prompt_cache have it"
        raise UserError(f"{axis} cannot be the axis of this {sweep.measure}; {remedy}", "--axis")
    size = next((key for key in AXES if any(key in point.parameters for point in points)), "ratio")
    methods = _methods(points, size)
    policies = [points_of_method[0].policy for points_of_method in methods.values()]
    figure, axes = new_figure(f"{TITLES[sweep.measure]} {sweep.subject}")
    if axis == "seconds":
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
    drawn = [point.measured[axis] for point in points if axis != "seconds" or not point.uncompacted]
    ends = []
    for line, (colour, (name, points_of_method)) in enumerate(
        zip(method_colours(policies), methods.items(), strict=True)
    ):
        x_values = [point.measured[axis] for point in points_of_method]
        values = [point.value for point in points_of_method]
        if axis == "seconds" and points_of_method[0].uncompacted and drawn:
            x_values = [0.8 * min(drawn), 1.2 * max(drawn)]
            axes.plot(x_values, values[-1:] * 2, color=colour, linestyle="--", linewidth=1.2)
        else:
            errors = [point.error or 0.0 for point in points_of_method]
            marker = MARKERS[policies[:line].count(policies[line]) % len(MARKERS)]
            axes.errorbar(x_values, values, errors, color=colour, marker=marker, markersize=4, capsize=2, linewidth=1)
        ends.append((x_values[-1], values[-1], name, colour))
    label_ends(axes, ends, 9)
    axes.set(xlabel=MEASURED_AXES[axis], ylabel=MEASURES[sweep.measure])
    return save_figure(figure, out)


def points_table(sweep: Sweep) -> Table:
    sizes = (key for key in AXES if any(key in point.parameters for point in sweep.points))
    axis = next(iter(varied(sweep)), next(sizes, "budget"))
    titles = {
        "accuracy": "accuracy, in percent",
        "log_perplexity": "log-perplexity of the full cache's answers",
        "retention": "tokens held at the end, in percent",
        "retention_correct": "tokens held at the end of correct answers, in percent",
    }
    percent = {"accuracy": "pass@1", "retention": "kept", "retention_correct": "kept if right"}
    heading = percent.get(sweep.measure)
    result = Table(title=escape(f"{titles.get(sweep.measure, 'perplexity')}: {sweep.subject}"))
    for name in ("cache", axis, *([heading] if heading else ["nll a token, nats", "perplexity"])):
        result.add_column(name, justify="left" if name == "cache" else "right", no_wrap=True)
    for point, name in zip(sweep.points, method_names(sweep.points, axis), strict=True):
        scale, digits = (100, 1) if heading else (1, 4)
        measured = f"{scale * point.value:.{digits}f}"
        measured += "" if point.error is None else f" ± {scale * point.error:.{digits}f}"
        further = [] if heading else [f"{math.exp(point.value):.2f}" if point.value < 100 else "–"]
        result.add_row(escape(name), str(point.parameters.get(axis, "–")), measured, *further)
    return result


def method_names(points: Sequence[Point], axis: str = "ratio") -> list[str]:
    """Return the name of each point's method: its policy, and the settings that differ between points of that policy.

    The setting `axis` is left out. If there are several tasks, the name starts with the task.
    """
    several = len({point.task for point in points}) > 1
    result = []
    for point in points:
        alike = [other.parameters for other in points if other.policy == point.policy]
        differ = [
            _setting(key, value)
            for key, value in point.parameters.items()
            if key != axis and any(not _agree(point.parameters, other, key) for other in alike)
        ]
        result.append((f"{point.task}: " if several else "") + ", ".join([point.policy, *differ]))
    return result


def _agree(ours: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> bool:
    """Return True if two caches agree in a setting: equal values, or each value is the default for its budget."""
    follows = FOLLOWS.get(key)
    defaults = follows is not None and all(
        "budget" in item and item.get(key) == follows(item["budget"]) for item in (ours, theirs)
    )
    return defaults or ours.get(key) == theirs.get(key)


def _setting(key: str, value: Any) -> str:
    """Format a setting for a method's name: text and lists without the key, other values after the key.

    A setting that is None is "no KEY".
    """
    if value is None:
        return f"no {key}"
    if isinstance(value, list):
        return "+".join(map(str, value))
    return value if isinstance(value, str) else f"{key} {value}"
