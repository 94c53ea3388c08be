"""Tables and picture of `sparse-rl bench`, from the content of bench.json."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from rich.markup import escape
from rich.table import Table

from sparse_rl.analysis.drawing import GREY, MARKERS, STYLE, method_colours, save_figure
from sparse_rl.analysis.evaluation import model_label

Rows = Sequence[Mapping[str, Any]]
STAGES = ("prefill", "queries", "compaction")
FITS = ("selection", "fit of biases", "fit of values")
PART_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C5A3C", "#5D3A9B")
REST = "rest"
QUEUED = 0.9  # share of a batch; if fewer sequences run at a time on average, some wait
UNITS = {"tokens_per_second": (1.0, "tokens/s"), "seconds": (1.0, "seconds"), "cache_bytes": (1e-6, "MB")}
NAME_WIDTH = 34  # characters of a line of a bar's name


def labels(rows: Rows) -> list[str]:
    """Return a label of each row: its policy and budget, the parameters in which it differs from rows of the same
    policy and budget, and its model and engine if there are several.
    """
    models, engines = {row["model"] for row in rows}, {row["engine"] for row in rows}
    names = []
    for row in rows:
        parameters = row["parameters"]
        name = " ".join(map(str, filter(None, (row["policy"], parameters.get("budget")))))
        if row["engine"].startswith("vllm "):
            name = row["engine"]
        elif len({engine for engine in engines if " " not in engine}) > 1:
            name += f", {row['engine']}"
        names.append(name + (f", {model_label(row['model'])}" if len(models) > 1 else ""))
    result = []
    for row, name in zip(rows, names, strict=True):
        alike = [other["parameters"] for other, other_name in zip(rows, names, strict=True) if other_name == name]
        differ = [key for key, value in row["parameters"].items() if any(one.get(key) != value for one in alike)]
        result.append(name + "".join(f", {key} {_short(row['parameters'][key])}" for key in differ))
    return result


def _short(value: Any) -> str:
    return " ".join(map(str, value.values())) if isinstance(value, dict) else str(value)


# ---- tables ---------------------------------------------------------------------------------------------------------


def timing_tables(content: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a bench where there are rows: speed; memory and parts of a step, at the greatest length; and
    stages of compactions.
    """
    rows, contexts = content["rows"], content["contexts"]
    longest = [row for row in rows if row["length"] == max(row["length"] for row in rows)]
    tables = [speed_table(content), memory_table(longest)] if rows else []
    if content["recipe"]["parts"] and rows:
        tables.append(parts_table(longest))
    return [*tables, *([contexts_table(contexts)] if contexts else [])]


def speed_table(content: Mapping[str, Any]) -> Table:
    rows, machine = content["rows"], content["machine"]
    runs = max(row["runs"] for row in rows)
    title = f"Sampling on {machine['device']}, {machine['threads']} threads; medians of {runs} runs"
    table = Table(title=title, title_justify="left")
    columns = ("cache", "batch", "length", "tokens/s", "±", "× full", "seconds", "ms a\nstep", "ms a com-\npaction")
    for name in (*columns, "share", "cache", "peak\nmemory"):
        table.add_column(name, justify="left" if name == "cache" and not table.columns else "right", no_wrap=True)
    for row, name in zip(rows, labels(rows), strict=True):
        table.add_row(escape(name), _batch(row), f"{row['length']:,}", *_speed_cells(row))
    table.caption = "±: half of (fastest - slowest) / median; share: compactions' share of decoding"
    if any(row.get("at_once", row["batch"]) < QUEUED * row["batch"] for row in rows):
        table.caption += "; (n): sequences that were sampled at a time, on average"
    return table


def _batch(row: Mapping[str, Any]) -> str:
    at_once = row.get("at_once", row["batch"])
    return str(row["batch"]) + (f" ({at_once:.1f})" if at_once < QUEUED * row["batch"] else "")


def _speed_cells(row: Mapping[str, Any]) -> list[str]:
    if "failure" in row:
        return [row["failure"]]
    spread = row["spread"]
    return [
        _number(row["tokens_per_second"]),
        "–" if spread is None else f"{50 * spread:.0f}%",
        _or_dash(row.get("ratio_to_full"), "{:.2f}"),
        _number(row["seconds"]),
        _or_dash(row.get("step_ms"), "{:.2f}"),
        _or_dash(row.get("compaction_ms"), "{:.2f}"),
        _or_dash(row.get("compaction_share"), "{:.1%}"),
        _bytes(row["cache_bytes"]),
        _or_dash(row.get("peak_bytes"), "", _bytes),
    ]


def memory_table(rows: Rows) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["memory"]))
    table = Table(title="Computed memory of the cache, of a training's trace, and of the masks that it replaces")
    table.title_justify = "left"
    for name in ("cache", "batch", "length", *names):
        left = name == "cache" and not table.columns
        table.add_column(name.replace(" ", "\n"), justify="left" if left else "right", no_wrap=True)
    for row, name in zip(rows, labels(rows), strict=True):
        if row["engine"].startswith("vllm "):
            continue
        sizes = [row["memory"].get(name) for name in names]
        cells = [_bytes(size) if size else "–" for size in sizes]
        table.add_row(escape(name), str(row["batch"]), f"{row['length']:,}", *cells)
    return table


def parts_table(rows: Rows) -> Table:
    parts = part_names(rows)
    table = Table(title="Microseconds of the parts of a decode step, over all layers", title_justify="left")
    for name in ("cache", "batch", "length", *parts, REST, "step"):
        left = name == "cache" and not table.columns
        table.add_column(name.replace(" ", "\n"), justify="left" if left else "right", no_wrap=True)
    for row, name in zip(rows, labels(rows), strict=True):
        if "parts_us" in row:
            spent = parts_of(row)
            cells = [_number(spent[part]) if part in spent else "–" for part in (*parts, REST)]
            table.add_row(escape(name), str(row["batch"]), f"{row['length']:,}", *cells, _number(1e3 * row["step_ms"]))
    return table


def part_names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.get("parts_us", ())))


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return part -> microseconds of a decode step; the last part is the rest of the step."""
    parts = dict(row["parts_us"])
    return {**parts, REST: max(1e3 * row["step_ms"] - sum(parts.values()), 0.0)}


def contexts_table(rows: Rows) -> Table:
    table = Table(title="Seconds of a context's compaction, by stage; and of the parts of the stage compaction")
    table.title_justify = "left"
    for name in ("compaction", "tokens", "entries", *STAGES, *FITS):
        left = name == "compaction" and not table.columns
        table.add_column(name.replace(" of ", " of\n"), justify="left" if left else "right", no_wrap=True)
    for row, name in zip(rows, context_labels(rows), strict=True):
        cells = [row["failure"]] if "failure" in row else [f"{row['entries']:,}"]
        seconds = row.get("seconds", {})
        cells += [_number(seconds[stage]) if stage in seconds else "–" for stage in (*STAGES, *FITS)]
        table.add_row(escape(name), f"{row['tokens']:,}", *cells)
    return table


def context_labels(rows: Rows) -> list[str]:
    """Return a label of each compaction: policy and ratio, and the settings in which it differs from the others."""
    keys = list(dict.fromkeys(key for row in rows for key in row["settings"]))
    differ = [key for key in keys if len({str(row["settings"].get(key)) for row in rows}) > 1]
    shown = [key for key in differ if key not in ("policy", "ratio")]
    return [", ".join([row["compaction"], *(_setting(row, key) for key in shown)]) for row in rows]


def _setting(row: Mapping[str, Any], key: str) -> str:
    value = row["settings"].get(key)
    return f"{key} {' + '.join(value) if isinstance(value, list) else value}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _or_dash(value: float | None, form: str, show: Callable[[float], str] | None = None) -> str:
    if value is None:
        return "–"
    return form.format(value) if show is None else show(value)


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


# ---- picture --------------------------------------------------------------------------------------------------------


def plot_timing(content: Mapping[str, Any], out: str | Path) -> Path:
    """Draw a bench as one picture, with a panel for each question that its rows answer.

    The panels: tokens/s against the batch size, seconds and cache memory against the length, the parts of a decode
    step, and the stages of compactions.
    """
    rows = [row for row in content["rows"] if "failure" not in row]
    contexts = [row for row in content["contexts"] if "failure" not in row]
    panels: list[Callable[[Any], None]] = []
    if rows:
        panels += _sampling_panels(rows, content["recipe"])
    if contexts:
        panels.append(partial(_draw_contexts, rows=contexts))
    matplotlib.use("Agg")
    across = 2 if len(panels) > 1 else 1
    down = max(1, -(-len(panels) // across))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            down, across, figsize=(6.4 * across, 4.2 * down), layout="constrained", squeeze=False
        )
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, draw in zip(grid.flat, panels, strict=False):
            draw(axes)
        shape = content["recipe"]
        random = ", random weights" if shape["random_weights"] else ""
        random = f", another shape{random}" if shape["shape"] else random
        figure.suptitle(f"{model_label(shape['model'])}{random}, {content['machine']['device']}", x=0.01, ha="left")
    return save_figure(figure, out)


def _sampling_panels(rows: Rows, recipe: Mapping[str, Any]) -> list[Callable[[Any], None]]:
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
    if recipe["parts"]:
        timed, title = [row for row in both if "parts_us" in row], f"Parts of a decode step, {size}, {longest:,} tokens"
        panels.append(partial(_draw_bars, names=labels(timed), bars=list(map(parts_of, timed)), title=title))
    elif not panels or any("compaction_share" in row for row in rows):
        title = f"Decode step, {size}, {longest:,} tokens"
        panels.append(partial(_draw_bars, names=labels(both), bars=list(map(_steps, both)), title=title))
    return panels


def _steps(row: Mapping[str, Any]) -> dict[str, float]:
    """Return part -> microseconds of a decode step: the time of compactions, and the rest."""
    step, share = 1e3 * row.get("step_ms", 0.0), row.get("compaction_share", 0.0)
    return {**({"compactions": step * share} if share else {}), REST: step * (1 - share)}


def _draw_lines(axes: Any, rows: Rows, x: str, y: str, title: str) -> None:
    lines = dict[str, list[Mapping[str, Any]]]()
    for row, name in zip(rows, labels(rows), strict=True):
        lines.setdefault(name, []).append(row)
    methods = [None if line[0]["engine"].startswith("vllm ") else line[0]["policy"] for line in lines.values()]
    scale, unit = UNITS[y]
    for place, (colour, (name, line)) in enumerate(zip(method_colours(methods), lines.items(), strict=True)):
        points = sorted((row[x], scale * row[y]) for row in line)
        axes.plot(*zip(*points, strict=True), marker=MARKERS[place % len(MARKERS)], color=colour, label=name)
    axes.set(title=title, xlabel="sequences" if x == "batch" else "tokens of a sequence", ylabel=unit)
    ticks = sorted({row[x] for row in rows})
    axes.set_xscale("log" if ticks[-1] >= 4 * ticks[0] else "linear")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _draw_bars(
    axes: Any, names: Sequence[str], bars: Sequence[Mapping[str, float]], title: str, unit: str = "microseconds"
) -> None:
    """Draw a stacked bar for each name; a bar maps the name of a part to its length."""
    parts = list(dict.fromkeys(part for bar in bars for part in bar if part != REST))
    colours = dict(zip(parts, PART_COLOURS * (1 + len(parts) // len(PART_COLOURS)), strict=False))
    left = [0.0] * len(bars)
    for part in [*parts, *([REST] if any(REST in bar for bar in bars) else [])]:
        widths = [bar.get(part, 0.0) for bar in bars]
        axes.barh(range(len(bars)), widths, 0.7, left=left, color=colours.get(part, GREY), label=part)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), names, fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(title=title, xlabel=unit)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _draw_contexts(axes: Any, rows: Rows) -> None:
    labelled = zip(context_labels(rows), rows, strict=True)
    names = [textwrap.fill(f"{name}, {row['tokens']:,} tokens", NAME_WIDTH) for name, row in labelled]
    _draw_bars(axes, names, [_stages(row["seconds"]) for row in rows], "Stages of a context's compaction", "seconds")


def _stages(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return stage -> seconds, in which the compaction is divided into its parts and the rest."""
    spent = {name: seconds[name] for name in (*STAGES[:2], *FITS) if name in seconds}
    rest = seconds.get("compaction", 0.0) - sum(seconds.get(name, 0.0) for name in FITS)
    return {**spent, REST: max(rest, 0.0)}
