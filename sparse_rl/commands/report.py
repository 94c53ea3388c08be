"""`sparse-rl report`: one HTML page that shows runs, evaluations, rollouts and timings, and needs no network."""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollout.origin import ORIGIN
from sparse_rl.commands import bench, budgets, eval, perplexity
from sparse_rl.commands.arguments import file_path, positive
from sparse_rl.commands.console import Session, quiet_loading, say, warn
from sparse_rl.commands.figures import FIGURES, Choice, compute
from sparse_rl.commands.plot import run_method
from sparse_rl.commands.sources import Source
from sparse_rl.errors import NotWrittenError, UserError, reason
from sparse_rl.files import MOST_TEXT, read_text, replace_text
from sparse_rl.metrics import METRICS_FILE, RECIPE_FILE, runs_below
from sparse_rl.recipe.schema import parse_yaml
from sparse_rl.temporary import temporary_folder

if TYPE_CHECKING:
    from sparse_rl.analysis.report.page import Section
    from sparse_rl.analysis.report.runs import Run

ABOUT = "Write one HTML page, which needs no network, about runs, evaluations, rollouts and timings."
OUT = "report.html"
SHOWN = 3  # default number of coloured completions of each folder of rollouts
SWEEPS = (  # (metric, axis, caption) of the pictures of an evaluation; None is the default of `sparse-rl plot`
    (None, None, "one line for each method."),
    ("retention_correct", None, "share of the tokens held at the end of right answers (G-KV figures 6, 19)."),
    ("log_perplexity", "seconds", "log-perplexity against seconds (Attention Matching figure 10, left)."),
    ("accuracy", "log_perplexity", "accuracy against log-perplexity (Attention Matching figure 10, right)."),
)
MOST_BYTES = 25_000_000  # larger pages are slow to open; the user is told


@dataclass
class Results:
    """The results below the named folders."""

    runs: list[Path] = field(default_factory=list)
    rollouts: list[Path] = field(default_factory=list)
    files: dict[str, list[Path]] = field(default_factory=dict)  # name of a result file -> the files
    figures: list[Path] = field(default_factory=list)  # numbers that `sparse-rl plot --figure` wrote

    @property
    def count(self) -> int:
        return len(self.runs) + len(self.rollouts) + len(self.figures) + sum(map(len, self.files.values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a run, an evaluation, a bench, rollouts, or a folder that holds some of them"
    parser.add_argument("folders", metavar="RUN", nargs="+", type=file_path, help=about)
    parser.add_argument("--out", metavar="FILE", type=file_path, help=f"default: {OUT} in the first folder")
    parser.add_argument(
        "--completions", metavar="N", type=positive, default=SHOWN, help="coloured completions of each folder"
    )


def run(options: argparse.Namespace, session: Session) -> int:
    out = options.out or options.folders[0] / OUT
    if out.is_dir() or out.suffix not in (".html", ".htm"):
        raise UserError(f"{out} is not an HTML file; name one, for example {out / OUT}", "--out")
    results = find(options.folders)
    quiet_loading(session.verbose)
    text = write(results, out, ", ".join(map(str, options.folders)), options.completions)
    print(f"{out} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0


def find(folders: Sequence[Path]) -> Results:
    """Return all results below the folders. Raises UserError if a folder is missing or holds none."""
    results = Results(files={name: [] for name in (eval.RESULTS, perplexity.RESULTS, bench.RESULTS, budgets.RESULTS)})
    for folder in folders:
        if not folder.is_dir():
            wrong = f"is a file; name its folder, {folder.parent}" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {wrong}")
        before = results.count
        results.runs += runs_below(folder)
        results.rollouts += sorted(file.parent for file in folder.rglob(ORIGIN))
        for name, files in results.files.items():
            files += sorted(folder.rglob(name))
        written = (file for name in FIGURES for file in folder.rglob(f"{name}*.json"))
        results.figures += sorted(file for file in written if _is_figure(file))
        if results.count == before:
            kinds = f"{METRICS_FILE}, {ORIGIN}, {', '.join(results.files)}"
            raise UserError(f"{folder} holds no results: there is none of {kinds} in it or below it")
    return results


def _is_figure(file: Path) -> bool:
    try:
        return json.loads(read_text(file)).get("figure") in FIGURES
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def write(results: Results, out: Path, subject: str, completions: int = SHOWN) -> str:
    """Write the report to `out`, and return its text."""
    from sparse_rl.analysis.report.page import page

    with tempfile.TemporaryDirectory(dir=temporary_folder()) as pictures:
        sections = parts(results, Path(pictures), completions)
        about = f"Written by sparse-rl report on {datetime.date.today().isoformat()}. Everything is in this file."
        text = page(f"Report of {subject}", about, sections)
    if len(text) > MOST_BYTES:
        warn(f"the page has {len(text) / 1e6:.0f} MB and opens slowly; --completions {max(1, completions - 1)} helps")
    try:
        replace_text(out, text)
    except OSError as error:
        raise NotWrittenError(str(out), reason(error)) from error
    return text


def parts(results: Results, folder: Path, completions: int) -> list[Section]:
    """Return the sections of the page. Pictures are written to `folder`. Sections without data are empty."""
    from sparse_rl.analysis.report import runs as of_runs
    from sparse_rl.analysis.report.page import Section

    runs = described(results.runs)
    return [
        Section("runs", "Runs", of_runs.settings(runs) if runs else ""),
        Section("accuracy", "Accuracy", accuracy(results, runs, folder)),
        Section("learning", "Learning curves", of_runs.curves(runs, "learning", folder)),
        Section("replay", "Sampler and trainer", of_runs.gaps(runs, folder)),
        Section("lengths", "Retention and lengths", of_runs.curves(runs, "lengths", folder)),
        Section("analyses", "Analyses", analyses(results, folder)),
        Section("completions", "Completions and their cache", samples(results, completions)),
        Section("timing", "Timing", timing(results, folder)),
    ]


def described(folders: Sequence[Path]) -> list[Any]:
    from sparse_rl.analysis.curves import run_labels
    from sparse_rl.analysis.report.runs import Run

    runs = []
    for label, folder in run_labels(folders).items() if folders else ():
        text, recipe = "", {}
        try:
            text = read_text(folder / RECIPE_FILE)
            recipe = parse_yaml(text, RECIPE_FILE)
        except (OSError, ValueError):
            warn(f"{folder} has no readable {RECIPE_FILE}; its settings are left out")
        runs.append(Run(label, folder, recipe, text, run_method(folder)))
    return runs


def accuracy(results: Results, runs: Sequence[Run], folder: Path) -> str:
    """Return tables and pictures of evaluations and perplexities."""
    from sparse_rl.analysis.evaluation import accuracy_table
    from sparse_rl.analysis.report.page import heading, pictures
    from sparse_rl.analysis.report.published import beside_published
    from sparse_rl.analysis.report.tables import from_terminal
    from sparse_rl.analysis.sweeps import points_table, read_sweep

    rows = [row for file in results.files[eval.RESULTS] for row in eval_rows(file)]
    drawn = trainings_picture(rows, runs, folder / "trainings.png")
    made = [pictures([drawn])] if drawn else []
    for compacted in (False, True):  # rows of compacted contexts have further columns
        if some := [row for row in rows if (row.contexts is not None) is compacted]:
            made.append(from_terminal(accuracy_table(some), "of compacted contexts" if compacted else ""))
    made.append(beside_published(rows))
    for number, file in enumerate([*results.files[eval.RESULTS], *results.files[perplexity.RESULTS]]):
        try:
            sweep = read_sweep(file)
        except UserError as error:
            warn(f"{file} is left out: {error.message}")
            continue
        if file.name == perplexity.RESULTS:
            made += [heading(str(file.parent)), from_terminal(points_table(sweep), str(file))]
        made.append(sweep_pictures(file, folder, f"sweep{number}"))
    return "".join(made)


def sweep_pictures(file: Path, folder: Path, name: str) -> str:
    """Return the pictures of SWEEPS that the rows of an eval.json or perplexity.json have numbers for."""
    from sparse_rl.analysis.report.page import picture, pictures
    from sparse_rl.analysis.sweeps import plot_sweep, read_sweep, varied

    drawn = []
    for number, (metric, axis, about) in enumerate(SWEEPS):
        try:
            sweep = read_sweep(file, metric)
        except UserError:  # no row has this metric
            continue
        if axis is None and not varied(sweep):
            continue
        if axis is not None and not any(axis in point.measured for point in sweep.points):
            continue
        if metric == "retention_correct" and any("seconds" in point.measured for point in sweep.points):
            continue  # compacted contexts, whose answers hold all of their own tokens
        lines = plot_sweep(sweep, folder / f"{name}_{number}.png", axis)
        drawn.append(picture(lines, f"{file.parent}, {sweep.subject}: {about}"))
    return pictures(drawn)


def eval_rows(file: Path) -> list[Any]:
    """Return the rows of an eval.json with the attributes of EvalRow; [] after a warning if the file is damaged."""
    try:
        rows = [
            {"log_perplexity": None, "log_perplexity_error": None, **row} for row in json.loads(read_text(file))["rows"]
        ]
        for row in rows:
            row["further_accuracy"] = {name: SimpleNamespace(**one) for name, one in row["further_accuracy"].items()}
            row["contexts"] = None if row.get("contexts") is None else SimpleNamespace(**row["contexts"])
            for name in ("pass_at_k", "pass_at_k_error"):
                row[name] = {int(k): value for k, value in row[name].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        warn(f"{file} is left out: {reason(error)}")
        return []
    return [SimpleNamespace(**row) for row in rows]


def trainings_picture(rows: Sequence[Any], runs: Sequence[Run], out: Path) -> str:
    """Return a picture of the accuracy of each trained model under caches that evict, and with a full cache. It is
    empty if fewer than two trainings were evaluated under both.
    """
    from sparse_rl.analysis.accuracy import plot_accuracy
    from sparse_rl.analysis.report.page import picture
    from sparse_rl.analysis.report.runs import groups

    methods, of_method = {}, {}
    for group in groups(runs):
        folders = {folder.resolve() for folder in group.folders}
        own = [row for row in rows if folders & {Path(row.model).resolve(), Path(row.model).resolve().parent}]
        scored = [row for row in own if row.accuracy is not None]
        caches = [[row.accuracy for row in scored if (row.policy == "full") is full] for full in (False, True)]
        if all(caches):
            methods[group.name], of_method[group.name] = (caches[0], caches[1]), group.method
    if len(methods) < 2:
        return ""
    budgets_used = sorted({str(row.parameters.get("budget", row.policy)) for row in rows if row.policy != "full"})
    title = f"Accuracy after each training; the small cache has a budget of {' or '.join(budgets_used)}"
    about = "Accuracy after each training, under caches that evict and with a full cache. Dots: single evaluations."
    return picture(plot_accuracy(methods, out, title, of_method), about)


def analyses(results: Results, folder: Path) -> str:
    """Return the pictures of analyses: those that were written by `sparse-rl plot --figure`, and, for each folder of
    rollouts, those that need no model.
    """
    from sparse_rl.analysis.report.page import heading, picture, pictures

    made: dict[str, list[str]] = {}

    def add(name: str, numbers: Any, place: str) -> None:
        file = folder / f"figure{sum(map(len, made.values()))}.png"
        FIGURES[name].draw(numbers, file)
        made.setdefault(place, []).append(picture(file, f"{name}: {FIGURES[name].about}"))

    for file in results.files[budgets.RESULTS]:
        for name, (numbers_of, draw, about) in budget_pictures().items():
            picture_file = folder / f"{name}{len(made)}.png"
            draw(numbers_of(json.loads(read_text(file, MOST_TEXT))), picture_file)
            made.setdefault(str(file.parent), []).append(picture(picture_file, about))
    for file in results.figures:
        numbers = json.loads(read_text(file))
        add(numbers.pop("figure"), numbers, str(file.parent))
    for place in results.rollouts:
        source = Source(place)
        written = {json.loads(read_text(file))["figure"] for file in results.figures if file.parent == place}
        for name in (name for name, figure in FIGURES.items() if figure.automatic and name not in written):
            try:
                add(name, compute(name, [source], Choice()), str(place))
            except UserError as error:
                say("left out", f"{name} of {place}: {error.message}")
    return "".join(heading(place) + pictures(drawn) for place, drawn in made.items())


def budget_pictures() -> dict[str, tuple[Any, Any, str]]:
    """Return name -> (function from the content of head_budgets.json to numbers, function that draws them, caption)."""
    from sparse_rl.analysis.budgets import draw_proportions, draw_sensitivity, proportions, sensitivity

    curves = "Change of the loss if a single kv head keeps another ratio (Attention Matching, figures 2 and 7)."
    shares = (
        "Head budgets, and shares of the kept entries under global selection (Attention Matching, figures 6 and 8)."
    )
    return {
        "sensitivity": (sensitivity, draw_sensitivity, curves),
        "proportions": (proportions, draw_proportions, shares),
    }


def samples(results: Results, count: int) -> str:
    """Return the coloured completions of each folder of rollouts, the first one opened."""
    from sparse_rl.analysis.report.completion import packed
    from sparse_rl.analysis.report.page import heading, note, sample

    made = []
    for place in results.rollouts:
        source = Source(place)
        if not source.origin.evicts:
            continue
        made.append(heading(str(place)))
        for number, rollout in enumerate(islice(source.each(), count)):
            ids = [*rollout.prompt_ids, *rollout.completion_ids]
            title = f"line {number + 1}: {len(rollout.completion_ids):,} tokens, ended by {rollout.finish_reason}"
            data = packed(rollout.trace, source.strings(ids), len(rollout.prompt_ids))
            made.append(sample(title, data, opened=len(made) == 1))
    about = (
        "Each token is coloured by the share of kv heads that still hold it in their cache at a moment of sampling. "
        "Move the slider, or focus the text and press the arrow keys (with Shift: 32 tokens), to see the cache as the "
        "sampler had it then. Click a token to see its heads."
    )
    return note(about) + "".join(made) if made else ""


def timing(results: Results, folder: Path) -> str:
    """Return the tables and pictures of `sparse-rl bench`."""
    from sparse_rl.analysis.report.page import heading, picture, pictures
    from sparse_rl.analysis.report.tables import from_terminal
    from sparse_rl.analysis.timing import plot_timing, timing_tables

    made = []
    for number, file in enumerate(results.files[bench.RESULTS]):
        content = json.loads(read_text(file))
        drawn = picture(plot_timing(content, folder / f"bench{number}.png"), f"Times of {file.parent}.")
        tables = [from_terminal(table, str(file)) for table in timing_tables(content)]
        made += [heading(str(file.parent)), *tables, pictures([drawn])]
    return "".join(made)
