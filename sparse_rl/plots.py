"""Pictures: learning curves and mismatch curves from metrics.jsonl, and what a trace keeps, drawn or as text.

    learning_curves({"sparse": Path("runs/a"), "full": Path("runs/b")}, "learning.png")

Lines carry their own names, the colours are those of Okabe and Ito (distinct to colour-blind eyes), and every file is
drawn without a display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from sparse_rl.trace import EvictionTrace

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLE: Any = {
    "figure.figsize": (7.2, 4.2),
    "figure.dpi": 150,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 2.0,
}
SMOOTHING = 0.15  # of the steps: the span of the moving average


def learning_curves(runs: Mapping[str, Path], out: str | Path, metric: str = "reward") -> Path:
    """`metric` against step, one line per run: faint as it was logged, bold as a moving average over 15 % of it.

    Where no run has the metric, its loss is drawn instead. Raises UserError where there is nothing to draw.
    """
    drawn = {label: _series(folder, metric) for label, folder in runs.items()}
    if not any(drawn.values()):
        metric, drawn = "loss", {label: _series(folder, "loss") for label, folder in runs.items()}
    drawn = {label: points for label, points in drawn.items() if points}
    if not drawn:
        raise UserError(f"no reward and no loss in the metrics of {', '.join(map(str, runs.values()))}")
    figure, axes = _figure()
    ends = []
    for colour, (label, points) in zip(_colours(len(drawn)), drawn.items(), strict=True):
        steps, values = zip(*points, strict=True)
        span = max(1, round(SMOOTHING * len(values)))
        mean = smooth(values, span)
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
        axes.plot(steps, mean, color=colour, marker="o" if len(values) == 1 else None)
        ends.append((steps[-1], mean[-1], label, colour))
    _label_ends(axes, ends)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    return _save(figure, out)


def gap_curves(runs: Mapping[str, Path], out: str | Path) -> Path:
    """|log p_trainer - log p_sampler| of sampled tokens against step, log scale: solid its mean, dotted its maximum.

    Raises UserError where no run has logged it.
    """
    figure, axes = _figure()
    drawn = {label: (_series(f, "replay/gap_mean"), _series(f, "replay/gap_max")) for label, f in runs.items()}
    drawn = {label: both for label, both in drawn.items() if both[0] or both[1]}
    if not drawn:
        raise UserError(f"no replay/gap_mean in the metrics of {', '.join(map(str, runs.values()))}")
    least = min((v for both in drawn.values() for points in both for _, v in points if v > 0), default=1e-9)
    ends = []
    for colour, (label, both) in zip(_colours(len(drawn)), drawn.items(), strict=True):
        for points, style, which in zip(both, ("-", ":"), ("mean", "max"), strict=True):
            if points:
                steps, values = zip(*points, strict=True)
                shown = [max(value, least) for value in values]  # a gap of exactly 0 has no place on a log scale
                axes.plot(steps, shown, style, color=colour, marker="o" if len(shown) == 1 else None)
                ends.append((steps[-1], shown[-1], f"{label} {which}", colour))
    axes.set_yscale("log")
    _label_ends(axes, ends)
    axes.set_xlabel("step")
    axes.set_ylabel("|Δ log p|, trainer − sampler")
    return _save(figure, out)


def density_plot(traces: Sequence[EvictionTrace], out: str | Path, bins: int = 50) -> Path:
    """Share of tokens still held at the end, by relative position: the mean over traces, and each layer faintly."""
    figure, axes = _figure()
    centres = [(i + 0.5) / bins for i in range(bins)]
    for layer in range(traces[0].layers):
        one = [type(t)(t.evict_at[layer : layer + 1], validate=False) for t in traces]
        axes.plot(centres, mean_density(one, bins), color="#999999", alpha=0.4, linewidth=1)
    axes.plot(centres, mean_density(traces, bins), color=COLOURS[0])
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, 1)
    axes.set_xlabel("position in the sequence (0: first token, 1: last)")
    axes.set_ylabel("share of tokens held at the end")
    axes.set_title("mean over layers, and each layer in grey", loc="left", fontsize=10, color="#555555")
    return _save(figure, out)


# ---- a trace as numbers and text -----------------------------------------------------------------------------------


def trace_statistics(traces: Sequence[EvictionTrace], fingerprint: Mapping[str, str]) -> dict[str, Any]:
    """What `sparse-rl inspect` says of a file; kept_per_head is [L][Hkv], a mean over traces."""
    import torch

    kept = torch.stack([t.kept_counts().float() for t in traces]).mean(0)
    retention = [t.retention() for t in traces]
    lengths = [len(t) for t in traces]

    def spread(values: Sequence[float]) -> dict[str, float]:
        return {"min": min(values), "mean": sum(values) / len(values), "max": max(values)}

    return {
        "traces": len(traces),
        "layers": traces[0].layers,
        "kv_heads": traces[0].kv_heads,
        "length": spread(lengths),
        "retention": spread(retention),
        "kept_per_head": [[round(v, 2) for v in row] for row in kept.tolist()],
        "density": [round(v, 4) for v in mean_density(traces, 20).tolist()],
        "fingerprint": dict(fingerprint),
    }


def mean_density(traces: Sequence[EvictionTrace], bins: int) -> Any:
    """`EvictionTrace.density` over traces: float [bins]; a bin that a short trace has no token in takes the others."""
    import torch

    stacked = torch.stack([t.density(bins) for t in traces])
    filled = torch.zeros(len(traces), bins, dtype=torch.bool)
    for row, trace in enumerate(traces):
        fed = max(len(trace) - 1, 1)
        filled[row, torch.arange(fed) * bins // fed] = True
    return (stacked * filled).sum(0) / filled.sum(0).clamp(min=1)


def kept_table(kept: Sequence[Sequence[float]], large: int) -> Table:
    """Entries held at the end per layer and kv head; with more than `large` of either, a summary of some layers."""
    from rich.table import Table

    table = Table(title="entries held at the end", title_justify="left")
    summary = len(kept[0]) > large
    for name in ("layer", *(("min", "mean", "max") if summary else (f"head {h}" for h in range(len(kept[0]))))):
        table.add_column(name, justify="right")
    stride = -(-len(kept) // large)
    for layer in range(0, len(kept), stride):
        row = kept[layer]
        table.add_row(
            str(layer), *(f"{v:.1f}" for v in ((min(row), sum(row) / len(row), max(row)) if summary else row))
        )
    if stride > 1:
        table.caption = f"every {stride} layers of {len(kept)}; --json has all"
    return table


def histogram(shares: Sequence[float], height: int = 6) -> list[str]:
    """Shares of 1 as lines of text, a column for each, the top line first."""
    blocks = " ▁▂▃▄▅▆▇█"
    lines = []
    for level in reversed(range(height)):
        eighths = [min(max(round((share * height - level) * 8), 0), 8) for share in shares]
        mark = "100 % ┤" if level == height - 1 else "  0 % ┤" if level == 0 else "      │"
        lines.append(mark + "".join(blocks[n] * 2 for n in eighths).rstrip())
    lines.append("      └" + "──" * len(shares))
    lines.append("       first token".ljust(7 + 2 * len(shares) - 4) + "last")
    return lines


# ---- parts ---------------------------------------------------------------------------------------------------------


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


def draws_gap(runs: Mapping[str, Path]) -> bool:
    """Whether `gap_curves` has something to draw."""
    return any(_series(folder, "replay/gap_mean") for folder in runs.values())


def _series(folder: Path, key: str) -> list[tuple[int, float]]:
    from trainer.rundir import read_metrics

    if not (Path(folder) / "metrics.jsonl").is_file():
        raise UserError(f"{folder} is not the directory of a run: it has no metrics.jsonl")
    return [(line["step"], line[key]) for line in read_metrics(folder) if isinstance(line.get(key), int | float)]


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        return plt.subplots(layout="constrained")


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]], size: float = 10) -> None:
    """A name at the end of each line, moved apart where they would overlap, and no legend."""
    figure = axes.figure
    figure.canvas.draw()
    apart = 1.35 * size * figure.dpi / 72
    placed = sorted((axes.transData.transform((x, y))[1], y, x, label, colour) for x, y, label, colour in ends)
    heights = [pixel for pixel, *_ in placed]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + apart)
    for height, (pixel, y, x, label, colour) in zip(heights, placed, strict=True):
        shift = (8, (height - pixel) * 72 / figure.dpi)
        axes.annotate(
            label,
            (x, y),
            shift,
            textcoords="offset points",
            color=colour,
            fontsize=size,
            va="center",
            annotation_clip=False,
        )


def _save(figure: Any, out: str | Path) -> Path:
    import matplotlib.pyplot as plt

    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    except (OSError, ValueError) as error:  # not writable, or a suffix that is no picture format
        raise UserError(f"{out} cannot be written: {error}", "--out") from error
    finally:
        plt.close(figure)
    return out
