"""Curves of runs from their metrics.jsonl: any metric, or the gap between trainer and sampler, against the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rich.markup import escape
from rich.table import Table

from sparse_rl.analysis.drawing import label_ends, method_colours, new_figure, save_figure, whole_steps
from sparse_rl.errors import UserError, nearest_few, one_line
from sparse_rl.metrics import METRICS_FILE, read_metrics

TITLES = {  # short name -> start of the title
    "kl": "KL divergence",
    "eval_reward": "Reward on validation problems",
    "cut_off": "Completions cut off",
}
SMOOTHING = 0.15  # span of the moving average, as a share of the steps
METRICS = {  # short name -> (key of the metric, axis label with unit)
    "reward": ("reward", "mean reward of the sampled completions"),
    "loss": ("loss", "loss"),
    "length": ("completions/mean_length", "mean length of a completion (tokens)"),
    "cut_off": ("completions/clipped_ratio", "share of completions that were cut off"),
    "retention": ("cache/retention", "share of the tokens held at the end"),
    "token_accuracy": ("token_accuracy", "share of completion tokens that are the likeliest"),
    "entropy": ("entropy", "entropy of the next token (nats)"),
    "kl": ("kl", "KL divergence per token (nats)"),
    "eval_reward": ("eval_reward", "mean reward on the validation problems"),
    "tokens_per_second": ("time/tokens_per_second", "sampled tokens per second"),
}


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed. method : its name in drawing.COLOURS, None if unknown"""

    name: str
    folders: Sequence[Path]
    method: str | None


def plot_metric(
    runs: Mapping[str, Path],
    out: str | Path,
    metric: str = "reward",
    title: str = "",
    method_of: Mapping[str, str | None] = MappingProxyType({}),
) -> Path:
    """Draw a metric against the step: for each run a faint line of the logged values, and a bold line of their average.

    The average is a moving average over 15 % of the run. If a run is too short for an average, its values are bold.

    metric : name in METRICS, or key of metrics.jsonl
    method_of : run -> name of its method in drawing.COLOURS
    """
    groups = [Group(run, [runs[run]], method_of.get(run)) for run in logged_series(runs, metric)]
    return plot_groups(groups, out, metric, title)


def plot_groups(groups: Sequence[Group], out: str | Path, metric: str, title: str = "") -> Path:
    """Draw a metric against the step, with one line for each group: the mean over its runs, as a moving average, and a
    band from the smallest to the largest value of its runs. Only steps that all of its runs logged are drawn. A group
    of one run has a faint line of the logged values in place of the band.

    metric : name in METRICS, or key of metrics.jsonl
    """
    key, label = METRICS.get(metric, (metric, metric))
    word = TITLES.get(metric, metric.replace("_", " ").capitalize() if metric in METRICS else one_line(metric, 60))
    figure, axes = new_figure(title or f"{word} during training")
    ends = []
    averaged = False
    for colour, group in zip(method_colours([group.method for group in groups]), groups, strict=True):
        series = [dict(points) for folder in group.folders if (points := _series(folder, key))]
        steps = sorted(set.intersection(*map(set, series)))
        logged = [[points[step] for step in steps] for points in series]
        lines = [smooth(values, max(1, round(SMOOTHING * len(steps)))) for values in logged]
        averaged |= lines != logged
        mean = [sum(values) / len(values) for values in zip(*lines, strict=True)]
        if len(lines) > 1:
            low, high = ([choose(values) for values in zip(*lines, strict=True)] for choose in (min, max))
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        elif lines != logged:
            axes.plot(steps, logged[0], color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, mean, color=colour, marker="o" if len(steps) == 1 else None)
        ends.append((steps[-1], mean[-1], group.name, colour))
    label_ends(axes, ends)
    whole_steps(axes)
    bold = f"  (bold: mean over {SMOOTHING:.0%} of the run)" if averaged else ""
    axes.set(xlabel=f"training step{bold}", ylabel=one_line(label, 60))
    return save_figure(figure, out)


def plot_gap(
    runs: Mapping[str, Path],
    out: str | Path,
    title: str = "Gap between trainer and sampler",
    method_of: Mapping[str, str | None] = MappingProxyType({}),
) -> Path:
    """Draw |log p_trainer - log p_sampler| of sampled tokens against the step, on a log scale.

    Solid lines show the mean over tokens, dotted lines the maximum. Raises UserError if no run has logged the gap.
    """
    means = logged_series(runs, "replay/gap_mean")
    drawn = {run: (points, _series(runs[run], "replay/gap_max")) for run, points in means.items()}
    least = min(
        (v for mean_and_max in drawn.values() for points in mean_and_max for _, v in points if v > 0), default=1e-9
    )
    figure, axes = new_figure(title)
    ends = []
    for colour, (label, mean_and_max) in zip(
        method_colours([method_of.get(run) for run in drawn]), drawn.items(), strict=True
    ):
        for points, style, statistic in zip(mean_and_max, ("-", ":"), ("mean", "max"), strict=True):
            if points:
                steps, values = zip(*points, strict=True)
                shown = [max(value, least) for value in values]  # a gap of exactly 0 cannot be drawn on a log scale
                axes.plot(steps, shown, style, color=colour, marker="o" if len(shown) == 1 else None)
                ends.append((steps[-1], shown[-1], f"{label}, {statistic}", colour))
    axes.set_yscale("log")
    label_ends(axes, ends)
    whole_steps(axes)
    axes.set(xlabel="training step", ylabel="|Δ log-prob| per token,\ntrainer − sampler (nats)")
    return save_figure(figure, out)


def logged_series(runs: Mapping[str, Path], metric: str) -> dict[str, list[tuple[int, float]]]:
    """Return run -> list of (step, value) of a metric, for the runs that have logged the metric.

    Raises UserError, with the nearest names of logged metrics, if no run has logged the metric.
    """
    key, _ = METRICS.get(metric, (metric, metric))
    series_of = {run: points for run, folder in runs.items() if (points := _series(folder, key))}
    if not series_of:
        where = one_line(next(iter(runs)), 60) if len(runs) == 1 else f"{len(runs)} runs"
        logged = {name for folder in runs.values() for name in logged_metrics(folder)}
        drawable = {name for name, (key, _) in METRICS.items() if key in logged}
        hint = (
            f"the nearest names are {nearest_few(metric, drawable | logged)}" if logged else "no metric is logged there"
        )
        raise UserError(f"no {one_line(metric, 60)} in the metrics of {where}; {hint}", "--metric")
    return series_of


def has_line(runs: Mapping[str, Path], metric: str) -> bool:
    """Return True if some run has logged a metric in at least two steps. Raises UserError if no run has logged it."""
    return any(len(dict(points)) > 1 for points in logged_series(runs, metric).values())


def steps_table(runs: Mapping[str, Path], metrics: Sequence[str]) -> Table:
    table = Table(title="logged in only one step, so there is no line to draw")
    for name in ("run", "step", *metrics):
        table.add_column(escape(one_line(name, 60)), justify="left" if name == "run" else "right")
    for run, folder in runs.items():
        series_of = {metric: dict(_series(folder, METRICS.get(metric, (metric, ""))[0])) for metric in metrics}
        for step in sorted({step for values in series_of.values() for step in values}):
            cells = (f"{values[step]:.4g}" if step in values else "–" for values in series_of.values())
            table.add_row(escape(run), str(step), *cells)
    return table


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Return the centred moving mean over `span` values. Near the ends the span shrinks and stays centred."""
    half = span // 2
    out = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        out.append(sum(window) / len(window))
    return out


def run_labels(folders: Sequence[Path]) -> dict[str, Path]:
    """Return label -> run directory. A label is the end of a path, just long enough for distinct labels."""
    full = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    for depth in range(1, max(len(path.parts) for path in full) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in full]
        if len(set(labels)) == len(labels):
            return dict(zip(labels, full, strict=True))
    raise AssertionError("distinct paths have distinct names")


def logged_metrics(folder: Path) -> set[str]:
    """Return the keys of a run's metrics.jsonl that hold numbers."""
    return {key for line in read_metrics(folder) for key, value in line.items() if key != "step" and _is_drawn(value)}


def _is_drawn(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # no NaN, and no number too large for an axis


def _series(folder: Path, key: str) -> list[tuple[int, float]]:
    if not (Path(folder) / METRICS_FILE).is_file():
        raise UserError(f"{folder} is not the directory of a run: it has no {METRICS_FILE}")
    return [(line["step"], line[key]) for line in read_metrics(folder) if _is_drawn(line.get(key))]
