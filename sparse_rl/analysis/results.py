"""Pictures of results: curves of runs, sweeps of evaluations, accuracies of methods.

A result is a frame of points, which `draw_lines` draws. It has a row for each point, with the columns

line, method : name of the line, and its method in drawing.COLOURS, None if unknown
part : "mean", or "max" for a dotted line, if there are two lines of this name and colour
x, y : the point; a line without any x is a dashed one across the figure
low, high : band around the line, if there is one
faint : value that is drawn faintly below the line
error : standard error
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import pandas
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter
from rich.table import Table

from sparse_rl.analysis.drawing import MARKERS, method_colours, name_lines, new_figure, save_figure, shade
from sparse_rl.analysis.tables import model_label, table
from sparse_rl.errors import UserError, nearest_few, one_line, reason
from sparse_rl.files import DAMAGED, MOST_TEXT, read_json
from sparse_rl.methods.config import budget_words
from sparse_rl.metrics import METRICS_FILE, read_metrics

MISSING = float("nan")
COLUMNS = {"part": "", "low": MISSING, "high": MISSING, "faint": MISSING, "error": MISSING}  # with their defaults
MARKED = 12  # points of a line; a longer line has no markers


def draw_lines(points: pandas.DataFrame, out: str | Path, title: str, xlabel: str, ylabel: str, **axis: Any) -> Path:
    """Draw a frame of points. `axis` has properties of the axes, such as xscale."""
    figure, axes = new_figure(title)
    labels = {"xlabel": (xlabel, 46), "ylabel": (ylabel, 36)}
    axes.set(**{k: "\n".join(textwrap.fill(row, n) for row in v.splitlines()) for k, (v, n) in labels.items()}, **axis)
    if axis.get("xscale") == "log":
        axes.minorticks_off()
    if "xticks" not in axis and axis.get("xscale") == "log":
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    elif "xticks" not in axis and (points.x.dropna() % 1 == 0).all():
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    points = points.assign(**{name: value for name, value in COLUMNS.items() if name not in points})
    lines = {names: line for names, line in points.groupby(["line", "part"], sort=False)}
    methods = {name: line.method.iloc[0] for (name, _), line in lines.items()}
    colour_of = dict(zip(methods, method_colours(list(methods.values())), strict=True))
    for (name, part), line in lines.items():
        colour, label = colour_of[name], ", ".join(filter(None, (name, part)))
        if line.x.isna().all():
            ends, y = [points.x.min(), points.x.max()], line.y.iloc[-1]
            axes.plot(ends, [y] * 2, color=colour, linestyle="--", linewidth=1.2, label=label)
        else:
            x = list(line.x)
            if line.faint.notna().any():
                axes.plot(x, line.faint, color=colour, alpha=0.25, linewidth=1)
            if line.low.notna().any():
                axes.fill_between(x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
            if line.error.notna().any():
                axes.errorbar(x, line.y, line.error.fillna(0), ecolor=colour, capsize=2, fmt="none")
            alike = [other for other in methods if methods[other] == methods[name]].index(name)
            marker = MARKERS[alike % len(MARKERS)] if len(line) <= MARKED else None
            style: Any = {"color": colour, "marker": marker, "markersize": 4, "label": label}
            axes.plot(x, line.y, linestyle=":" if part == "max" else "-", **style)
    name_lines(axes)
    return save_figure(figure, out)


# ---- runs ------------------------------------------------------------------------------------------------------------

SMOOTHING = 0.15  # span of the moving average, as a share of the steps
METRICS = {  # short name -> (key of the metric, start of the title, axis label with unit)
    "reward": ("reward", "Reward", "mean reward of the sampled completions"),
    "loss": ("loss", "Loss", "loss"),
    "length": ("completions/mean_length", "Length", "mean length of a completion (tokens)"),
    "cut_off": ("completions/clipped_ratio", "Completions cut off", "share of completions that were cut off"),
    "retention": ("cache/retention", "Retention", "share of the tokens held at the end"),
    "token_accuracy": ("token_accuracy", "Token accuracy", "share of completion tokens that are the likeliest"),
    "entropy": ("entropy", "Entropy", "entropy of the next token (nats)"),
    "kl": ("kl", "KL divergence", "KL divergence per token (nats)"),
    "eval_reward": ("eval_reward", "Reward on validation problems", "mean reward on the validation problems"),
    "tokens_per_second": ("time/tokens_per_second", "Tokens per second", "sampled tokens per second"),
}


def metric_key(metric: str) -> str:
    """Return the key of metrics.jsonl that a short name in METRICS, or a key itself, stands for."""
    return METRICS.get(metric, (metric,))[0]


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed. method : its name in drawing.COLOURS, None if unknown"""

    name: str
    folders: Sequence[Path]
    method: str | None = None

    @cached_property
    def logs(self) -> list[pandas.DataFrame]:
        return [logged_numbers(folder) for folder in self.folders]

    def logged(self, metric: str) -> list[pandas.Series]:
        key = metric_key(metric)
        return [log[key].dropna() for log in self.logs if key in log]


def logged_numbers(folder: Path) -> pandas.DataFrame:
    """Return the numbers that a run has logged: a row for each step, a column for each metric with a number."""
    if not (Path(folder) / METRICS_FILE).is_file():
        raise UserError(f"{folder} is not the directory of a run: it has no {METRICS_FILE}")
    numbers = [
        {key: float(value) for key, value in line.items() if type(value) in (int, float) and abs(value) < 1e300}
        for line in read_metrics(folder)
    ]  # no NaN, and no number too large for an axis
    log = pandas.DataFrame(numbers or {"step": []})
    return log.groupby("step").last()


def groups_with(groups: Sequence[Group], metric: str) -> list[Group]:
    """Return the groups that have logged a metric. Raises UserError, with the nearest names, if there are none."""
    if having := [group for group in groups if group.logged(metric)]:
        return having
    names = {str(name) for group in groups for log in group.logs for name in log}
    drawable = {name for name in METRICS if metric_key(name) in names}
    where = one_line(groups[0].name, 60) if len(groups) == 1 else f"{len(groups)} runs"
    hint = f"the nearest names are {nearest_few(metric, drawable | names)}" if names else "no metric is logged there"
    raise UserError(f"no {one_line(metric, 60)} in the metrics of {where}; {hint}", "--metric")


def has_line(groups: Sequence[Group], metric: str) -> bool:
    """Return True if some run has logged a metric in at least two steps."""
    return any(len(values) > 1 for group in groups for values in group.logged(metric))


def plot_metric(groups: Sequence[Group], out: str | Path, metric: str = "reward", title: str = "") -> Path:
    """Draw a metric against the step, with one line for each group: the mean over its runs, as a moving average over
    15 % of the steps, and a band from the smallest to the largest value, or of one run the logged values, faintly. Runs
    of a group that share no logged step are drawn as groups of one.
    """
    frames = []
    for group in (part for whole in groups_with(groups, metric) for part in _sharing_steps(whole, metric)):
        logged = pandas.concat(group.logged(metric), axis="columns", join="inner").sort_index()
        span = round(SMOOTHING * len(logged))
        smooth = logged.rolling(2 * (span // 2) + 1, center=True, min_periods=1).mean()
        frame = pandas.DataFrame({"x": logged.index, "y": smooth.mean(axis=1)}).assign(line=group.name)
        frame["method"] = group.method
        if logged.shape[1] > 1:
            frame = frame.assign(low=smooth.min(axis=1), high=smooth.max(axis=1))
        elif span > 1:
            frame["faint"] = logged.iloc[:, 0]
        frames.append(frame)
    points = pandas.concat(frames)
    word, label = METRICS.get(metric, (metric, one_line(metric, 60), one_line(metric, 60)))[1:]
    bold = f"\n(bold: mean over {SMOOTHING:.0%} of the run)" if {"faint", "low"} & {*points} else ""
    return draw_lines(points, out, title or f"{word} during training", f"training step{bold}", label)


def _sharing_steps(group: Group, metric: str) -> list[Group]:
    """Return the group or, if its runs share no step at which they logged the metric, a group for each of them."""
    logged = [set(values.index) for values in group.logged(metric)]
    if set.intersection(*logged):
        return [group]
    alone = (Group(f"{group.name}, {folder.name}", [folder], group.method) for folder in group.folders)
    return [one for one in alone if one.logged(metric)]


def plot_gap(groups: Sequence[Group], out: str | Path, title: str = "Gap between trainer and sampler") -> Path:
    """Draw mean and maximum of |log p_trainer - log p_sampler| against the step, of each group's first run."""
    frames = []
    for group in groups_with(groups, "replay/gap_mean"):
        for metric, part in (("replay/gap_mean", "mean"), ("replay/gap_max", "max")):
            for values in group.logged(metric)[:1]:
                frame = pandas.DataFrame({"x": values.index, "y": values}).assign(line=group.name, part=part)
                frames.append(frame.assign(method=group.method))
    points = pandas.concat(frames)
    least = points.y[points.y > 0].min()  # a gap of exactly 0 cannot be drawn on a log scale
    points["y"] = points.y.clip(lower=1e-9 if math.isnan(least) else least)
    label = "|Δ log-prob| per token,\ntrainer − sampler (nats)"
    return draw_lines(points, out, title, "training step", label, yscale="log")


def run_labels(folders: Sequence[Path]) -> dict[str, Path]:
    """Return label -> run directory. A label is the end of a path, just long enough for distinct labels."""
    full = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    for depth in range(1, max(len(path.parts) for path in full) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in full]
        if len(set(labels)) == len(labels):
            return dict(zip(labels, full, strict=True))
    raise AssertionError("distinct paths have distinct names")


# ---- evaluations -----------------------------------------------------------------------------------------------------

SIZES = {  # size of the cache -> axis label; a size is preferred as x axis, and drawn on a logarithmic scale
    "ratio": "share of the context's tokens that are kept",
    "budget": "budget: entries that a compaction leaves in each kv head",
}


@dataclass(frozen=True)
class Measure:
    """A number of a row of an evaluation.

    error : key of its standard error;  title, label : start of the picture's title, and label of the axis
    table : title of its table;  heading : column of its percentages there; None for nats
    missing : reason why no row may have it
    """

    error: str | None
    title: str
    label: str
    table: str
    heading: str | None = None
    missing: str = ""


HELD = "share of the tokens held at the end"
MEASURES = {
    "accuracy": Measure("standard_error", "Accuracy on", "accuracy (pass@1)", "accuracy, in percent", "pass@1"),
    "log_perplexity": Measure(
        *("log_perplexity_error", "Log-perplexity on", "log-perplexity of the full cache's answers (nats a token)"),
        table="log-perplexity of the full cache's answers",
        missing="; add policy: full to the recipe's prompt_cache",
    ),
    "nll": Measure("standard_error", "Perplexity of", "log of the perplexity (nats a token)", "perplexity"),
    "retention": Measure(None, "Token retention on", HELD, "tokens held at the end, in percent", "kept"),
    "retention_correct": Measure(
        *(None, "Token retention of correct answers on", HELD, "tokens held at the end of correct answers, in percent"),
        heading="kept if right",
        missing="; no answer is correct",
    ),
}
MEASURED_AXES = {  # numbers of a row, not settings, that can be the x axis -> axis label
    "seconds": "seconds to make a context: prefill, reference queries, compaction",
    "log_perplexity": MEASURES["log_perplexity"].label,
    "accuracy": MEASURES["accuracy"].label,
}
# setting whose default depends on the budget (window of h2o, period of am) -> that default, given the budget
FOLLOWS: dict[str, Callable[[int], int]] = {"window": lambda budget: budget // 2, "period": lambda budget: budget}


@dataclass(frozen=True)
class Sweep:
    """The rows of an eval.json or a perplexity.json with a value of `measure`, a key of MEASURES.

    rows : columns task ("MODEL, TASK" if there are several models), policy, parameters, value, error, and the numbers
        of MEASURED_AXES
    """

    measure: str
    subject: str
    rows: pandas.DataFrame


def read_sweep(file: Path, metric: str | None = None) -> Sweep:
    """Read an eval.json or a perplexity.json.

    metric : key of MEASURES; None means nll for a perplexity.json, which has no other, and accuracy for an eval.json

    Raises UserError if the file is neither, is damaged, or has no values of the metric.
    """
    try:
        content = read_json(file, MOST_TEXT)
        raw = [row for row in content["rows"] if row["parameters"] is not None]
        choices = ["nll"] if any("nll" in row for row in raw) else [key for key in MEASURES if key != "nll"]
        measure = metric if metric in choices else choices[0]
        several = len({row.get("model") for row in raw}) > 1
        made = [_row(row, measure, several) for row in raw]
        recipe = content.get("recipe") or {}
        model, text = str(recipe.get("model") or ""), str(recipe.get("text") or "")
    except DAMAGED as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else reason(error)
        wrong = f"{file} is not an eval.json or perplexity.json, or is damaged: {one_line(why, 120)}"
        raise UserError(wrong) from error
    if metric not in (None, measure):
        raise UserError(f"{file} has no metric {metric}; use {', '.join(choices)}", "--metric")
    rows = pandas.DataFrame([row for row in made if row["value"] is not None])
    if rows.empty:
        article = "an" if measure in ("accuracy", "nll") else "a"
        why = MEASURES[measure].missing
        raise UserError(f"no row of {file} has {article} {measure}, so there is nothing to draw{why}")
    if measure.startswith("retention") and (rows.policy != "full").any():
        rows = rows[rows.policy != "full"]  # a full cache holds all tokens, so its line would only shrink the others
    tasks = sorted(rows.task.unique())
    about = ", ".join(tasks) if len(tasks) <= 3 else f"{len(tasks)} tasks"
    about = (Path(text).name or "a text") if measure == "nll" else about
    name = Path(model).name if Path(model).is_absolute() else model
    return Sweep(measure, one_line(about, 60) + (f"; {one_line(name, 60)}" if name else ""), rows)


def _row(row: Mapping[str, Any], measure: str, several_models: bool) -> dict[str, Any]:
    """Return a row of `Sweep.rows`, whose value may be None: files of earlier versions and of contexts lack some
    measures. Raises LookupError, TypeError or ValueError for an invalid row.
    """
    value = row[measure] if measure in ("accuracy", "nll") else row.get(measure)
    task, parameters, costs = row["task"] if measure != "nll" else "", row["parameters"], row.get("contexts")
    if several_models:
        task = ", ".join(filter(None, (model_label(row["model"]), task)))
    if not isinstance(row["policy"], str) or not isinstance(task, str) or not isinstance(parameters, dict):
        raise TypeError("a row's task or policy is not text, or its parameters are not a mapping")
    sizes = [parameters[key] for key in SIZES if key in parameters]
    grows = [isinstance(size, dict) and budget_words(size) is not None for size in sizes]
    if not all(grown or (_is_number(size) and size > 0) for size, grown in zip(sizes, grows, strict=True)):
        raise ValueError("a budget or a ratio is not a positive number")
    if any(grows):
        parameters = {**parameters, "budget": budget_words(parameters["budget"])}
    error = MEASURES[measure].error
    numbers = {
        "value": value,
        "error": row[error] if error and value is not None else None,
        "seconds": None if costs is None else sum(costs["seconds"].values()),
        **{key: row.get(key) for key in ("accuracy", "log_perplexity")},
    }
    if not all(number is None or _is_number(number) for number in numbers.values()):
        raise ValueError(f"{measure} or a standard error is not a number")
    return {"task": task, "policy": row["policy"], "parameters": parameters, **numbers}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9  # no NaN, and no number too large for an axis


def varied(rows: pandas.DataFrame) -> list[str]:
    """Return the settings with several values in one method, the most suitable x axis first: sizes of the cache,
    numbers, texts; among these, settings with more values first.
    """
    values: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for parameters in rows.parameters for key in parameters):
        for _, method in rows.groupby(method_names(rows, key), sort=False):
            own = [given[key] for given in method.parameters if given.get(key) is not None]
            if len(own) > 1 and all(_is_number(value) or isinstance(value, str) for value in own):
                values.setdefault(key, []).extend(value for value in own if value not in values.get(key, []))
    sizes = list(SIZES)
    texts = {key: any(isinstance(value, str) for value in own) for key, own in values.items()}
    return sorted(values, key=lambda key: (sizes.index(key) if key in sizes else 2, texts[key], -len(values[key])))


def plot_sweep(sweep: Sweep, out: str | Path, axis: str | None = None) -> Path:
    """Draw the values of each method as a line against a setting, with error bars of one standard error. A method
    without this setting, such as a full cache, is a dashed line.

    axis : the setting; None means the first of `varied`. Or a key of MEASURED_AXES: each row is drawn at this number of
        its own, and points of a method that differ only in the size of the cache are joined
    """
    measured = axis in MEASURED_AXES
    rows, scale = _at_numbers(sweep, str(axis)) if measured else _at_settings(sweep, axis)
    points = rows.rename(columns={"value": "y", "policy": "method"}).assign(error=rows.error.astype(float))
    axis = str(rows.axis.iloc[0])
    label = MEASURED_AXES[axis] if measured else SIZES.get(axis, axis)
    measure = MEASURES[sweep.measure]
    return draw_lines(points, out, f"{measure.title} {sweep.subject}", label, measure.label, **scale)


def _at_settings(sweep: Sweep, axis: str | None) -> tuple[pandas.DataFrame, dict[str, Any]]:
    """Return the rows with lines and x values on the axis of a setting, and the properties of the axes."""
    rows, possible = sweep.rows, varied(sweep.rows)
    if not possible:
        raise UserError("no method of this evaluation has two values of a setting, so there is no line to draw")
    axis = axis or possible[0]
    if axis not in possible:
        raise UserError(f"no method has two values of {axis}; settings with several values: {', '.join(possible)}")
    given = {parameters[axis] for parameters in rows.parameters if axis in parameters}
    settings = sorted(given, key=lambda value: (not _is_number(value), value if _is_number(value) else str(value)))
    numeric = all(map(_is_number, settings))
    place_of = {setting: setting if numeric else place for place, setting in enumerate(settings)}
    x = [place_of[p[axis]] if axis in p else MISSING for p in rows.parameters]
    rows = rows.assign(x=x, line=method_names(rows, axis), axis=axis).sort_values("x", kind="stable")
    scale: dict[str, Any] = {"xscale": "log" if axis in SIZES and numeric else "linear"}
    labels = [f"{setting:g}" if numeric else str(setting) for setting in settings]
    return rows, {**scale, "xticks": list(place_of.values()), "xticklabels": labels}


def _at_numbers(sweep: Sweep, axis: str) -> tuple[pandas.DataFrame, dict[str, Any]]:
    """Return the rows with lines and x values on the axis of a measured number, and the properties of the axes."""
    rows = sweep.rows[sweep.rows[axis].notna()]
    if rows.empty or axis == sweep.measure:
        remedy = "only rows of an evaluation with prompt_cache have it" if rows.empty else "use another axis"
        raise UserError(f"{axis} cannot be the axis of this {sweep.measure}; {remedy}", "--axis")
    size = next((key for key in SIZES if any(key in given for given in rows.parameters)), "ratio")
    rows = rows.assign(x=rows[axis], line=method_names(rows, size), axis=axis)
    whole = rows.policy.isin(["full", "none"]) & [not given.get("summary") for given in rows.parameters]
    if axis == "seconds" and not whole.all():
        rows.loc[whole, "x"] = MISSING
    sizes = rows.parameters.map(lambda given: value if _is_number(value := given.get(size, 0)) else math.inf)
    order = sizes.sort_values(kind="stable").index
    return rows.loc[order], {"xscale": "log"} if axis == "seconds" else {}


def points_table(sweep: Sweep) -> Table:
    rows, measure = sweep.rows, MEASURES[sweep.measure]
    sizes = (key for key in SIZES if any(key in given for given in rows.parameters))
    axis = next(iter(varied(rows)), next(sizes, "budget"))
    scale, digits = (100, 1) if measure.heading else (1, 4)
    cells = []
    for row, name in zip(rows.itertuples(), method_names(rows, axis), strict=True):
        value: Any = row
        number = f"{scale * value.value:.{digits}f}"
        number += "" if pandas.isna(value.error) else f" ± {scale * value.error:.{digits}f}"
        further = [] if measure.heading else [f"{math.exp(value.value):.2f}" if value.value < 100 else "–"]
        cells.append([name, str(value.parameters.get(axis, "–")), number, *further])
    headings = ["cache", axis, *([measure.heading] if measure.heading else ["nll a token, nats", "perplexity"])]
    return table(f"{measure.table}: {sweep.subject}", headings, cells, ["cache"])


def method_names(rows: pandas.DataFrame, axis: str = "ratio") -> list[str]:
    """Return the name of each row's method: its task if there are several, its policy, and the settings but `axis` that
    differ between rows of that policy.
    """
    several = rows.task.nunique() > 1
    names = []
    for task, policy, parameters in zip(rows.task, rows.policy, rows.parameters, strict=True):
        alike = rows.parameters[rows.policy == policy]
        differ = [
            _setting(key, value)
            for key, value in parameters.items()
            if key != axis and not all(_agree(parameters, other, key) for other in alike)
        ]
        names.append((f"{task}: " if several else "") + ", ".join([policy, *differ]))
    return names


def _agree(ours: Mapping[str, Any], theirs: Mapping[str, Any], key: str) -> bool:
    """Return True if two caches agree in a setting: equal values, or each value is the default for its budget."""
    follows = FOLLOWS.get(key)
    defaults = follows is not None and all(
        _is_number(item.get("budget")) and item.get(key) == follows(item["budget"]) for item in (ours, theirs)
    )
    return defaults or ours.get(key) == theirs.get(key)


def _setting(key: str, value: Any) -> str:
    """Format a setting for a name: text and lists without the key, other values after it. None is "no KEY"."""
    if value is None:
        return f"no {key}"
    if isinstance(value, list):
        return "+".join(map(str, value))
    return value if isinstance(value, str) else f"{key} {value}"


# ---- accuracies of methods -------------------------------------------------------------------------------------------

PALE = 0.65  # share of white in the bars of the full cache
Accuracies = tuple[Sequence[float], Sequence[float]]


def plot_accuracy(
    methods: Mapping[str, Accuracies], out: str | Path, title: str, method_of: Mapping[str, str | None]
) -> Path:
    """Draw two bars per method: its mean accuracy under the small cache and, in a paler colour, with a full cache.

    methods : name -> (accuracies under the small cache, with a full cache), one value in [0, 1] per seed, drawn as dots
    method_of : name -> name of the method in drawing.COLOURS
    """
    figure, axes = new_figure(title)
    height = 0.38
    colours = method_colours([method_of.get(name) for name in methods])
    for place, (colour, accuracies) in enumerate(zip(colours, methods.values(), strict=True)):
        for values, white, shift in ((accuracies[0], 0.0, -height / 2), (accuracies[1], PALE, height / 2)):
            y = place + shift
            axes.barh(y, mean(values), height * 0.92, color=shade(colour, white))
            if len(values) > 1:
                axes.plot(values, [y] * len(values), "o", color="black", markeredgecolor="white", markersize=5)
            axes.annotate(f"{mean(values):.2f}", (max(values), y), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(methods)), list(methods))
    axes.invert_yaxis()  # the first method on top
    axes.grid(axis="y", visible=False)
    several = any(len(values) > 1 for accuracies in methods.values() for values in accuracies)
    axes.set(xlim=(0, 1.08), xlabel="share of problems solved" + ("; dots: one seed each" if several else ""))
    handles = [Patch(color=shade("#444444", white)) for white in (0.0, PALE)]
    names = ["under the small cache", "with a full cache"]
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return save_figure(figure, out)
