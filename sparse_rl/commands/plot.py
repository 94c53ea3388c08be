"""`sparse-rl plot`: draw runs, traces and evaluations, and with --figure the papers' figures from own rollouts.

An analysis first computes its numbers (figures.py), which are written as JSON beside the picture. The picture is drawn
from these numbers alone.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rollout.config import TRACES
from sparse_rl.commands import bench, budgets, eval, perplexity
from sparse_rl.commands.arguments import file_path, positive
from sparse_rl.commands.console import Session, print_table
from sparse_rl.commands.recordings import Recording
from sparse_rl.errors import UserError, nearest_few, one_line, reason
from sparse_rl.files import DAMAGED, MOST_TEXT, read_json, read_text, replace_text
from sparse_rl.metrics import METRICS_FILE, RECIPE_FILE, runs_below
from sparse_rl.recipe.yaml_text import parse_yaml

ABOUT = (
    "Draw reward and gap of runs, or any metric that they logged; the tokens that a trace holds, or its opened "
    "pages; accuracy, log-perplexity or perplexity of an evaluation against a swept setting or the seconds of a "
    "compaction; sensitivity curves and shares of head budgets; the times of a bench; with --figure, an analysis of "
    "rollouts. A single point is printed as a table."
)
GAP = "replay/gap_mean"


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
    from sparse_rl.analysis.results import Group, plot_gap, plot_metric, run_labels

    runs = run_labels([run for folder in folders for run in runs_below(folder)])
    groups = [Group(label, [folder], run_method(folder)) for label, folder in runs.items()]
    logged = {str(name) for group in groups for log in group.logs for name in log}
    chosen = metric or next((name for name in ("reward", "loss") if name in logged), None)
    if chosen is None:
        where = one_line(next(iter(runs)), 60) if len(runs) == 1 else f"{len(runs)} runs"
        few = nearest_few("reward", logged) or "nothing"
        raise UserError(f"no reward and no loss in the metrics of {where}; name a --metric, logged: {few}")
    beside = others(list(run_labels(folders))[1:])
    name = "learning" if metric is None else chosen.replace("/", "_")
    out_of_gap = out and out.with_name(f"{out.stem}_gap{out.suffix}")
    print(plot_metric(groups, out or folders[0] / "plots" / f"{name}{beside}.png", chosen))
    if metric is None and GAP in logged:
        print(plot_gap(groups, out_of_gap or folders[0] / "plots" / f"gap{beside}.png"))
    return 0


def run_method(run: Path) -> str | None:
    """Return the name of a run's method in the table of colours (analysis/drawing.py); None if unknown."""
    try:
        recipe = parse_yaml(read_text(run / RECIPE_FILE), RECIPE_FILE)
        cache = recipe.get("prompt_cache") if recipe.get("kind") in ("grpo", "distill") else None
        cache = cache or recipe.get("cache")
        policy = None if cache is None else str(cache.get("policy", "full"))
    except DAMAGED:
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
    from sparse_rl.analysis.timing import plot_timing

    try:
        content = read_json(file, MOST_TEXT)
        bench.print_tables(content)
        print(plot_timing(content, out))
    except DAMAGED as error:
        raise UserError(f"{file} is not a file of results that sparse-rl bench wrote: {one_line(error)}") from error


def draw_budgets(file: Path, out: Path | None = None) -> None:
    """Draw the figures of a head_budgets.json. out : picture of the curves; the other's name ends in _proportions"""
    from sparse_rl.analysis.budgets import draw_proportions, draw_sensitivity, proportions, sensitivity

    try:
        content = read_json(file, MOST_TEXT)
        curves, shares = sensitivity(content), proportions(content)
    except DAMAGED as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else reason(error)
        written = "is not a file of head budgets that sparse-rl budgets wrote"
        raise UserError(f"{file} {written}, or is damaged: {one_line(why, 120)}") from error
    curves_out = out or file.with_name(f"{file.stem}_sensitivity.png")
    shares_out = (out or file).with_name(f"{(out or file).stem}_proportions{(out or curves_out).suffix}")
    write_figure("sensitivity", draw_sensitivity, curves, curves_out)
    write_figure("proportions", draw_proportions, shares, shares_out)


def draw_traces(file: Path, out: Path) -> None:
    """Draw a file of traces: a map of opened pages if pages close, else the share of tokens held at the end."""
    from sparse_rl.analysis.traces import plot_density, plot_opened, records_pages
    from sparse_rl.trace import load_traces, read_fingerprint

    traces_of_file = load_traces(file)
    draw = plot_opened if records_pages(traces_of_file[0]) else plot_density
    print(draw(traces_of_file, out, read_fingerprint(file)))


def draw_evaluation(file: Path, out: Path | None = None, axis: str | None = None, metric: str | None = None) -> None:
    """Draw an evaluation. Without `axis`, if no method has two values of any setting, print a table."""
    from sparse_rl.analysis.results import MEASURED_AXES, plot_sweep, points_table, read_sweep, varied

    sweep = read_sweep(file, metric)
    if varied(sweep.rows) or axis is not None:
        names = [file.stem, *([metric] if metric else []), *(["by", axis] if axis in MEASURED_AXES else [])]
        print(plot_sweep(sweep, out or file.with_name(f"{'_'.join(names)}.png"), axis))
    else:
        print_table(points_table(sweep))


# ---- analyses of rollouts --------------------------------------------------------------------------------------------


Numbers = dict[str, Any]
BEGINS = '{"figure":'  # of every file of numbers


@dataclass(frozen=True)
class Choice:
    """Options of `sparse-rl plot` that choose what an analysis looks at; None means the analysis' default.

    layer, head : index of a layer, and of a kv head in it (of a query head, for the figure `attention`)
    line : line of completions.jsonl, from 1
    last : number of tokens at the end of the sequence
    teacher : model whose attention is the measure of `recall`
    """

    layer: int | None = None
    head: int | None = None
    line: int | None = None
    last: int | None = None
    teacher: str | None = None


@dataclass(frozen=True)
class Figure:
    """An analysis.

    about : what the picture shows, and the figure of a paper, for the help
    drawn_by : "module:function" of sparse_rl.analysis, (numbers, file of the picture) -> None
    uses : the options of `Choice` that it reads
    several : True if it compares several sources in one picture
    automatic : True if a report makes it for each folder of rollouts, because it is quick and needs no model
    """

    about: str
    drawn_by: str
    uses: tuple[str, ...] = ()
    several: bool = False
    automatic: bool = False

    def draw(self, numbers: Numbers, out: Path) -> None:
        """Draw the picture. The module is imported only now, because it needs torch."""
        module, function = self.drawn_by.split(":")
        getattr(import_module(f"sparse_rl.analysis.{module}"), function)(numbers, out)


FIGURES: dict[str, Figure] = {
    "evict_ratio": Figure(
        "share of the tokens that could be evicted and were, for each layer and kv head (KVpop figure 8)",
        "kept:draw_evict_ratios",
        automatic=True,
    ),
    "positions": Figure(
        "density of the positions of the tokens held at the end, and their mean, for each source (G-KV figures 7, 17)",
        "kept:draw_positions",
        several=True,
        automatic=True,
    ),
    "kept_heads": Figure(
        "number of kv heads of each layer that hold each of the last evictable tokens of a sequence (KVpop figures 6, "
        "9); by default of the longest sequence, and 112 tokens",
        "kept:draw_kept_heads",
        uses=("line", "last"),
        automatic=True,
    ),
    "cloud": Figure(
        "word cloud of the tokens that one kv head holds at the end, by default head 0 of the last layer (G-KV figure "
        "20)",
        "kept:draw_cloud",
        uses=("layer", "head"),
    ),
    "kept_text": Figure(
        "text of a sequence in which the tokens that one kv head holds at the end are marked, by default line 1, and "
        "head 0 of the last layer (G-KV figures 21 to 24)",
        "kept:draw_kept_text",
        uses=("line", "layer", "head"),
    ),
    "overlap": Figure(
        "overlap of the tokens that the last of 4 windows attends to most with those of the earlier windows, against "
        "the share of the tokens (G-KV figures 1, 16); the windows have the last 512 tokens together, or half of a "
        "shorter sequence",
        "attention:draw_overlap",
        uses=("line", "last"),
    ),
    "sparsity": Figure(
        "share of the tokens whose attention from the last 16 queries is below p x the largest, by layer and source "
        "(G-KV figure 9); of a full cache the last 512 tokens count, of others the entries held at the end",
        "attention:draw_sparsity",
        uses=("line", "last"),
        several=True,
    ),
    "recall": Figure(
        "share of the top k tokens of a teacher with a full cache that the cache held, by layer and kv head (KVpop "
        "figure 7); the teacher is --teacher, by default the model that sampled",
        "attention:draw_recall",
        uses=("line", "teacher"),
    ),
    "attention": Figure(
        "map of the attention of one sequence, with evicted tokens and pages (LuKA figure 1), by default of line 1, "
        "the layer in the middle, and the mean of the query heads of kv head 0; --head is a query head",
        "attention:draw_attention",
        uses=("layer", "head", "line"),
    ),
}


def compute(name: str, sources: Sequence[Recording], choice: Choice) -> Numbers:
    numbers: Numbers = getattr(import_module("sparse_rl.commands.figures"), name)(sources, choice)
    return numbers


def add_figure_arguments(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {figure.about}" for name, figure in FIGURES.items())
    group = parser.add_argument_group("analyses of rollouts")
    group.add_argument(
        "--figure",
        metavar="NAME",
        choices=tuple(FIGURES),
        help=f"analysis of folders that sparse-rl rollout wrote, with its numbers as JSON beside the picture. {names}",
    )
    group.add_argument("--model", metavar="MODEL", help="model to load; default: the model that sampled the rollouts")
    group.add_argument("--layer", metavar="N", type=_index, help="layer to show, from 0")
    group.add_argument("--head", metavar="N", type=_index, help="kv head to show, from 0")
    group.add_argument("--line", metavar="N", type=positive, help="line of completions.jsonl to show, from 1")
    group.add_argument("--last", metavar="N", type=positive, help="number of tokens to show, at the end")
    group.add_argument("--teacher", metavar="MODEL", help="model from which a retrofit started, for recall")


def _index(text: str) -> int:
    return 0 if text == "0" else positive(text)


def refuse_unused(options: argparse.Namespace) -> None:
    """Raise UserError if an option is given that the chosen figure does not read, or that needs a figure."""
    figure = None if options.figure is None else FIGURES[options.figure]
    for name in ("layer", "head", "line", "last", "teacher", "model"):
        if getattr(options, name) is None:
            continue
        if figure is None:
            raise UserError(f"--{name} needs --figure", f"--{name}")
        if name != "model" and name not in figure.uses:
            raise UserError(f"the figure {options.figure} does not use it; remove it", f"--{name}")


def draw_figure(options: argparse.Namespace) -> int:
    """Compute and draw the chosen figure, and print the paths of its picture and of its numbers."""
    figure = FIGURES[options.figure]
    for name in ("metric", "axis"):
        if getattr(options, name) is not None:
            raise UserError(f"the figure {options.figure} does not use it; remove it", f"--{name}")
    sources = [Recording(path, options.model) for path in options.runs]
    if len(sources) > 1 and not figure.several:
        raise UserError(
            f"the figure {options.figure} shows a single folder of rollouts; name one", str(sources[1].path)
        )
    choice = Choice(options.layer, options.head, options.line, options.last, options.teacher)
    numbers = compute(options.figure, sources, choice)
    first = sources[0].path
    out: Path = options.out or (first if first.is_dir() else first.parent) / f"{options.figure}.png"
    write_figure(options.figure, figure.draw, numbers, out)
    return 0


def write_figure(name: str, draw: Callable[[Numbers, Path], None], numbers: Mapping[str, Any], out: Path) -> None:
    """Draw a figure from its numbers into `out`, write the numbers beside it as JSON, and print both paths.

    Raises UserError if the file of the numbers exists and is something else, such as a file of results.
    """
    beside = out.with_suffix(".json")
    if beside.exists() and not read_text(beside).startswith(BEGINS):
        raise UserError(f"{beside}, the file of the numbers, exists and holds something else; name another --out")
    draw(dict(numbers), out)
    try:
        replace_text(beside, json.dumps({"figure": name, **numbers}) + "\n")
    except OSError as error:
        raise UserError(f"{beside} cannot be written: {error}", "--out") from error
    print(f"{out}\n{beside}")
