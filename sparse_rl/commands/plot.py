"""`sparse-rl plot`: draw runs, traces and evaluations, as ABOUT says."""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from rollout.origin import TRACES
from sparse_rl.commands import bench, budgets, eval, perplexity
from sparse_rl.commands.arguments import file_path
from sparse_rl.commands.console import Session, print_table
from sparse_rl.commands.figures import add_figure_arguments, draw_figure, refuse_unused, write_figure
from sparse_rl.errors import UserError, nearest_few, one_line, reason
from sparse_rl.files import MOST_TEXT, read_text
from sparse_rl.metrics import METRICS_FILE, RECIPE_FILE, runs_below
from sparse_rl.recipe.schema import parse_yaml

ABOUT = (
    "Draw reward and gap of runs, or any metric that they logged; the tokens that a trace holds, or its opened "
    "pages; accuracy, log-perplexity or perplexity of an evaluation against a swept setting or the seconds of a "
    "compaction; sensitivity curves and shares of head budgets; the times of a bench; with --figure, an analysis of "
    "rollouts. A single point is printed as a table."
)
GAP = ("replay/gap_mean", "replay/gap_max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        metavar="RUN_DIR|TRACE|EVAL|BUDGETS|BENCH",
        nargs="+",
        type=file_path,
        help="run, trace file, evaluation, head budgets or bench, or a folder that holds one",
    )
    examples = "reward, loss, length, retention, token_accuracy, entropy, kl, eval_reward, tokens_per_second"
    parser.add_argument(
        "--metric",
        help=f"metric to draw: of runs, against the step, {examples}, or any key of metrics.jsonl; of an evaluation, "
        "accuracy, log_perplexity, retention or retention_correct",
    )
    parser.add_argument(
        "--axis",
        metavar="KEY",
        help="x axis of an evaluation: a setting of the cache, such as budget or alpha, or a measured number: seconds "
        "of a compaction, log_perplexity or accuracy",
    )
    place = "default: beside the file, or in plots/ of the first run (with the names of further runs in the file name)"
    parser.add_argument("--out", metavar="FILE", type=file_path, help=place)
    add_figure_arguments(parser)


def run(options: argparse.Namespace, session: Session) -> int:
    out = options.out
    if out is not None and (out.is_dir() or not out.suffix):
        raise UserError(f"{out} is not a picture file; name one, for example {out / 'curve.png'}", "--out")
    refuse_unused(options)
    if options.figure is not None:
        return draw_figure(options)
    sources = [source_of(path) for path in options.runs]
    files = [path for path in sources if path.is_file()]
    if len(files) == 0:
        if options.axis is not None:
            raise UserError("only evaluations have an axis to choose; remove --axis", "--axis")
        return draw_runs(sources, out, options.metric)
    if len(sources) > 1:
        raise UserError("give a single file, or any number of run directories and no file", str(files[0]))
    evaluated = files[0].suffix == ".json" and files[0].name not in (bench.RESULTS, budgets.RESULTS)
    if options.metric is not None and not evaluated:
        raise UserError(f"{files[0]} has no metrics, only runs and evaluations have; remove --metric", "--metric")
    if options.axis is not None and not evaluated:
        raise UserError(f"{files[0]} is not an evaluation; remove --axis", "--axis")
    if evaluated:
        draw_evaluation(files[0], out, options.axis, options.metric)
    elif files[0].name == budgets.RESULTS:
        draw_budgets(files[0], out)
    elif files[0].name == bench.RESULTS:
        draw_bench(files[0], out or files[0].with_suffix(".png"))
    else:
        draw_traces(files[0], out or files[0].with_suffix(".png"))
    return 0


def source_of(path: Path) -> Path:
    """Return the path to draw: a file of traces or of an evaluation, a run's directory, or a folder of runs."""
    if path.is_file():
        return path.parent if path.name == METRICS_FILE else path
    runs = runs_below(path)
    if runs == [path]:
        return path
    for results in (eval.RESULTS, perplexity.RESULTS, budgets.RESULTS, bench.RESULTS):
        if (path / results).is_file():
            return path / results
    traces = sorted(path.glob(TRACES))
    if len(traces) > 1:
        raise UserError(f"{path} has {len(traces)} files of traces; draw one of them, for example {traces[0]}")
    if not traces and not runs:
        raise UserError(f"{path} is not the directory of a run and contains no runs: there is no {METRICS_FILE}")
    return traces[0] if traces else path


def draw_runs(folders: Sequence[Path], out: Path | None, metric: str | None) -> int:
    """Draw the curves of runs; print metrics that were logged in only one step as a table."""
    from sparse_rl.analysis.curves import has_line, logged_metrics, plot_gap, plot_metric, run_labels, steps_table

    runs = run_labels([run for folder in folders for run in runs_below(folder)])
    method_of = {label: run_method(folder) for label, folder in runs.items()}
    logged = {name for folder in runs.values() for name in logged_metrics(folder)}
    chosen = metric or next((name for name in ("reward", "loss") if name in logged), None)
    if chosen is None:
        where = one_line(next(iter(runs)), 60) if len(runs) == 1 else f"{len(runs)} runs"
        few = nearest_few("reward", logged) or "nothing"
        raise UserError(f"no reward and no loss in the metrics of {where}; name a --metric, logged: {few}")
    beside = others(list(run_labels(folders))[1:])
    name = "learning" if metric is None else chosen.replace("/", "_")
    out_of_gap = out and out.with_name(f"{out.stem}_gap{out.suffix}")
    single: list[str] = []
    if has_line(runs, chosen):
        print(plot_metric(runs, out or folders[0] / "plots" / f"{name}{beside}.png", chosen, method_of=method_of))
    else:
        single.append(chosen)
    if metric is None and GAP[0] in logged:
        if has_line(runs, GAP[0]):
            print(plot_gap(runs, out_of_gap or folders[0] / "plots" / f"gap{beside}.png", method_of=method_of))
        else:
            single += GAP
    if single:
        print_table(steps_table(runs, single))
    return 0


def run_method(run: Path) -> str | None:
    """Return the name of a run's method in the table of colours (analysis/drawing.py); None if unknown."""
    try:
        recipe = parse_yaml(read_text(run / RECIPE_FILE), RECIPE_FILE)
        policy = None if recipe.get("cache") is None else str(recipe["cache"].get("policy", "full"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # a damaged recipe
        return None
    if policy not in (None, "full") and recipe.get("train_attention") == "full":
        return "mismatched"
    return "sft" if recipe.get("kind") == "sft" else policy


def others(labels: Sequence[str]) -> str:
    """Return the part of a picture's file name that names further folders; empty if there are none."""
    names = "_".join(labels).replace("/", "_")
    if len(names) > 100:
        names = f"{names[:80]}_{zlib.crc32(names.encode()):08x}"
    return f"_with_{names}" if names else ""


def draw_bench(file: Path, out: Path) -> None:
    """Draw the results of `sparse-rl bench`, and print their tables. Raises UserError for a damaged file."""
    try:
        content = json.loads(read_text(file))
        bench.print_tables(content)
        print(bench.draw(content, out))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is not a file of results that sparse-rl bench wrote: {one_line(error)}") from error


def draw_budgets(file: Path, out: Path | None = None) -> None:
    """Draw sensitivity curves, and shares of the kept entries, of a head_budgets.json (Attention Matching, figures 2
    and 6 to 8). Raises UserError for a damaged file.

    out : picture of the curves; the name of the other picture ends in _proportions
    """
    from sparse_rl.analysis.budgets import draw_proportions, draw_sensitivity, proportions, sensitivity

    try:
        content = json.loads(read_text(file, MOST_TEXT))
        curves, shares = sensitivity(content), proportions(content)
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else reason(error)
        written = "is not a file of head budgets that sparse-rl budgets wrote"
        raise UserError(f"{file} {written}, or is damaged: {one_line(why, 120)}") from error
    curves_out = out or file.with_name(f"{file.stem}_sensitivity.png")
    shares_out = (out or file).with_name(f"{(out or file).stem}_proportions{(out or curves_out).suffix}")
    write_figure("sensitivity", draw_sensitivity, curves, curves_out)
    write_figure("proportions", draw_proportions, shares, shares_out)


def draw_traces(file: Path, out: Path) -> None:
    """Draw a file of traces: a map of opened pages if pages close, else the share of tokens held at the end."""
    from sparse_rl.analysis.opened import plot_opened, records_pages
    from sparse_rl.analysis.traces import plot_density
    from sparse_rl.trace import load_traces, read_fingerprint

    traces_of_file = load_traces(file)
    draw = plot_opened if records_pages(traces_of_file[0]) else plot_density
    print(draw(traces_of_file, out, read_fingerprint(file)))


def draw_evaluation(file: Path, out: Path | None = None, axis: str | None = None, metric: str | None = None) -> None:
    """Draw accuracy, log-perplexity or perplexity against a setting or a measured number.

    Without `axis`, if no method has two values of any setting, print a table.
    """
    from sparse_rl.analysis.sweeps import MEASURED_AXES, plot_sweep, points_table, read_sweep, varied

    sweep = read_sweep(file, metric)
    if varied(sweep) or axis is not None:
        names = [file.stem, *([metric] if metric else []), *(["by", axis] if axis in MEASURED_AXES else [])]
        print(plot_sweep(sweep, out or file.with_name(f"{'_'.join(names)}.png"), axis))
    else:
        print_table(points_table(sweep))
