"""Tables and picture of `sparse-rl bench`, from the content of bench.json."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
from rich.filesize import decimal
from rich.table import Table

from sparse_rl.analysis.drawing import NAME_WIDTH, method_colours, new_grid, save_figure
from sparse_rl.analysis.tables import cache_labels, model_label, table

Rows = Sequence[Mapping[str, Any]]
STAGES = ("prefill", "queries", "compaction")
FITS = ("selection", "fit of biases", "fit of values")
REST = "rest"
QUEUED = 0.9  # share of a batch; if fewer sequences run at a time on average, some wait
UNITS = {"tokens_per_second": (1.0, "tokens/s"), "seconds": (1.0, "seconds"), "cache_bytes": (1e-6, "MB")}


def labels(rows: Rows) -> list[str]:
    """Return a label of each row: its cache or compaction, and its model if there are several."""
    names = cache_labels([_cache(row) for row in rows])
    if len({row["model"] for row in rows}) == 1:
        return names
    return [f"{name}, {model_label(row['model'])}" for row, name in zip(rows, names, strict=True)]


def _cache(row: Mapping[str, Any]) -> SimpleNamespace:
    if "compaction" in row:  # a name that includes the ratio
        settings = {key: value for key, value in row["settings"].items() if key != "ratio"}
        return SimpleNamespace(policy=row["compaction"], parameters=settings)
    return SimpleNamespace(policy=row["policy"], parameters=row["parameters"])


# ---- tables ---------------------------------------------------------------------------------------------------------


def timing_tables(content: Mapping[str, Any]) -> list[Table]:
    rows, contexts = content["rows"], content["contexts"]
    longest = [row for row in rows if row["length"] == max(row["length"] for row in rows)]
    tables = [speed_table(content)] if rows else []
    if content["recipe"]["parts"] and rows:
        tables.append(parts_table(longest))
    return [*tables, *([contexts_table(contexts)] if contexts else [])]


def speed_table(content: Mapping[str, Any]) -> Table:
    rows, machine = content["rows"], content["machine"]
    columns = ("cache", "batch", "length", "tokens/s", "±", "× full", "seconds", "ms a\nstep", "ms a com-\npaction")
    title = f"Sampling on {machine['device']}, {machine['threads']} threads; medians of {rows[0]['runs']} runs"
    caption = "±: half of (fastest - slowest) / median; share: compactions' share of decoding"
    if any(_queues(row) for row in rows):
        caption += "; (n): sequences that were sampled at a time, on average"
    cells = [
        [name, _batch(row), f"{row['length']:,}", *_speed_cells(row)]
        for row, name in zip(rows, labels(rows), strict=True)
    ]
    return table(title, (*columns, "share", "cache", "peak\nmemory"), cells, caption=caption)


def _queues(row: Mapping[str, Any]) -> bool:
    return row.get("at_once", row["batch"]) < QUEUED * row["batch"]


def _batch(row: Mapping[str, Any]) -> str:
    return f"{row['batch']} ({row['at_once']:.1f})" if _queues(row) else str(row["batch"])


def _speed_cells(row: Mapping[str, Any]) -> list[str]:
    if "failure" in row:
        return [row["failure"]]
    shown: dict[str, Callable[..., str]] = {
        "tokens_per_second": _number,
        "spread": lambda value: f"{50 * value:.0f}%",
        "ratio_to_full": "{:.2f}".format,
        "seconds": _number,
        "step_ms": "{:.2f}".format,
        "compaction_ms": "{:.2f}".format,
        "compaction_share": "{:.1%}".format,
        "cache_bytes": decimal,
        "peak_bytes": decimal,
    }
    return ["–" if row.get(key) is None else show(row[key]) for key, show in shown.items()]


def parts_table(rows: Rows) -> Table:
    parts = list(dict.fromkeys(name for row in rows for name in row.get("parts_us", ())))
    title = "Microseconds of the parts of a decode step, over all layers"
    made = []
    for row, name in zip(rows, labels(rows), strict=True):
        if "parts_us" in row:
            spent = parts_of(row)
            cells = [_number(spent[part]) if part in spent else "–" for part in (*parts, REST)]
            made.append([name, str(row["batch"]), f"{row['length']:,}", *cells, _number(1e3 * row["step_ms"])])
    return table(title, ("cache", "batch", "length", *parts, REST, "step"), made)


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return part -> microseconds of a decode step; the last part is the rest of the step."""
    parts = dict(row["parts_us"])
    return {**parts, REST: max(1e3 * row["step_ms"] - sum(parts.values()), 0.0)}


def contexts_table(rows: Rows) -> Table:
    title = "Seconds of a context's compaction, by stage; and of the parts of the stage compaction"
    fits = [name.replace(" of ", " of\n") for name in FITS]
    made = []
    for row, name in zip(rows, labels(rows), strict=True):
        cells = [row["failure"]] if "failure" in row else [f"{row['entries']:,}"]
        seconds = row.get("seconds", {})
        cells += [_number(seconds[stage]) if stage in seconds else "–" for stage in (*STAGES, *FITS)]
        made.append([name, f"{row['tokens']:,}", *cells])
    return table(title, ("compaction", "tokens", "entries", *STAGES, *fits), made)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# ---- picture --------------------------------------------------------------------------------------------------------


def plot_timing(content: Mapping[str, Any], out: str | Path) -> Path:
    """Draw a bench as one picture, with a panel for each question that its rows answer."""
    rows = [row for row in content["rows"] if "failure" not in row]
    contexts = [row for row in content["contexts"] if "failure" not in row]
    panels: list[Callable[[Any], None]] = []
    if rows:
        panels += _sampling_panels(rows)
    if contexts:
        panels.append(partial(_draw_contexts, rows=contexts))
    shape = content["recipe"]
    random = ", random weights" if shape["random_weights"] else ""
    title = f"{model_label(shape['model'])}{random}, {content['machine']['device']}"
    across = 2 if len(panels) > 1 else 1
    figure, grid = new_grid(title, across, rows=max(1, -(-len(panels) // across)), cell=(6.4, 4.2))
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, draw in zip(grid, panels, strict=False):
        draw(axes)
    return save_figure(figure, out)


def _sampling_panels(rows: Rows) -> list[Callable[[Any], None]]:
    longest, most = max(row["length"] for row in rows), max(row["batch"] for row in rows)
    at_longest = [row for row in rows if row["length"] == longest]
    of_batch = [row for row in rows if row["batch"] == most]
    both = [row for row in at_longest if row["batch"] == most]
    size = f"{most} sequence{'s' * (most > 1)}"
    panels: list[Callable[[Any], None]] = []
    if len({row["batch"] for row in rows}) > 1:
        title = f"Speed against the batch size, {longest:,} tokens"
        panels.append(partial(_draw_lines, rows=at_longest, x="batch", y="tokens_per_second", title=title))
    if len({row["length"] for row in rows}) > 1:
        panels.append(partial(_draw_lines, rows=of_batch, x="length", y="seconds", title=f"Time to a length, {size}"))
        title = f"Keys and values, {size}"
        panels.append(partial(_draw_lines, rows=of_batch, x="length", y="cache_bytes", title=title))
    if timed := [row for row in both if "parts_us" in row]:
        title = f"Parts of a decode step, {size}, {longest:,} tokens"
        panels.append(partial(_draw_bars, names=labels(timed), bars=list(map(parts_of, timed)), title=title))
    return panels


def _draw_lines(axes: Any, rows: Rows, x: str, y: str, title: str) -> None:
    scale, unit = UNITS[y]
    frame = pandas.DataFrame({"x": [row[x] for row in rows], "y": [scale * row[y] for row in rows]})
    methods = {name: row["policy"] for row, name in zip(rows, labels(rows), strict=True)}
    lines = frame.assign(name=labels(rows)).pivot(index="x", columns="name", values="y")[list(methods)]
    wide = bool(lines.index[-1] >= 4 * lines.index[0])
    lines.plot(ax=axes, color=method_colours(list(methods.values())), marker="o", logx=wide)
    axes.set(title=title, xlabel="sequences" if x == "batch" else "tokens of a sequence", ylabel=unit)
    axes.set_xticks(lines.index, [f"{tick:,}" for tick in lines.index])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _draw_bars(
    axes: Any, names: Sequence[str], bars: Sequence[Mapping[str, float]], title: str, unit: str = "microseconds"
) -> None:
    """Draw a stacked bar for each name; a bar maps the name of a part to its length."""
    pandas.DataFrame(list(bars), index=list(names)).plot.barh(stacked=True, ax=axes)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(title=title, xlabel=unit)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _draw_contexts(axes: Any, rows: Rows) -> None:
    labelled = zip(labels(rows), rows, strict=True)
    names = [textwrap.fill(f"{name}, {row['tokens']:,} tokens", NAME_WIDTH) for name, row in labelled]
    _draw_bars(axes, names, [_stages(row["seconds"]) for row in rows], "Stages of a context's compaction", "seconds")


def _stages(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return stage -> seconds, in which the compaction is divided into its parts and the rest."""
    spent = {name: seconds[name] for name in (*STAGES[:2], *FITS) if name in seconds}
    rest = seconds.get("compaction", 0.0) - sum(seconds.get(name, 0.0) for name in FITS)
    return {**spent, REST: max(rest, 0.0)}
