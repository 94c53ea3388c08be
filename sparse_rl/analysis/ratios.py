"""Accuracy against what a cache may hold, one line for each way to choose it: the budget of a sweep, or the share that
stays of a context that is compacted once.

plot_ratios(json.loads(Path("eval.json").read_text())["rows"], "ratios.png")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparse_rl.analysis.drawing import colours, label_ends, new_figure, save_figure
from sparse_rl.errors import UserError, reason

Row = Mapping[str, Any]
AXES = {  # what was varied -> the axis' label
    "ratio": "share of the context's tokens that stay",
    "budget": "budget: entries that a compaction leaves in each kv head",
}
# setting -> what a budget makes of it: the window of h2o, the period of am
FOLLOWS: dict[str, Callable[[int], int]] = {"window": lambda budget: budget // 2, "period": lambda budget: budget}


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of an eval.json. Raises UserError for anything else."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        return [row for row in rows if row["parameters"] is not None and {"accuracy", "task"} <= row.keys()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not the eval.json of an evaluation: {reason(error)}") from error


def plot_ratios(rows: Sequence[Row], out: str | Path) -> Path:
    """A line for each method with its accuracies at its ratios, or budgets, and a bar of one standard error; dashed for
    one that has none, such as a full cache. Several tasks are told apart by their names.

    Raises UserError where no row has a ratio or a budget, and an accuracy.
    """
    drawn = [row for row in rows if row["accuracy"] is not None]
    axis = next((key for key in AXES if any(key in row["parameters"] for row in drawn)), None)
    if axis is None:
        raise UserError("no row of this evaluation has an accuracy, and a budget or a ratio to draw it against")
    places = sorted({row["parameters"][axis] for row in drawn if axis in row["parameters"]})
    methods: dict[str, list[Row]] = {}
    for row, name in zip(drawn, method_names(drawn, axis), strict=True):
        methods.setdefault(name, []).append(row)
    figure, axes = new_figure()
    axes.set_xscale("log")
    axes.invert_xaxis()  # names stand at the end of each line, where methods differ most
    axes.set_xticks(places, [f"{place:g}" for place in places], minor=False)
    axes.minorticks_off()
    ends = []
    for colour, (name, mine) in zip(colours(len(methods)), methods.items(), strict=True):
        mine = sorted(mine, key=lambda row: -row["parameters"].get(axis, 0))
        values = [row["accuracy"] for row in mine]
        if axis in mine[0]["parameters"]:
            at, errors = [row["parameters"][axis] for row in mine], [row["standard_error"] or 0.0 for row in mine]
            axes.errorbar(at, values, errors, color=colour, marker="o", markersize=4, capsize=2)
        else:
            at = places[:1]
            axes.plot([places[0], places[-1]], values[-1:] * 2, color=colour, linestyle="--", linewidth=1.2)
        ends.append((at[-1], values[-1], name, colour))
    label_ends(axes, ends, 9)
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel("accuracy (pass@1)")
    return save_figure(figure, out)


def method_names(rows: Sequence[Row], axis: str = "ratio") -> list[str]:
    """What each row calls its method: the policy, and those of its settings, but what was varied (`axis`), that other
    rows of the policy have otherwise; in front of it the task, where there are several.
    """
    several = len({row["task"] for row in rows}) > 1
    made = []
    for row in rows:
        alike = [other["parameters"] for other in rows if other["policy"] == row["policy"]]
        differ = [
            _setting(key, value)
            for key, value in row["parameters"].items()
            if key != axis and any(not _agree(row["parameters"], other, key) for other in alike)
        ]
        made.append((f"{row['task']}: " if several else "") + ", ".join([row["policy"], *differ]))
    return made


def _agree(ours: Row, theirs: Row, key: str) -> bool:
    """Whether two caches have one setting: its value, or what follows from their budgets where it is not given."""
    follows = FOLLOWS.get(key)
    both = follows is not None and all(
        "budget" in one and one.get(key) == follows(one["budget"]) for one in (ours, theirs)
    )
    return both or ours.get(key) == theirs.get(key)


def _setting(key: str, value: Any) -> str:
    """A setting in a name: one of a choice, or several, alone; another behind its key."""
    if isinstance(value, list):
        return "+".join(map(str, value))
    return value if isinstance(value, str) else f"{key} {value}"
