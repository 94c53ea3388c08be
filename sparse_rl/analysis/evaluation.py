"""Tables of evaluation results, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table


def accuracy_table(rows: Sequence[Any]) -> Table:
    title = "accuracy: completions with reward >= 1; all shares in percent; ± one standard error over problems"
    result = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # fits into 100 columns
    largest = max((k for row in rows for k in row.pass_at_k), default=1)
    models = _models(rows)
    names = [*models[:1], "task", "cache", "n", "pass@1", *([f"pass@{largest}"] if largest > 1 else [])]
    further = list(dict.fromkeys(name for row in rows for name in row.further_accuracy))
    names += map(escape, further)
    scored = any(row.log_perplexity is not None for row in rows)
    names += ["log-\nperplexity"] if scored else []
    differ = any(row.read_entries != row.peak_entries for row in rows)
    entries = ("held", "read") if differ else ("peak",)
    behind = ("context", "made in") if any(row.contexts for row in rows) else ()
    for name in (*names, "kept", "kept if\nright", *entries, "tokens", "cut\noff", "tok/s", *behind):
        result.add_column(name, justify="left" if name in ("model", "task", "cache") else "right", no_wrap=True)
    for row, cache in zip(rows, cache_labels(rows), strict=True):
        count = f"{row.problems}×{row.samples}" + (f" (−{row.excluded})" if row.excluded else "")
        cells = [
            *([escape(model_label(row.model))] if models else []),
            escape(row.task),
            escape(cache),
            count,
            _percent(row.accuracy, row.standard_error),
        ]
        if largest > 1:
            cells.append(_percent(row.pass_at_k.get(largest), row.pass_at_k_error.get(largest)))
        cells += [_further(row, name) for name in further]
        cells += [_nats(row.log_perplexity, row.log_perplexity_error)] if scored else []
        cells += [_percent(row.retention), _percent(row.retention_correct), str(row.peak_entries)]
        cells += [*([str(row.read_entries)] if differ else []), f"{row.length:.0f}"]
        cells += [_percent(row.truncated), f"{row.tokens_per_second:.0f}"]
        if behind:
            cells += [f"{row.contexts.bytes / 1e6:.1f} MB", f"{sum(row.contexts.seconds.values()):.1f} s"]
        result.add_row(*cells)
    captions = []
    if any(row.excluded for row in rows):
        captions.append("(−m): m problems left out, because their gold answers cannot be parsed")
    if any(score.problems != row.problems for row in rows for score in row.further_accuracy.values()):
        captions.append("(m): accuracy over only m problems")
    if scored:
        captions.append("log-perplexity of the full cache's answers: nats per token")
    result.caption = "; ".join(captions) or None
    return result


def perplexity_table(rows: Sequence[Any]) -> Table:
    first = rows[0]
    behind = f"{first.completion_tokens} tokens decoded after {first.prompt_tokens}"
    result = Table(title=f"{first.pieces} pieces, {behind}; kept in percent; ± one standard error over pieces")
    differ = any(row.read_entries != row.peak_entries for row in rows)
    entries = ("held", "read") if differ else ("peak",)
    models = _models(rows)
    for name in (*models[:1], "cache", "nll a token, nats", "perplexity", "kept", *entries, "tok/s"):
        result.add_column(name, justify="left" if name in ("model", "cache") else "right", no_wrap=True)
    for row, cache in zip(rows, cache_labels(rows), strict=True):
        result.add_row(
            *([escape(model_label(row.model))] if models else []),
            escape(cache),
            _nats(row.nll, row.standard_error),
            "–" if row.perplexity is None else f"{row.perplexity:.2f}",
            _percent(row.retention),
            str(row.peak_entries),
            *([str(row.read_entries)] if differ else []),
            f"{row.tokens_per_second:.0f}",
        )
    return result


def _models(rows: Sequence[Any]) -> list[str]:
    """Return ["model"], the name of the column, if the rows are of several models, else an empty list."""
    return ["model"] if len({row.model for row in rows}) > 1 else []


def model_label(model: str) -> str:
    """Return a short name of a model: the name of its directory, or of its run's directory."""
    path = Path(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def cache_labels(rows: Sequence[Any]) -> list[str]:
    """Return a label of each row's cache: policy, size, and parameters in which rows of that policy and size differ."""
    sizes = [row.budget or row.parameters.get("ratio") for row in rows]
    labels = [row.policy + (f" {size}" if size else "") for row, size in zip(rows, sizes, strict=True)]
    result = []
    for row, label in zip(rows, labels, strict=True):
        alike = [other.parameters for other, other_label in zip(rows, labels, strict=True) if other_label == label]
        differ = [key for key, value in row.parameters.items() if any(one.get(key) != value for one in alike)]
        result.append(label + "".join(f", {key} {row.parameters[key]}" for key in differ))
    return result


def _further(row: Any, name: str) -> str:
    """Format the accuracy by a further score, with the number of scored problems if it differs from `row.problems`."""
    score = row.further_accuracy[name]
    count = "" if score.problems == row.problems else f" ({score.problems})"
    return _percent(score.accuracy, score.standard_error) + count


def _nats(value: float | None, error: float | None) -> str:
    return "–" if value is None else f"{value:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _percent(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
