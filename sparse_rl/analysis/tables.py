"""Tables of results, for the terminal, and short names of models and caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from sparse_rl.methods.config import budget_words


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] | None = None, **style: Any
) -> Table:
    """Return a table of texts, in which no markup is read. Columns are aligned to the right, but those named in `left`,
    or by default the first one. A row may be shorter than the headings.
    """
    left = headings[:1] if left is None else left
    result = Table(title=escape(title), **{"title_justify": "left", **style})
    for name in headings:
        result.add_column(escape(name), justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        result.add_row(*map(escape, row))
    return result


def accuracy_table(rows: Sequence[Any]) -> Table:
    largest = max((k for row in rows for k in row.pass_at_k), default=1)
    further = list(dict.fromkeys(name for row in rows for name in row.further_accuracy))
    scored = any(row.log_perplexity is not None for row in rows)
    contexts = any(row.contexts for row in rows)
    columns = [*_models(rows), ("task", [row.task for row in rows]), ("cache", cache_labels(rows))]
    counts = [f"{row.problems}×{row.samples}" + (f" (−{row.excluded})" if row.excluded else "") for row in rows]
    columns += [("n", counts), ("pass@1", [_percent(row.accuracy, row.standard_error) for row in rows])]
    if largest > 1:
        cells = [_percent(row.pass_at_k.get(largest), row.pass_at_k_error.get(largest)) for row in rows]
        columns.append((f"pass@{largest}", cells))
    columns += [(name, [_further(row, name) for row in rows]) for name in further]
    if scored:
        columns.append(("log-\nperplexity", [_nats(row.log_perplexity, row.log_perplexity_error) for row in rows]))
    columns += [
        ("kept", [_percent(row.retention) for row in rows]),
        ("kept if\nright", [_percent(row.retention_correct) for row in rows]),
        *_entries(rows),
        ("tokens", [f"{row.length:.0f}" for row in rows]),
        ("cut\noff", [_percent(row.truncated) for row in rows]),
        ("tok/s", [f"{row.tokens_per_second:.0f}" for row in rows]),
    ]
    if any(getattr(row, "turns", None) for row in rows):
        talks = [(row.turns, row.tool_failures) if getattr(row, "turns", None) else None for row in rows]
        columns.append(("turns", [f"{talk[0]:.1f}" if talk else "–" for talk in talks]))
        columns.append(("calls\nfailed", [f"{talk[1]:.2f}" if talk else "–" for talk in talks]))
    if contexts:
        columns.append(("context", [f"{row.contexts.bytes / 1e6:.1f} MB" for row in rows]))
        columns.append(("made in", [f"{sum(row.contexts.seconds.values()):.1f} s" for row in rows]))
    captions = []
    if any(row.excluded for row in rows):
        captions.append("(−m): m problems left out, because their gold answers cannot be parsed")
    if any(score.problems != row.problems for row in rows for score in row.further_accuracy.values()):
        captions.append("(m): accuracy over only m problems")
    if scored:
        captions.append("log-perplexity of the full cache's answers: nats per token")
    title = "accuracy: completions with reward >= 1; all shares in percent; ± one standard error over problems"
    narrow = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True, "title_justify": "center"}
    return _of_columns(title, columns, caption="; ".join(captions) or None, **narrow)  # fits into 100 columns


def perplexity_table(rows: Sequence[Any]) -> Table:
    behind = f"{rows[0].completion_tokens} tokens decoded after {rows[0].prompt_tokens}"
    columns = [
        *_models(rows),
        ("cache", cache_labels(rows)),
        ("nll a token, nats", [_nats(row.nll, row.standard_error) for row in rows]),
        ("perplexity", ["–" if row.perplexity is None else f"{row.perplexity:.2f}" for row in rows]),
        ("kept", [_percent(row.retention) for row in rows]),
        *_entries(rows),
        ("tok/s", [f"{row.tokens_per_second:.0f}" for row in rows]),
    ]
    title = f"{rows[0].pieces} pieces, {behind}; kept in percent; ± one standard error over pieces"
    return _of_columns(title, columns, title_justify="center")


Column = tuple[str, list[str]]  # heading, cells


def _of_columns(title: str, columns: Sequence[Column], **style: Any) -> Table:
    rows = zip(*(cells for _, cells in columns), strict=True)
    return table(title, [name for name, _ in columns], rows, ("model", "task", "cache"), **style)


def _models(rows: Sequence[Any]) -> list[Column]:
    several = len({row.model for row in rows}) > 1
    return [("model", [model_label(row.model) for row in rows])] if several else []


def _entries(rows: Sequence[Any]) -> list[Column]:
    """Return the column of the most entries of a kv head; of those held and of those read, if they differ. If a budget
    grows, a further column has their mean.
    """
    held, read = ([str(getattr(row, name)) for row in rows] for name in ("peak_entries", "read_entries"))
    columns = [("peak", held)] if held == read else [("held", held), ("read", read)]
    if any(isinstance(row.parameters.get("budget"), dict) for row in rows):
        columns.append(("mean", ["–" if row.mean_entries is None else f"{row.mean_entries:.0f}" for row in rows]))
    return columns


def model_label(model: str) -> str:
    """Return a short name of a model: the name of its directory, or of its run's directory."""
    path = Path(model)
    return path.parent.name if path.name == "model" and path.parent.name else path.name


def cache_labels(rows: Sequence[Any]) -> list[str]:
    """Return a label of each row's cache: policy, size, and parameters in which rows of that policy and size differ."""
    sizes = [budget_words(row.parameters.get("budget")) or row.parameters.get("ratio") for row in rows]
    labels = [row.policy + (f" {size}" if size else "") for row, size in zip(rows, sizes, strict=True)]
    result = []
    for row, label in zip(rows, labels, strict=True):
        alike = [other.parameters for other, other_label in zip(rows, labels, strict=True) if other_label == label]
        differ = [key for key, value in row.parameters.items() if any(one.get(key) != value for one in alike)]
        result.append(label + "".join(f", {key} {_short(row.parameters[key])}" for key in differ))
    return result


def _short(value: Any) -> str:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return " ".join(map(str, values))


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
