"""Curves of runs, drawn from their metrics.jsonl: any metric against the step, and the gap from trainer to sampler.

plot_metric({"sparse": Path("runs/a"), "full": Path("runs/b")}, "learning.png")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparse_rl.analysis.drawing import colours, label_ends, new_figure, save_figure
from sparse_rl.errors import UserError, nearest
from sparse_rl.metrics import METRICS_FILE, read_metrics

SMOOTHING = 0.15  # of the steps: the span of the moving average
METRICS = {  # a short name -> (the metric's key, the axis' label, with its unit)
    "reward": ("reward", "mean reward of the sampled completions"),
    "loss": ("loss", "loss"),
    "length": ("completions/mean_length", "mean length of a completion (tokens)"),
    "retention": ("cache/retention", "share of the tokens held at the end"),
    "entropy": ("entropy", "entropy of the next token (nats)"),
    "tokens_per_second": ("time/tokens_per_second", "sampled tokens per second"),
}


def plot_metric(runs: Mapping[str, Path], out: str | Path, metric: str = "reward", title: str = "") -> Path:
    """A metric against the step, one line per run: faint as it was logged, bold as a moving average over 15 % of it.

    metric : a name of METRICS, or a key of metrics.jsonl

    Raises UserError where no run has logged it; the line names those that were.
    """
    key, label = METRICS.get(metric, (metric, metric))
    drawn = {run: points for run, folder in runs.items() if (points := _series(folder, key))}
    if not drawn:
        logged = sorted({name for folder in runs.values() for name in logged_metrics(folder)})
        near = nearest(metric, {*METRICS, *logged} - {metric})
        mend = f"did you mean {near}?" if near else f"logged are {', '.join(logged) or 'none'}"
        raise UserError(f"no {metric} in the metrics of {', '.join(map(str, runs.values()))}; {mend}", "--metric")
    figure, axes = new_figure()
    ends = []
    longest = 0
    for colour, (run, points) in zip(colours(len(drawn)), drawn.items(), strict=True):
        steps, values = zip(*points, strict=True)
        longest = max(longest, len(values))
        mean = smooth(values, max(1, round(SMOOTHING * len(values))))
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, mean, color=colour, marker="o" if len(values) == 1 else None)
        ends.append((steps[-1], mean[-1], run, colour))
    label_ends(axes, ends)
    axes.set_xlabel("training step" + (f"  (bold: mean over {SMOOTHING:.0%} of the run)" if longest > 1 else ""))
    axes.set_ylabel(label)
    axes.set_title(title, loc="left", fontsize=12)
    return save_figure(figure, out)


def plot_gap(runs: Mapping[str, Path], out: str | Path, title: str = "") -> Path:
    """|log p_trainer - log p_sampler| of sampled tokens against step, log scale: solid its mean, dotted its maximum.

    Raises UserError where no run has logged it.
    """
    figure, axes = new_figure()
    drawn = {label: (_series(f, "replay/gap_mean"), _series(f, "replay/gap_max")) for label, f in runs.items()}
    drawn = {label: both for label, both in drawn.items() if both[0] or both[1]}
    if not drawn:
        raise UserError(f"no replay/gap_mean in the metrics of {', '.join(map(str, runs.values()))}")
    least = min((v for both in drawn.values() for points in both for _, v in points if v > 0), default=1e-9)
    ends = []
    for colour, (label, both) in zip(colours(len(drawn)), drawn.items(), strict=True):
        for points, style, which in zip(both, ("-", ":"), ("mean", "max"), strict=True):
            if points:
                steps, values = zip(*points, strict=True)
                shown = [max(value, least) for value in values]  # a gap of exactly 0 has no place on a log scale
                axes.plot(steps, shown, style, color=colour, marker="o" if len(shown) == 1 else None)
                ends.append((steps[-1], shown[-1], f"{label}, {which}", colour))
    axes.set_yscale("log")
    label_ends(axes, ends)
    axes.set_xlabel("training step")
    axes.set_ylabel("|Δ log-prob| per token,\ntrainer − sampler (nats)")
    axes.set_title(title, loc="left", fontsize=12)
    return save_figure(figure, out)


def smooth(values: Sequence[float], span: int) -> list[float]:
    """The centred mean over `span` values; a shorter one, still centred, towards the ends."""
    half = span // 2
    out = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        out.append(sum(window) / len(window))
    return out


def run_labels(folders: Sequence[Path]) -> dict[str, Path]:
    """A label per run directory: its name, or as much of its path as tells it from the others."""
    full = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    for depth in range(1, max(len(path.parts) for path in full) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in full]
        if len(set(labels)) == len(labels):
            return dict(zip(labels, full, strict=True))
    raise AssertionError("distinct paths have distinct names")


def logged_metrics(folder: Path) -> set[str]:
    """The keys of a run's metrics.jsonl that hold numbers; empty where there is none."""
    lines = read_metrics(folder) if (Path(folder) / METRICS_FILE).is_file() else []
    return {key for line in lines for key, value in line.items() if key != "step" and _is_drawn(value)}


def _is_drawn(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # no NaN, and nothing that no axis holds


def _series(folder: Path, key: str) -> list[tuple[int, float]]:
    if not (Path(folder) / METRICS_FILE).is_file():
        raise UserError(f"{folder} is not the directory of a run: it has no {METRICS_FILE}")
    return [(line["step"], line[key]) for line in read_metrics(folder) if _is_drawn(line.get(key))]
