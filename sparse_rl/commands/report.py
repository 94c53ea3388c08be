"""`sparse-rl report`: one HTML page that shows runs, evaluations, rollouts and timings, and needs no network."""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollout.config import ORIGIN
from sparse_rl.commands import bench, budgets, eval, perplexity
from sparse_rl.commands.arguments import file_path, positive
from sparse_rl.commands.console import Session, quiet_loading
from sparse_rl.commands.plot import FIGURES, Choice, compute, run_method
from sparse_rl.commands.recordings import Recording
from sparse_rl.errors import NotWrittenError, UserError, reason
from sparse_rl.files import DAMAGED, MOST_TEXT, read_json, read_text, replace_text
from sparse_rl.methods.config import CONFIGS
from sparse_rl.metrics import METRICS_FILE, RECIPE_FILE, runs_below
from sparse_rl.progress import say, warn
from sparse_rl.recipe.yaml_text import parse_yaml
from sparse_rl.temporary import temporary_folder

if TYPE_CHECKING:
    from sparse_rl.analysis.report import ReportedRun, Section

ABOUT = "Write one HTML page, which needs no network, about runs, evaluations, rollouts and timings."
OUT = "report.html"
SHOWN = 3  # default number of coloured completions of each folder of rollouts
MOST_BYTES = 25_000_000  # larger pages are slow to open; the user is told


@dataclass
class Results:
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
        return read_json(file, MOST_TEXT).get("figure") in FIGURES
    except DAMAGED:
        return False


def write(results: Results, out: Path, subject: str, completions: int = SHOWN) -> str:
    from sparse_rl.analysis.report import page

    with tempfile.TemporaryDirectory(dir=temporary_folder()) as pictures:
        runs = described(results.runs)
        rows = [row for file in results.files[eval.RESULTS] for row in eval_rows(file)]
        sections = parts(results, runs, rows, Path(pictures), completions)
        about = f"Written by sparse-rl report on {datetime.date.today().isoformat()}. Everything is in this file."
        text = page(f"Report of {subject}", about, sections, opening(results, runs, rows))
    if len(text) > MOST_BYTES:
        warn(f"the page has {len(text) / 1e6:.0f} MB and opens slowly; --completions {max(1, completions - 1)} helps")
    try:
        replace_text(out, text)
    except OSError as error:
        raise NotWrittenError(str(out), reason(error)) from error
    return text


def parts(results: Results, runs: Sequence[ReportedRun], rows: Sequence[Any], folder: Path, most: int) -> list[Section]:
    """Return the sections of the page. Pictures are written to `folder`. Sections without data are empty."""
    from sparse_rl.analysis.report import Section, curves, gaps, settings

    return [
        Section("accuracy", "Accuracy", accuracy(results, rows, folder)),
        Section("learning", "Learning curves", curves(runs, "learning", folder)),
        Section("replay", "Sampler and trainer", gaps(runs, folder)),
        Section("lengths", "Retention and lengths", curves(runs, "lengths", folder)),
        Section("analyses", "Analyses", analyses(results, folder)),
        Section("completions", "Completions and their cache", samples(results, most)),
        Section("timing", "Timing", timing(results, folder)),
        Section("runs", "Runs", settings(runs)),
    ]


def opening(results: Results, runs: Sequence[ReportedRun], rows: Sequence[Any]) -> str:
    """Return the finding; if there is neither a training nor an evaluation, the kinds of results."""
    from sparse_rl.analysis.finding import find as find_effect
    from sparse_rl.analysis.report import html

    finding, files = find_effect(runs, rows), {"sampled completions": results.rollouts, **results.files}
    if not finding.sentences:
        measured = ", ".join(name.removesuffix(".json").replace("_", " ") for name, some in files.items() if some)
        words = f"Measured: {measured or 'figures'}. There is no training or evaluation to compare."
        finding.sentences.append((words, ""))
    return html.finding(finding)


def described(folders: Sequence[Path]) -> list[ReportedRun]:
    from sparse_rl.analysis.report import ReportedRun
    from sparse_rl.analysis.results import run_labels

    runs = []
    for label, folder in run_labels(folders).items() if folders else ():
        text, recipe = "", {}
        try:
            text = read_text(folder / RECIPE_FILE)
            recipe = parse_yaml(text, RECIPE_FILE)
        except (OSError, ValueError):
            warn(f"{folder} has no readable {RECIPE_FILE}; its settings are left out")
        runs.append(ReportedRun(label, folder, recipe, text, run_method(folder)))
    return runs


@contextmanager
def left_out_if_damaged(file: Path) -> Iterator[None]:
    """Warn, and end the block, if the block finds that a file of results is damaged."""
    try:
        yield
    except DAMAGED as error:
        warn(f"{file} is left out: {error.message if isinstance(error, UserError) else reason(error)}")


# ---- accuracy --------------------------------------------------------------------------------------------------------

SWEEPS = (  # (metric, axis, caption) of the pictures of an evaluation; None is the default of `sparse-rl plot`
    (None, None, "one line for each method."),
    ("retention_correct", None, "share of the tokens held at the end of right answers (G-KV figures 6, 19)."),
    ("log_perplexity", "seconds", "log-perplexity against seconds (Attention Matching figure 10, left)."),
    ("accuracy", "log_perplexity", "accuracy against log-perplexity (Attention Matching figure 10, right)."),
)
COLUMNS = (
    "n: problems × samples of each. kept: share of a sequence's tokens that the cache holds at the end, of all "
    "answers and of the right ones. peak: largest number of entries of a kv head. tokens: mean length of a "
    "completion. cut off: completions that reached the largest length. tok/s: sampled tokens per second."
)


def accuracy(results: Results, rows: Sequence[Any], folder: Path) -> str:
    """Return tables and pictures of evaluations and perplexities. Pictures are written to `folder`."""
    from sparse_rl.analysis.report import from_terminal, html
    from sparse_rl.analysis.results import points_table, read_sweep
    from sparse_rl.analysis.tables import accuracy_table

    evaluations, perplexities = results.files[eval.RESULTS], results.files[perplexity.RESULTS]
    made = []
    for compacted in (False, True):  # rows of compacted contexts have further columns
        if some := [row for row in rows if (row.contexts is not None) is compacted]:
            made.append(from_terminal(accuracy_table(some), "of compacted contexts" if compacted else ""))
            made.append(html.note(COLUMNS))
    for number, file in enumerate([*evaluations, *perplexities]):
        with left_out_if_damaged(file):
            sweep = read_sweep(file)
            if file in perplexities:
                made += [html.heading(str(file.parent)), from_terminal(points_table(sweep), str(file))]
            made.append(sweep_pictures(file, folder, f"sweep{number}"))
    return "".join(made)


def sweep_pictures(file: Path, folder: Path, name: str) -> str:
    from sparse_rl.analysis.report import html
    from sparse_rl.analysis.results import plot_sweep, read_sweep

    drawn = []
    for number, (metric, axis, about) in enumerate(SWEEPS):
        try:
            sweep = read_sweep(file, metric)
            if metric == "retention_correct" and sweep.rows.seconds.notna().any():
                continue  # compacted contexts; the figures are about caches that evict
            lines = plot_sweep(sweep, folder / f"{name}_{number}.png", axis)
        except UserError:  # no row has this metric, or there is no line
            continue
        drawn.append(html.picture(lines, f"{file.parent}, {sweep.subject}: {about}"))
    return html.pictures(drawn)


def eval_rows(file: Path) -> list[Any]:
    """Return the rows of an eval.json with the attributes of EvalRow; [] after a warning if the file is damaged."""
    from sparse_rl.analysis.finding import conditions
    from sparse_rl.analysis.tables import accuracy_table

    with left_out_if_damaged(file):
        made, content = [], read_json(file, MOST_TEXT)
        for row in content["rows"]:
            one = SimpleNamespace(**{"log_perplexity": None, "log_perplexity_error": None, **row})
            one.further_accuracy = {name: SimpleNamespace(**score) for name, score in row["further_accuracy"].items()}
            one.contexts = None if row.get("contexts") is None else SimpleNamespace(**row["contexts"])
            for name in ("pass_at_k", "pass_at_k_error"):
                setattr(one, name, {int(k): value for k, value in row[name].items()})
            # wrong types show here, before the rows of other files are drawn beside these
            accuracy_table([one]), Path(one.model)
            one.conditions, one.written = conditions(one, content.get("recipe") or {}), file.stat().st_mtime
            made.append(one)
        return made
    return []


# ---- rollouts and timings --------------------------------------------------------------------------------------------


def analyses(results: Results, folder: Path) -> str:
    """Return the pictures of analyses: those on disk, and of each folder of rollouts those that need no model."""
    from sparse_rl.analysis import budgets as head_budgets
    from sparse_rl.analysis.report import html

    changes = "Change of the loss if one kv head keeps another ratio."
    of_budgets = (
        (head_budgets.sensitivity, head_budgets.draw_sensitivity, changes),
        (head_budgets.proportions, head_budgets.draw_proportions, "Head budgets, and shares under global selection."),
    )
    made: dict[str, list[str]] = {}

    def add(place: Path, draw: Any, numbers: Any, about: str) -> None:
        file = folder / f"figure{sum(map(len, made.values()))}.png"
        draw(numbers, file)
        made.setdefault(str(place), []).append(html.picture(file, about))

    def add_figure(place: Path, name: str, numbers: Any) -> None:
        add(place, FIGURES[name].draw, numbers, f"{name}: {FIGURES[name].about.split('; by default')[0]}")

    for file in results.files[budgets.RESULTS]:
        for numbers_of, draw, about in of_budgets:
            with left_out_if_damaged(file):
                add(file.parent, draw, numbers_of(read_json(file, MOST_TEXT)), about)
    for file in results.figures:
        with left_out_if_damaged(file):
            numbers = read_json(file, MOST_TEXT)
            add_figure(file.parent, numbers.pop("figure"), numbers)
    for place in results.rollouts:
        source = Recording(place)
        written = {read_json(file, MOST_TEXT)["figure"] for file in results.figures if file.parent == place}
        for name in (name for name, figure in FIGURES.items() if figure.automatic and name not in written):
            try:
                choice = Choice(line=1 if "line" in FIGURES[name].uses else None)
                add_figure(place, name, compute(name, [source], choice))
            except UserError as error:
                say("left out", f"{name} of {place}: {error.message}")
    return "".join(html.heading(place) + html.pictures(drawn) for place, drawn in made.items())


def samples(results: Results, count: int) -> str:
    """Return the coloured completions of each folder of rollouts, the first one opened."""
    from sparse_rl.analysis.report import html, packed

    made = []
    for place in results.rollouts:
        source = Recording(place)
        if not source.origin.evicts:
            continue
        made += [html.heading(str(place)), html.note(policy_sentence(source.named))]
        for number, rollout in enumerate(islice(source.each(), count)):
            ids = [*rollout.prompt_ids, *rollout.completion_ids]
            lengths = f"prompt of {len(rollout.prompt_ids):,} tokens, completion of {len(rollout.completion_ids):,}"
            title = f"line {number + 1}: {lengths}, ended by {rollout.finish_reason}"
            data = packed(rollout.trace, source.strings(ids), len(rollout.prompt_ids), rollout.spans)
            made.append(html.sample(title, data, opened=len(made) == 2))
    about = (
        "Each token is coloured by the share of kv heads that still hold it in their cache at a moment of sampling. "
        "Move the slider, or focus the text and press the arrow keys (with Shift: 32 tokens), to see the cache as the "
        "sampler had it then. Click a token to see its heads."
    )
    return "".join([html.note(about), *made]) if made else ""


def policy_sentence(fingerprint: Mapping[str, str]) -> str:
    from sparse_rl.analysis.drawing import policy_settings, subject

    settings = {key: value for key, value in policy_settings(fingerprint).items() if key not in ("policy", "budget")}
    config = CONFIGS.get(policy_settings(fingerprint).get("policy", ""))
    about = "" if config is None or not config.__doc__ else f" {config.__doc__.splitlines()[0]}"
    listed = ", ".join(f"{key} {value}" for key, value in settings.items())
    return f"Sampled by {subject(fingerprint)}.{about}" + (f" Settings: {listed}." if listed else "")


def timing(results: Results, folder: Path) -> str:
    from sparse_rl.analysis.report import from_terminal, html
    from sparse_rl.analysis.timing import plot_timing, timing_tables

    made = []
    for number, file in enumerate(results.files[bench.RESULTS]):
        with left_out_if_damaged(file):
            content = read_json(file, MOST_TEXT)
            drawn = html.picture(plot_timing(content, folder / f"bench{number}.png"), f"Times of {file.parent}.")
            tables = [from_terminal(table, str(file)) for table in timing_tables(content)]
            made += [html.heading(str(file.parent)), *tables, html.pictures([drawn])]
    return "".join(made)
