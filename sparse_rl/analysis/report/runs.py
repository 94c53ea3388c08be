"""The parts of a report about training runs: their settings, learning curves, gaps, and lengths."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_rl.analysis.curves import Group, has_line, logged_metrics, plot_gap, plot_groups
from sparse_rl.analysis.evaluation import model_label
from sparse_rl.analysis.report.page import folded, heading, note, picture, pictures, source, table
from sparse_rl.config import dotted
from sparse_rl.metrics import read_metrics

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
MEANS = ("ratio/p5", "ratio/mean", "ratio/p95")
ABOUT_RUNS = (
    "Reward at the end: mean over the last tenth of the steps, under the run's own cache. Cache held: bytes of "
    "keys and values of one generation at its peak, beside those that the same completions would take with a full"
    " cache; means over the steps."
)


@dataclass(frozen=True)
class Run:
    """A run's directory. label : its name in the report;  method : its name in the table of colours, or None"""

    label: str
    folder: Path
    recipe: Mapping[str, Any]
    text: str
    method: str | None

    @property
    def settings(self) -> str:
        """The recipe as JSON, without the differences between seeds: seeds, and folders that are named after them."""
        shared = {key: value for key, value in self.recipe.items() if key not in ("seed", "output_dir")}
        text = json.dumps([self.folder.name, shared], sort_keys=True, default=str)
        return re.sub(r'(?<="seed": )\d+|(?<=seed)[-_]?\d+', "", text)


def groups(runs: Sequence[Run]) -> list[Group]:
    """Group the runs that differ in nothing but their seed; a group is one line of a picture."""
    of_settings: dict[str, list[Run]] = {}
    for run in runs:
        of_settings.setdefault(run.settings, []).append(run)
    made = []
    for some in of_settings.values():
        name = some[0].label
        if len(some) > 1:
            name = f"{some[0].folder.name} ({len(some)} seeds)"
        made.append(Group(name, [run.folder for run in some], some[0].method))
    names = [group.name for group in made]
    return [
        group if names.count(group.name) == 1 else Group(some[0].label, group.folders, group.method)
        for group, some in zip(made, of_settings.values(), strict=True)
    ]


def settings(runs: Sequence[Run]) -> str:
    """Return a table of the runs, the settings in which their recipes differ, and the recipe of each."""
    costs = ["seconds a step", "cache held, of a full cache"]
    headings = ["run", "kind", "model", "cache", "engine", "seed", "steps", "reward at the end", *costs]
    rows = []
    for run in runs:
        recipe, log = run.recipe, read_metrics(run.folder)
        cache = dict(recipe.get("cache") or {})
        policy = " ".join(str(cache[key]) for key in ("policy", "budget") if key in cache)
        trained = f"{policy}; full attention in training" if run.method == "mismatched" else policy
        rewards = [line["reward"] for line in log if "reward" in line]
        engine = (recipe.get("rollout") or {}).get("engine")
        rows.append(
            [
                *(run.label, recipe.get("kind"), model_label(str(recipe.get("model", "")))),
                *(trained or None, engine, recipe.get("seed")),
                max((line["step"] for line in log), default=None),
                f"{_mean(rewards[-max(1, len(rewards) // 10) :]):.3f}" if rewards else None,
                *_costs(log),
            ]
        )
    text = ["run", "kind", "model", "cache", "engine"]
    return (
        table(headings, rows, "runs", text)
        + note(ABOUT_RUNS)
        + differences(runs)
        + "".join(folded(f"recipe of {run.label}", source(run.text, f"recipe of {run.label}")) for run in runs)
    )


def differences(runs: Sequence[Run]) -> str:
    """Return a table of the settings in which the recipes of the runs differ, without seeds and folders."""
    flat = [dotted({k: v for k, v in run.recipe.items() if k not in ("seed", "output_dir")}) for run in runs]
    names = dict.fromkeys(name for settings_of_run in flat for name in settings_of_run)
    cells = {name: [json.dumps(one.get(name), ensure_ascii=False) for one in flat] for name in names}
    rows = [[name, *values] for name, values in cells.items() if len(set(values)) > 1]
    if not rows or len(runs) > MOST_COMPARED:
        return ""
    headings = ["key", *(run.label for run in runs)]
    return heading("Where the recipes differ") + table(headings, rows, "differences of the recipes", headings)


def _costs(log: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return the means over a log: seconds of a step, and bytes of keys and values at their peak, of a full cache."""
    seconds = [line["step_time"] for line in log if line.get("step_time") is not None]
    cells = [f"{_mean(seconds):.2f}" if seconds else None]
    sizes = [
        [line[name] for line in log if line.get(name) is not None] for name in ("cache/bytes_held", "cache/bytes_full")
    ]
    means = [f"{_mean(values) / 1e6:,.1f} MB" for values in sizes if values]
    return [*cells, " of ".join(means) or None]


def curves(runs: Sequence[Run], section: str, folder: Path) -> str:
    """Return the pictures of a section of CURVES. Pictures are written to `folder`."""
    parts = []
    kinds = list(dict.fromkeys(run.recipe.get("kind") for run in runs))  # their steps and losses do not compare
    for kind in kinds:
        of_kind = [run for run in runs if run.recipe.get("kind") == kind]
        rewarded = any(_has(run.folder, "reward") for run in of_kind)
        for metric, about in CURVES[section].items():
            drawn = {run.label: run.folder for run in of_kind if _has(run.folder, metric)}
            if not drawn or not has_line(drawn, metric) or (metric == "loss" and rewarded):
                continue
            shown = [group for group in groups(of_kind) if any(_has(one, metric) for one in group.folders)]
            if any(len(group.folders) > 1 for group in shown):
                about += " A band spans the seeds of a line, from the smallest value to the largest."
            if len(kinds) > 1:
                about = f"Runs of kind {kind}. {about}"
            file = folder / f"{kind}_{metric.replace('/', '_')}.png"
            parts.append(picture(plot_groups(shown, file, metric), about))
    return pictures(parts)


def _has(folder: Path, metric: str) -> bool:
    from sparse_rl.analysis.curves import METRICS

    return METRICS.get(metric, (metric, ""))[0] in logged_metrics(folder)


def gaps(runs: Sequence[Run], folder: Path) -> str:
    """Return the gap between trainer and sampler, and the importance ratios."""
    replayed = [run for run in runs if "replay/gap_max" in logged_metrics(run.folder)]
    if not replayed:
        return ""
    rows = []
    for run in replayed:
        log = read_metrics(run.folder)
        largest = max(line["replay/gap_max"] for line in log if line.get("replay/gap_max") is not None)
        logged = {
            name: [line[name] for line in log if line.get(name) is not None]
            for name in ("replay/gap_mean", *MEANS, "ratio/max", "ratio/clipped")
        }
        most = max(logged["ratio/max"], default=float("nan"))
        numbers = [_mean(logged[name]) for name in MEANS]
        clipped = f"{_mean(logged['ratio/clipped']):.2%}"
        gap = [f"{_mean(logged['replay/gap_mean']):.1e}", f"{largest:.1e}"]
        rows.append([run.label, *gap, *(f"{number:.4g}" for number in [*numbers, most]), clipped])
    gap_and_ratio = ["gap: mean", "gap: largest", "ratio: 5th percentile", "mean", "95th percentile", "largest"]
    headings = ["run", *gap_and_ratio, "above the clip"]
    about = (
        "The gap is |log p(trainer) − log p(sampler)| of a sampled token, in nats. Under replay, the trainer attends "
        "to exactly the tokens that the sampler attended to, so the gap is rounding alone. The ratio is p(trainer) / "
        "p(sampler) before clipping. The largest values are those of the whole run, the others are means over its "
        "steps. The ratio is exp(gap) if the trainer's probability is the larger one, and exp(−gap) otherwise."
    )
    lines = groups(replayed)
    of_method = {group.name: group.method for group in lines}
    drawn = {group.name: group.folders[0] for group in lines}
    shown = ""
    if has_line(drawn, "replay/gap_mean"):
        file = plot_gap(drawn, folder / "gap.png", method_of=of_method)
        shown = pictures(
            [picture(file, "Gap against the training step, of the first seed: mean (solid) and largest (dotted).")]
        )
    mismatched = [run.label for run in replayed if run.method == "mismatched"]
    if mismatched:
        about += (
            f" {', '.join(mismatched)}: the trainer computed other probabilities than the sampler, because it also "
            "attended to evicted tokens, which the sampler did not see. GRPO's gradient assumes that both are the same."
        )
    far = [
        run.label
        for run, row in zip(replayed, rows, strict=True)
        if float(row[2]) > FAR and run.method != "mismatched" and run.recipe.get("dtype") == "float32"
    ]
    if far:
        about += f" {', '.join(far)}: the gap is larger than rounding in float32; docs/numerics.md lists causes."
    return note(about) + table(headings, rows, "gaps and ratios", ["run"]) + shown


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
