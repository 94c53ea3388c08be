"""Corrects the advantages in TRL's table of the last completions, `_logs`, and saves the table in checkpoints.

A column of the table is a deque with the values of one generation. The entries `rewards` and `extra` are dicts of
columns; reward functions write to `extra` with `log_extra`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_rl.errors import UserError

PLAIN = (str, bytes, int, float, bool, type(None))
KEPT = ("prompt", "completion", "advantages", "rewards", "extra")


def show_advantages(logs: dict[str, Any], advantages: Sequence[float]) -> None:
    """Overwrite the advantages that TRL has written for the last rows. advantages : of all processes"""
    column = logs["advantages"]
    before = list(column)[: -len(advantages)]
    column.clear()
    column.extend([*before, *advantages])


def plain_values(column: str, values: Sequence[Any]) -> list[Any]:
    """Convert values that a reward function logs in `column` to plain data. Raise UserError if that is impossible."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        value = value.item() if hasattr(value, "item") else value  # a NumPy or torch number
        if not isinstance(value, PLAIN):
            wrong = f"log_extra takes numbers, strings, None and lists of them, got {type(value).__name__}"
            raise UserError(f"{wrong} in the column {column!r}")
        return value

    return [plain(value) for value in values]


def table_state(logs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {inner: list(values) for inner, values in logs[name].items()}
        if isinstance(logs[name], dict)
        else list(logs[name])
        for name in KEPT
    }


def load_table(logs: dict[str, Any], state: dict[str, Any]) -> None:
    for name, kept in state.items():
        if isinstance(kept, dict):
            for inner, values in kept.items():
                logs[name][inner].extend(values)
        else:
            logs[name].extend(kept)
