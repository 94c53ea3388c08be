"""The parts of a report, one HTML page that needs no network: runs, tables, coloured completions.

The page and the forms of its parts are in assets/page.html.j2; all text is escaped there. assets/completion.js shows a
completion whose tokens carry their retention.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, PackageLoader
from rich.table import Table
from rich.text import Text

from sparse_rl.analysis.drawing import STYLE
from sparse_rl.analysis.results import Group, has_line, plot_gap, plot_metric
from sparse_rl.analysis.tables import model_label
from sparse_rl.analysis.traces import records_pages, unpaged
from sparse_rl.config import dotted
from sparse_rl.methods.config import budget_words
from sparse_rl.metrics import read_metrics, why_unchanged
from sparse_rl.trace import NEVER, EvictionTrace


def as_data(file: Path) -> str:
    """Return a PNG file as the address of a picture, so that its bytes become part of the page."""
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def wide(file: Path) -> bool:
    """Return True if a PNG file is too wide for one of two columns, or for a phone unless it scrolls."""
    return int.from_bytes(file.read_bytes()[16:20], "big") > 1.3 * STYLE["figure.figsize"][0] * STYLE["figure.dpi"]


ENVIRONMENT = Environment(loader=PackageLoader("sparse_rl.analysis", "assets"), autoescape=True)
ENVIRONMENT.filters |= {"as_data": as_data, "wide": wide}
ENVIRONMENT.globals["infinity"] = math.inf
PAGE = ENVIRONMENT.get_template("page.html.j2")
html: Any = PAGE.make_module({"sections": []})  # its macros, as functions: heading, note, table, picture, ...


class Section(NamedTuple):
    """A part of the page with a heading, to which the menu at the top leads. name : in links;  body : HTML"""

    name: str
    title: str
    body: str


def page(title: str, about: str, sections: Sequence[Section], opening: str = "") -> str:
    """Return the whole page. Sections without a body are left out. opening : HTML of the finding, above the menu"""
    shown = [section for section in sections if section.body]
    return PAGE.render(title=title, about=about, sections=shown, opening=opening)


def from_terminal(shown: Table, where: str = "") -> str:
    """Return a table of the terminal as HTML. where : source of the numbers, which tells tables of one title apart"""
    columns = [[_plain(cell) for cell in column.cells] for column in shown.columns]
    names = [_plain(column.header).replace("-\n", "").replace("\n", " ") for column in shown.columns]
    left = [name for name, column in zip(names, shown.columns, strict=True) if column.justify != "right"]
    title = _plain(shown.title)
    made = html.heading(title) if title else ""
    made += html.table(names, list(zip(*columns, strict=True)), f"{title} {where}".strip() or "table", left)
    return made + (html.note(_plain(shown.caption)) if shown.caption else "")


def _plain(cell: Any) -> str:
    return "" if cell is None else Text.from_markup(str(cell)).plain


# ---- training runs ---------------------------------------------------------------------------------------------------

CURVES = {  # section -> metrics that it draws, with a sentence about each
    "learning": {
        "reward": "Mean reward of the sampled completions against the training step.",
        "eval_reward": "Mean reward on held-out problems, under the cache of the run.",
        "loss": "Loss against the training step.",
        "kl": "KL divergence per token, in nats: from the teacher, or from GRPO's reference model.",
        "token_accuracy": "Share of the tokens that the model ranks first.",
        "entropy": "Entropy of the next token, in nats.",
    },
    "lengths": {
        "retention": "Share of a sequence's tokens that the cache holds at the end.",
        "length": "Mean length of a completion, in tokens.",
        "cut_off": "Share of completions that were cut off at the largest length.",
    },
}
MOST_COMPARED = 8  # runs beside each other in a table
FAR = 0.1  # nats; in float32 a larger gap is no rounding
ABOUT_RUNS = (
    "Reward at the end: mean over the last tenth of the steps, under the run's own cache. Cache held: bytes of "
    "keys and values of one generation at its peak, beside those that the same completions would take with a full"
    " cache; means over the steps."
)
ABOUT_GAPS = (
    "The gap is |log p(trainer) − log p(sampler)| of a sampled token, in nats, before top-p, top-k and min-p. Under "
    "replay, the trainer attends to exactly the tokens that the sampler attended to, so the gap is rounding alone. The "
    "ratio is p(trainer) / p(sampler) after top-p, top-k and min-p, before clipping; without these three it is "
    "exp(gap) or exp(−gap). The largest values are those of the whole run, the others are means over its steps."
)


@dataclass(frozen=True)
class ReportedRun:
    """A run's directory. label : its name in the report;  method : its name in the table of colours, or None"""

    label: str
    folder: Path
    recipe: Mapping[str, Any]
    text: str
    method: str | None

    @property
    def training(self) -> str | None:
        """The recipe's kind; a GRPO run has the name of its comparison, as in the README: RL-Sparse, ..."""
        names = {"full": "RL-Full", "mismatched": "Mismatched"}
        kind = self.recipe.get("kind")
        return f"grpo: {names.get(self.method or '', 'RL-Sparse')}" if kind == "grpo" and self.method else kind

    @property
    def settings(self) -> str:
        """The recipe as JSON, without the differences between seeds: seeds, and folders that are named after them."""
        text = json.dumps([self.folder.name, _shared(self.recipe)], sort_keys=True, default=str)
        return re.sub(r'(?<="seed": )\d+|(?<=seed)[-_]?\d+', "", text)


def _shared(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in recipe.items() if key not in ("seed", "output_dir")}


def groups(runs: Sequence[ReportedRun]) -> list[Group]:
    """Group the runs that differ in nothing but their seed; a group is one line of a picture."""
    of_settings: dict[str, list[ReportedRun]] = {}
    for run in runs:
        of_settings.setdefault(run.settings, []).append(run)
    alike = list(of_settings.values())
    names = [f"{some[0].folder.name} ({len(some)} seeds)" if len(some) > 1 else some[0].label for some in alike]
    unique = [name if names.count(name) == 1 else some[0].label for name, some in zip(names, alike, strict=True)]
    return [Group(n, [run.folder for run in some], some[0].method) for n, some in zip(unique, alike, strict=True)]


def by_kind(runs: Sequence[ReportedRun]) -> dict[str | None, list[ReportedRun]]:
    """Return the runs of each kind of recipe. Losses, steps and keys of different kinds do not compare."""
    return {
        kind: [r for r in runs if r.recipe.get("kind") == kind] for kind in [run.recipe.get("kind") for run in runs]
    }


def settings(runs: Sequence[ReportedRun]) -> str:
    """Return, for each kind, a table of its runs, the settings in which their recipes differ, and their recipes."""
    return "".join(_settings(kind, some) for kind, some in by_kind(runs).items())


def _settings(kind: str | None, runs: Sequence[ReportedRun]) -> str:
    text = ["run", "training", "model", "cache", "engine"]
    headings = [*text, "seed", "steps", "reward at the end", "seconds a step", "cache held, of a full cache"]
    rows, notes = [], []
    for run in runs:
        recipe, log = run.recipe, read_metrics(run.folder)
        if why := why_unchanged(log, recipe.get("zero_truncated_advantages", True)):
            notes.append(html.note(f"{run.label}: {why}."))
        if mass := logged(log, "support/mass"):
            kept = f"top-p, top-k or min-p kept {_mean(mass):.1%} of the probability"
            notes.append(html.note(f"{run.label}: {kept}. The rest was not trained: evaluate with the same settings."))
        cache_block = dict(recipe.get("prompt_cache") or recipe.get("cache") or {})
        words = str(cache_block.get("policy", "")), budget_words(cache_block.get("budget") or cache_block.get("ratio"))
        policy = " ".join(filter(None, words))
        trained = f"{policy}; full attention in training" if run.method == "mismatched" else policy
        rewards, seconds = logged(log, "reward"), logged(log, "step_time")
        sizes = [logged(log, f"cache/bytes_{which}") for which in ("held", "full")]
        rows.append(
            [
                *(run.label, run.training, model_label(str(recipe.get("model", "")))),
                *(trained or None, (recipe.get("rollout") or {}).get("engine"), recipe.get("seed")),
                max((line["step"] for line in log), default=None),
                f"{_mean(rewards[-max(1, len(rewards) // 10) :]):.3f}" if rewards else None,
                f"{_mean(seconds):.2f}" if seconds else None,
                " of ".join(f"{_mean(values) / 1e6:,.1f} MB" for values in sizes if values) or None,
            ]
        )
    columns = [place for place in range(len(headings)) if any(row[place] is not None for row in rows)]
    cells = [[row[place] for place in columns] for row in rows]
    title = f"Runs of kind {kind}"
    table = html.heading(title) + html.table([headings[place] for place in columns], cells, title, text)
    recipes = [html.source(run.text, f"recipe of {run.label}") for run in runs]
    return "".join([table, html.note(ABOUT_RUNS), *notes, differences(runs), *recipes])


def differences(runs: Sequence[ReportedRun]) -> str:
    """Return a table of the settings in which the recipes of the runs differ, without seeds and folders."""
    flat = [dotted(_shared(run.recipe)) for run in runs]
    names = dict.fromkeys(name for settings_of_run in flat for name in settings_of_run)
    cells = {name: [json.dumps(one.get(name), ensure_ascii=False) for one in flat] for name in names}
    rows = [[name, *values] for name, values in cells.items() if len(set(values)) > 1]
    if not rows or len(runs) > MOST_COMPARED:
        return ""
    headings = ["key", *(run.label for run in runs)]
    return html.heading("Where the recipes differ") + html.table(headings, rows, "differences of the recipes", headings)


def curves(runs: Sequence[ReportedRun], section: str, folder: Path) -> str:
    """Return the pictures of a section of CURVES. Pictures are written to `folder`."""
    parts = []
    kinds = by_kind(runs)
    for kind, some in kinds.items():
        lines = groups(some)
        rewarded = any(group.logged("reward") for group in lines)
        for metric, about in CURVES[section].items():
            if not has_line(lines, metric) or (metric == "loss" and rewarded):
                continue
            if any(len(group.logged(metric)) > 1 for group in lines):
                about += " A band spans the seeds of a line, from the smallest value to the largest."
            if len(kinds) > 1:
                about = f"Runs of kind {kind}. {about}"
            parts.append(html.picture(plot_metric(lines, folder / f"{kind}_{metric}.png", metric), about))
    return html.pictures(parts)


def gaps(runs: Sequence[ReportedRun], folder: Path) -> str:
    """Return the gap between trainer and sampler, and the importance ratios."""
    rows, about, replayed = [], ABOUT_GAPS, []
    for run in runs:
        log = read_metrics(run.folder)
        if not (largest := logged(log, "replay/gap_max")):
            continue
        replayed.append(run)
        means = [_mean(logged(log, f"ratio/{name}")) for name in ("p5", "mean", "p95")]
        ratios = [*means, max(logged(log, "ratio/max"), default=float("nan"))]
        gap = [f"{_mean(logged(log, 'replay/gap_mean')):.1e}", f"{max(largest):.1e}"]
        clipped = f"{_mean(logged(log, 'ratio/clipped')):.2%}"
        rows.append([run.label, *gap, *(f"{ratio:.4g}" for ratio in ratios), clipped])
        if max(largest) > FAR and run.method != "mismatched" and run.recipe.get("dtype") == "float32":
            about += f" {run.label}: the gap is larger than rounding in float32; docs/numerics.md lists causes."
    if not replayed:
        return ""
    if mismatched := [run.label for run in replayed if run.method == "mismatched"]:
        about += (
            f" {', '.join(mismatched)}: the trainer computed other probabilities than the sampler, because it also "
            "attended to evicted tokens, which the sampler did not see. GRPO's gradient assumes that both are the same."
        )
    gap_and_ratio = ["gap: mean", "gap: largest", "ratio: 5th percentile", "mean", "95th percentile", "largest"]
    made = html.note(about)
    made += html.table(["run", *gap_and_ratio, "above the clip"], rows, "gaps and ratios", ["run"])
    lines = groups(replayed)
    if has_line(lines, "replay/gap_mean"):
        caption = "Gap against the training step, of the first seed: mean (solid) and largest (dotted)."
        made += html.pictures([html.picture(plot_gap(lines, folder / "gap.png"), caption)])
    return made


def logged(log: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [line[name] for line in log if line.get(name) is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


# ---- coloured completions --------------------------------------------------------------------------------------------


def packed(
    trace: EvictionTrace, strings: Sequence[str], prompt: int, spans: Sequence[tuple[int, int]] = ()
) -> dict[str, Any]:
    """Return the data of one coloured completion: a sequence of S tokens, as plain values for JSON.

    The browser needs evict_at of all layers and kv heads. It is stored as codes: 0 for a token that stays, else the
    rank of its eviction time, from 1, among all eviction times of the sequence. Codes compress well, because a policy
    evicts many tokens at the same time. completion.js unpacks them.

    tokens : the text of each token;  prompt : number of tokens of the prompt
    parts : [first token, heading, true if its tokens were read] of each part after the prompt
    layers : indices of the layers that are shown, those without a sliding window;  heads : kv heads of a layer
    times : eviction times in ascending order, as query positions
    codes : [layers][kv heads][S] in one byte or, if `wide`, two, low bytes first; deflated, in base 64
    paged : true if tokens of closed pages are read through summaries, and are shown as not held

    spans : of a conversation, the parts of the completion that were sampled (`Rollout.spans`)
    """
    parts = [[prompt, "completion", False]]
    if spans:
        starts, ends = [start for start, _ in spans], [0, *(end for _, end in spans)]
        parts = [[prompt + start, f"turn {turn + 1}", False] for turn, start in enumerate(starts)]
        gaps = zip(ends, [*starts, len(strings) - prompt], strict=True)
        parts = sorted(parts + [[prompt + end, "read, not sampled", True] for end, start in gaps if end < start])
    shown, paged = trace.policy_part(), records_pages(trace)
    evict_at = (unpaged(shown) if paged else shown).evict_at
    times = evict_at[evict_at < NEVER].unique()
    codes = torch.searchsorted(times, evict_at.clamp(max=NEVER - 1)) + 1
    numbers = codes.masked_fill(evict_at == NEVER, 0).to(torch.int32).flatten().numpy()
    wide = len(times) > 255
    planes = (numbers & 255).astype("uint8").tobytes() + ((numbers >> 8).astype("uint8").tobytes() if wide else b"")
    return {
        "tokens": list(strings),
        "prompt": prompt,
        "parts": parts,
        "layers": trace.global_layers,
        "heads": trace.kv_heads,
        "times": times.tolist(),
        "wide": wide,
        "paged": paged,
        "codes": base64.b64encode(zlib.compress(planes, 6)).decode(),
    }
