"""`sparse-rl report`: one HTML page that shows runs, evaluations, rollouts and timings, and needs no network."""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.origin import ORIGIN
from sparse_rl.commands import bench, budgets, eval, perplexity
from sparse_rl.commands.arguments import file_path, positive
from sparse_rl.commands.console import Session, quiet_loading, say, warn
from sparse_rl.commands.figures import FIGURES, Choice, compute
from sparse_rl.commands.plot import run_method
from sparse_rl.commands.report_accuracy import accuracy
from sparse_rl.commands.sources import Source
from sparse_rl.errors import NotWrittenError, UserError, reason
from sparse_rl.files import MOST_TEXT, read_text, replace_text
from sparse_rl.metrics import METRICS_FILE, RECIPE_FILE, runs_below
from sparse_rl.recipe.schema import parse_yaml
from sparse_rl.temporary import temporary_folder

if TYPE_CHECKING:
    from sparse_rl.analysis.report.page import Section

ABOUT = "Write one HTML page, which needs no network, about runs, evaluations, rollouts and timings."
OUT = "report.html"
SHOWN = 3  # default number of coloured completions of each folder of rollouts
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
    scores = accuracy(results.files[eval.RESULTS], results.files[perplexity.RESULTS], runs, folder)
    return [
        Section("runs", "Runs", of_runs.settings(runs) if runs else ""),
        Section("accuracy", "Accuracy", scores),
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


def analyses(results: Results, folder: Path) -> str:
    """Return the pictures of analyses: those that were written by `sparse-rl plot --figure`, and, for each folder of
    rollouts, those that need no model.
    """
    from sparse_rl.analysis.report.page import heading, picture, pictures

    made: dict[str, list[str]] = {}

    def add(name: str, numbers: Any, place: str) -> None:
        file = folder / f"figure{sum(map(len, made.values()))}.png"
        FIGURES[name].draw(numbers, file)
        made.setdefault(place, []).append(picture(file, f"{name}: {FIGURES[name].about.split('; by default')[0]}"))

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
                add(name, compute(name, [source], Choice(line=1 if "line" in FIGURES[name].uses else None)), str(place))
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
        made += [heading(str(place)), note(policy_sentence(source.named))]
        for number, rollout in enumerate(islice(source.each(), count)):
            ids = [*rollout.prompt_ids, *rollout.completion_ids]
            lengths = f"prompt of {len(rollout.prompt_ids):,} tokens, completion of {len(rollout.completion_ids):,}"
            title = f"line {number + 1}: {lengths}, ended by {rollout.finish_reason}"
            data = packed(rollout.trace, source.strings(ids), len(rollout.prompt_ids))
            made.append(sample(title, data, opened=len(made) == 2))
    about = (
        "Each token is coloured by the share of kv heads that still hold it in their cache at a moment of sampling. "
        "Move the slider, or focus the text and press the arrow keys (with Shift: 32 tokens), to see the cache as the "
        "sampler had it then. Click a token to see its heads."
    )
    return note(about) + "".join(made) if made else ""


def policy_sentence(fingerprint: Mapping[str, str]) -> str:
    """Return the model and the cache of rollouts in words, for readers who do not know the policy."""
    from sparse_rl.analysis.drawing import policy_settings, subject
    from sparse_rl.methods.config import CONFIGS

    settings = policy_settings(fingerprint)
    parts = [f"Sampled by {subject(fingerprint)}."]
    if (config := CONFIGS.get(settings.get("policy", ""))) is not None and config.__doc__:
        parts.append(f"{settings['policy']}: {config.__doc__.splitlines()[0]}")
    for name, which in (("sinks", "first"), ("window", "newest")):
        if type(number := settings.get(name)) is int:
            parts.append(f"{name.capitalize()}: the {which} {number} token{'s' * (number != 1)}.")
    budget, period = settings.get("budget"), settings.get("period")
    if type(budget) is int and type(period) is int:
        parts.append(
            f"When a kv head holds {budget + period} entries (budget {budget}, period {period}), a compaction cuts it "
            f"back to {budget}."
        )
    return " ".join(parts)


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
