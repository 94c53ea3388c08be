"""Curves of runs, drawn from their metrics.jsonl: how they learn, and how far trainer and sampler are apart.

plot_learning({"sparse": Path("runs/a"), "full": Path("runs/b")}, "learning.png")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sparse_rl.analysis.drawing import colours, label_ends, new_figure, save_figure
from sparse_rl.errors import UserError
from sparse_rl.metrics import METRICS_FILE, read_metrics

SMOOTHING = 0.15  # of the steps: the span of the moving average


def plot_learning(runs: Mapping[str, Path], out: str | Path, metric: str = "reward") -> Path:
    """`metric` against step, one line per run: faint as it was logged, bold as a moving average over 15 % of it.

    Where no run has the metric, its loss is drawn instead. Raises UserError where there is nothing to draw.
    """
    drawn = {label: _series(folder, metric) for label, folder in runs.items()}
    if not any(drawn.values()):
        metric, drawn = "loss", {label: _series(folder, "loss") for label, folder in runs.items()}
    drawn = {label: points for label, points in drawn.items() if points}
    if not drawn:
        raise UserError(f"no reward and no loss in the metrics of {', '.join(map(str, runs.values()))}")
    figure, axes = new_figure()
    ends = []
    for colour, (label, points) in zip(colours(len(drawn)), drawn.items(), strict=True):
        steps, values = zip(*points, strict=True)
        span = max(1, round(SMOOTHING * len(values)))
        mean = smooth(values, span)
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, mean, color=colour, marker="o" if len(values) == 1 else None)
        ends.append((steps[-1], mean[-1], label, colour))
    label_ends(axes, ends)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    return save_figure(figure, out)


def plot_gap(runs: Mapping[str, Path], out: str | Path) -> Path:
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
                ends.append((steps[-1], shown[-1], f"{label} {which}", colour))
    axes.set_yscale("log")
    label_ends(axes, ends)
    axes.set_xlabel("step")
    axes.set_ylabel("|Δ log p|, trainer − sampler")
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


def has_gap(runs: Mapping[str, Path]) -> bool:
    """Whether `plot_gap` has something to draw."""
    return any(_series(folder, "replay/gap_mean") for folder in runs.values())


def _series(folder: Path, key: str) -> list[tuple[int, float]]:
    if not (Path(folder) / METRICS_FILE).is_file():
        raise UserError(f"{folder} is not the directory of a run: it has no {METRICS_FILE}")
    return [(line["step"], line[key]) for line in read_metrics(folder) if isinstance(line.get(key), int | float)]
