"""The Markdown report: for each stage a table, the goals and a CPU's figures, or the reason why there is no table.

A stage without a number is reported as not run, whatever its status is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.comparisons import COMPARISONS
from benchmarks.gpu.record import Record
from benchmarks.gpu.stages import Stage
from benchmarks.gpu.worker import FAILURE, Row


def write_report(record: Record, stages: Sequence[Stage]) -> Path:
    """Write the report beside the results, and return its path."""
    place = record.file.with_suffix(".md")
    new = place.with_name(f"{place.name}.{os.getpid()}.new")
    place.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(report(record.content, stages), encoding="utf-8")
    os.replace(new, place)
    return place


def report(content: dict[str, Any], stages: Sequence[Stage]) -> str:
    """Return the report as Markdown.

    content : the results, in the form of record.py
    """
    title = f"# Measurements on {content['device']}{', small sizes' if content['small'] else ''}"
    parts = [title, _warning(content), _summary(content, stages)]
    parts += [_stage(stage, content["stages"].get(stage.name)) for stage in stages]
    parts += [_environment(number, call) for number, call in enumerate(content["calls"])]
    return "\n\n".join(filter(None, parts)) + "\n"


def _warning(content: dict[str, Any]) -> str:
    if not content["small"]:
        return ""
    return "Small sizes test that the stages run. Their times say nothing about speed."


def _summary(content: dict[str, Any], stages: Sequence[Stage]) -> str:
    rows = []
    for stage in stages:
        held = content["stages"].get(stage.name)
        rows.append({"stage": f"[{stage.name}](#{stage.name.replace('.', '')})", "result": verdict(held)})
        rows[-1]["rows"] = len(held["rows"]) if held else 0
        rows[-1]["seconds"] = round(held["seconds"]) if held else 0
    return table(rows)


def verdict(held: dict[str, Any] | None) -> str:
    """Return the result of a stage in a few words."""
    if held is None:
        return "not run: not reached"
    rows, status, reason = held["rows"], held["status"], held["reason"]
    if not any(has_number(row) for row in rows):
        why = reason or "it gave no number"
        return f"not run: {why}" if status in ("not run", "done") else f"not run: {status}, {why}"
    failed = sum(FAILURE in row for row in rows)
    partly = f"; {failed} of {len(rows)} rows failed" if failed else ""
    if status == "done":
        return f"done{partly}"
    if status == "not run":
        return f"not run: {reason}"
    word = "cut" if status in ("cut", "running") else status
    return f"{word} after {len(rows)} rows: {reason}{partly}"


def has_number(row: Row) -> bool:
    """Return True if a row has no failure, and a number besides the index of its call."""
    numbers = (value for key, value in row.items() if key != "call" and not isinstance(value, bool))
    return FAILURE not in row and any(isinstance(value, int | float) for value in numbers)


def _stage(stage: Stage, held: dict[str, Any] | None) -> str:
    lines = [f"## {stage.name}", "", stage.question, ""]
    result = verdict(held)
    if held is None or not held["rows"]:
        lines.append(result[:1].upper() + result[1:] + ".")
    else:
        lines += [f"Result: {result}.", ""]
        comparison = COMPARISONS.get(stage.name)
        lines += [table(comparison.shown(held["rows"]) if comparison else held["rows"])]
        if comparison is not None and any(map(has_number, held["rows"])):
            lines += ["", *comparison.lines(held["rows"])]
    if held is not None and held["stderr"]:
        lines += ["", "Last lines that the stage printed:", "", *(f"    {line}" for line in held["stderr"])]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, whose columns are the keys in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if FAILURE in columns:
        columns = [*(column for column in columns if column != FAILURE), FAILURE]
    if len({row.get("call") for row in rows}) == 1:
        columns = [column for column in columns if column != "call"]
    common = [column for column in columns if len(rows) > 2 and _is_common(column, rows)]
    if common and len(common) < len(columns):
        columns = [column for column in columns if column not in common]
        words = ", ".join(f"{column} {shown(rows[0][column])}" for column in common)
        return f"In all rows: {words}.\n\n{table([{key: row.get(key) for key in columns} for row in rows])}"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(shown(row.get(column)) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def _is_common(column: str, rows: Sequence[Row]) -> bool:
    """Return True if a column has one and the same text in all rows."""
    return all(column in row and row[column] == rows[0][column] for row in rows) and isinstance(rows[0][column], str)


def shown(value: Any) -> str:
    """Return a value as the text of a cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, dict):
        value = ", ".join(f"{key} {shown(part)}" for key, part in value.items())
    elif isinstance(value, list):
        value = ", ".join(map(shown, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def _environment(number: int, call: dict[str, Any]) -> str:
    findings = {**call["environment"], **call["measured"]}
    rows = [{"topic": topic, "finding": finding} for topic, finding in findings.items()]
    return f"## Call {number}: machine and versions\n\n{table(rows)}"
