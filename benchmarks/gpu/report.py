"""The Markdown report: a table for each stage, or the reason why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.worker import FAILURE, Row


def write_report(file: Path, content: dict[str, Any]) -> Path:
    """Write the report beside the results, and return its path."""
    parts = [f"# Measurements on {content['device']}{', small sizes: not for speed' * content['small']}"]
    stages = content["stages"].items()
    parts.append(table([{"stage": n, "result": verdict(s), "seconds": round(s["seconds"])} for n, s in stages]))
    for name, stage in stages:
        parts.append(f"## {name}\n\nResult: {verdict(stage)}.")
        parts += [table(stage["rows"])] * bool(stage["rows"])
        parts += ["Last lines that the stage printed:\n\n    " + "\n    ".join(stage["log"])] * bool(stage["log"])
    for number, call in enumerate(content["calls"]):
        rows = [{"topic": topic, "finding": finding} for topic, finding in call.items()]
        parts.append(f"## Call {number}: machine and versions\n\n{table(rows)}")
    place = file.with_suffix(".md")
    place.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return place


def verdict(stage: dict[str, Any]) -> str:
    """Return the result of a stage in a few words."""
    rows, status, reason = stage["rows"], stage["status"], stage["reason"]
    failed = sum(FAILURE in row for row in rows)
    if failed == len(rows):
        return f"not run: {reason or 'all rows failed'}"
    partly = f"; {failed} of {len(rows)} rows failed" if failed else ""
    tests = Counter(row["outcome"] for row in rows if "outcome" in row)
    counts = "".join(f", {number} {outcome}" for outcome, number in tests.items())
    return f"{status}{f' after {len(rows)} rows: {reason}' if reason else ''}{partly}{counts}"


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, whose columns are the keys in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(shown(row.get(column, '')) for column in columns)} |" for row in rows)])


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
