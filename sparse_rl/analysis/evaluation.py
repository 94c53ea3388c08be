"""The tables of evaluations, from their rows (rollout/evaluation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table


def accuracy_table(rows: Sequence[Any]) -> Table:
    """The rows of an evaluation (`EvalRow`) as a table for the terminal."""
    title = "accuracy: completions with reward >= 1, as kept and cut off in percent; ± one standard error over problems"
    made = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # fits a terminal of 100 columns
    largest = max((k for row in rows for k in row.pass_at_k), default=1)
    names = ["task", "cache", "n", "pass@1", *([f"pass@{largest}"] if largest > 1 else [])]
    further = list(dict.fromkeys(name for row in rows for name in row.further_accuracy))
    names += map(escape, further)
    differ = any(row.read_entries != row.peak_entries for row in rows)
    entries = ("held", "read") if differ else ("peak",)
    behind = ("context", "made in") if any(row.contexts for row in rows) else ()
    for name in (*names, "kept", "kept if\nright", *entries, "tokens", "cut\noff", "tok/s", *behind):
        made.add_column(name, justify="left" if name in ("task", "cache") else "right", no_wrap=True)
    for row, cache in zip(rows, cache_labels(rows), strict=True):
        count = f"{row.problems}×{row.samples}" + (f" (−{row.excluded})" if row.excluded else "")
        cells = [escape(row.task), escape(cache), count, _percent(row.accuracy, row.standard_error)]
        if largest > 1:
            cells.append(_percent(row.pass_at_k.get(largest), row.pass_at_k_error.get(largest)))
        cells += [_further(row, name) for name in further]
        cells += [_percent(row.retention), _percent(row.retention_correct), str(row.peak_entries)]
        cells += [*([str(row.read_entries)] if differ else []), f"{row.length:.0f}"]
        cells += [_percent(row.truncated), f"{row.tokens_per_second:.0f}"]
        if behind:
            cells += [f"{row.contexts.bytes / 1e6:.1f} MB", f"{sum(row.contexts.seconds.values()):.1f} s"]
        made.add_row(*cells)
    captions = []
    if any(row.excluded for row in rows):
        captions.append("(−m): m problems left out, their gold answers cannot be read")
    if any(found.problems != row.problems for row in rows for found in row.further_accuracy.values()):
        captions.append("(m): an accuracy over m problems")
    made.caption = "; ".join(captions) or None
    return made


def perplexity_table(rows: Sequence[Any]) -> Table:
    """The rows of perplexities (`PerplexityRow`) as a table for the terminal."""
    first = rows[0]
    behind = f"{first.completion_tokens} tokens decoded behind {first.prompt_tokens}"
    made = Table(title=f"{first.pieces} pieces, {behind}; kept in percent; ± one standard error over pieces")
    differ = any(row.read_entries != row.peak_entries for row in rows)
    entries = ("held", "read") if differ else ("peak",)
    for name in ("cache", "nll a token, nats", "perplexity", "kept", *entries, "tok/s"):
        made.add_column(name, justify="left" if name == "cache" else "right", no_wrap=True)
    for row, cache in zip(rows, cache_labels(rows), strict=True):
        made.add_row(
            escape(cache),
            f"{row.nll:.4f}" + ("" if row.standard_error is None else f" ± {row.standard_error:.4f}"),
            "–" if row.perplexity is None else f"{row.perplexity:.2f}",
            _percent(row.retention),
            str(row.peak_entries),
            *([str(row.read_entries)] if differ else []),
            f"{row.tokens_per_second:.0f}",
        )
    return made


def cache_labels(rows: Sequence[Any]) -> list[str]:
    """What each row calls its cache: policy, and budget or ratio; where others have the same, also what differs."""
    sizes = [row.budget or row.parameters.get("ratio") for row in rows]
    labels = [row.policy + (f" {size}" if size else "") for row, size in zip(rows, sizes, strict=True)]
    made = []
    for row, label in zip(rows, labels, strict=True):
        alike = [other.parameters for other, its in zip(rows, labels, strict=True) if its == label]
        differ = [key for key, value in row.parameters.items() if any(one.get(key) != value for one in alike)]
        made.append(label + "".join(f", {key} {row.parameters[key]}" for key in differ))
    return made


def _further(row: Any, name: str) -> str:
    """The accuracy by a further score, and over how many problems, where not over as many as the row's own."""
    found = row.further_accuracy[name]
    count = "" if found.problems == row.problems else f" ({found.problems})"
    return _percent(found.accuracy, found.standard_error) + count


def _percent(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
