"""The papers' accuracies beside those of an evaluation: same task, cache policy, and budget or compression."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from sparse_rl.analysis.evaluation import cache_labels, model_label
from sparse_rl.analysis.report.page import heading, note, table

ABOUT = (
    "The papers' numbers have the same task, cache policy, and budget or compression. Their models, trainings, "
    "prompts, lengths and further settings may differ; docs/papers/*.md of the project list the differences."
)


class Published(NamedTuple):
    """An accuracy from a paper.

    task, policy : names in this project
    size : of the cache: a budget in entries, a compression such as "8x", or "" if the policy has neither
    training : of the model before it was evaluated, or "untrained"; the length of the answers if the paper has several
    percent : accuracy in percent
    source : paper, and table or section
    """

    task: str
    policy: str
    size: str
    model: str
    training: str
    percent: str
    source: str


@cache
def published() -> list[Published]:
    """Return the numbers of the papers' tables. docs/papers/*.md has the same."""
    text = (files(__package__) / "assets" / "published.csv").read_text(encoding="utf-8")
    return [Published(**row) for row in csv.DictReader(text.splitlines())]


def size_of(row: Any) -> str:
    """Return the size of the cache of an evaluation's row, as in `Published`."""
    compression = row.parameters.get("compression")
    return str(row.parameters.get("budget") or ("" if compression is None else f"{compression:g}x"))


def beside_published(rows: Sequence[Any]) -> str:
    """Return a table: the rows of each cache, and below them the papers' rows of this cache; "" if there are none.

    rows : rows of an evaluation, with the attributes of EvalRow
    """
    scored = [row for row in rows if row.accuracy is not None and row.contexts is None]
    ours: dict[tuple[str, str, str], list[tuple[Any, str]]] = {}
    for row, label in zip(scored, cache_labels(scored), strict=True):
        ours.setdefault((row.task, row.policy, size_of(row)), []).append((row, label))
    cells: list[list[str]] = []
    for key, measured in ours.items():
        theirs = [one for one in published() if (one.task, one.policy, one.size) == key]
        if not theirs:
            continue
        for row, own_label in measured:
            error = "" if row.standard_error is None else f" ± {100 * row.standard_error:.1f}"
            cells.append(
                [row.task, own_label, model_label(row.model), "", f"{100 * row.accuracy:.1f}{error}", "this report"]
            )
        cells += [
            [one.task, f"{one.policy} {one.size}".strip(), one.model, one.training, one.percent, one.source]
            for one in theirs
        ]
    if not cells:
        return ""
    names = ["task", "cache", "model", "training", "accuracy in percent", "source"]
    return heading("Beside the papers") + note(ABOUT) + table(names, cells, "beside the papers", names[:4] + names[5:])
