"""`sparse-rl plot`: curves of runs, of learning, mismatch or any metric that they logged; a trace's density, or map;
accuracy against the budgets of an evaluation, or the ratios of one behind compacted contexts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sparse_rl.commands.arguments import file_path
from sparse_rl.commands.console import Session
from sparse_rl.errors import UserError
from sparse_rl.metrics import METRICS_FILE, runs_below

ABOUT = (
    "Learning and mismatch curves of runs, or any metric of theirs; the density of a trace, or its map of pages; "
    "accuracy against the budget, or the ratio, of an eval.json."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN_DIR|TRACE|EVAL_JSON", nargs="+", type=file_path, help="or a folder of runs"
    )
    known = "reward, loss, length, retention, entropy, tokens_per_second"
    parser.add_argument("--metric", help=f"what to draw against the step: {known}, or any key of metrics.jsonl")
    parser.add_argument("--out", metavar="FILE", type=file_path, help="default: plots/ in the first of these folders")


def run(options: argparse.Namespace, session: Session) -> int:
    from sparse_rl.analysis.curves import logged_metrics, plot_gap, plot_metric, run_labels

    files = [path for path in options.runs if path.is_file()]
    folders = [path for path in options.runs if path not in files]
    out = options.out
    if out is not None and (out.is_dir() or not out.suffix):
        raise UserError(f"{out} names no picture; name a file, for example {out / 'curve.png'}", "--out")
    if files and (folders or len(files) > 1):
        raise UserError("draw one file at a time, or run directories", str(files[0]))
    if files:
        draw = draw_evaluation if files[0].suffix == ".json" else draw_traces
        print(draw(files[0], out or files[0].with_suffix(".png")))
        return 0
    for folder in folders:
        if not runs_below(folder):
            raise UserError(f"{folder} is not the directory of a run, and holds none: there is no {METRICS_FILE}")
    runs = run_labels([run for folder in folders for run in runs_below(folder)])
    logged = {name for folder in runs.values() for name in logged_metrics(folder)}
    metric = options.metric or next((name for name in ("reward", "loss") if name in logged), None)
    if metric is None:
        known = ", ".join(sorted(logged)) or "nothing"
        raise UserError(
            f"no reward and no loss in the metrics of {', '.join(map(str, runs.values()))}; logged is {known}"
        )
    name = "learning" if options.metric is None else metric.replace("/", "_")
    out = out or folders[0] / "plots" / f"{name}.png"
    print(plot_metric(runs, out, metric))
    if options.metric is None and "replay/gap_mean" in logged:
        name = "gap.png" if options.out is None else f"{out.stem}_gap{out.suffix}"
        print(plot_gap(runs, out.with_name(name)))
    return 0


def draw_traces(file: Path, out: Path) -> Path:
    """What a file of traces shows best: where queries opened pages, the map of these; else what is held at the end."""
    from sparse_rl.analysis.opened import plot_opened, records_pages
    from sparse_rl.analysis.traces import plot_density
    from sparse_rl.trace import load_traces

    held = load_traces(file)
    return plot_opened(held, out) if records_pages(held[0]) else plot_density(held, out)


def draw_evaluation(file: Path, out: Path) -> Path:
    """The accuracies of an eval.json against its budgets or, for contexts that are compacted, ratios."""
    from sparse_rl.analysis.ratios import plot_ratios, read_rows

    return plot_ratios(read_rows(file), out)
