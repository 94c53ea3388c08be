"""TRL's table of the last completions, `_logs`: what is shown in it, and what of it a checkpoint keeps.

A column is a deque that holds one generation; `rewards` and `extra` (what rewards log with `log_extra`) hold columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_rl.errors import UserError

PLAIN = (str, bytes, int, float, bool, type(None))
KEPT = ("prompt", "completion", "advantages", "rewards", "extra")


def show_advantages(logs: dict[str, Any], advantages: Sequence[float]) -> None:
    """Replace the advantages of the last rows, which TRL has written, by these, of all processes."""
    column = logs["advantages"]
    before = list(column)[: -len(advantages)]
    column.clear()
    column.extend([*before, *advantages])


def plain_values(column: str, values: Sequence[Any]) -> list[Any]:
    """The values of a reward's own column as plain data, which a checkpoint can hold. Raises UserError for others."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        value = value.item() if hasattr(value, "item") else value  # a number of NumPy's, or of torch's
        if not isinstance(value, PLAIN):
            wrong = f"log_extra takes numbers, texts, None and lists of them, got {type(value).__name__}"
            raise UserError(f"{wrong} in the column {column!r}")
        return value

    return [plain(value) for value in values]


def table_state(logs: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of the table, for `load_table`."""
    return {
        name: {inner: list(values) for inner, values in logs[name].items()}
        if isinstance(logs[name], dict)
        else list(logs[name])
        for name in KEPT
    }


def load_table(logs: dict[str, Any], state: dict[str, Any]) -> None:
    """Take up what `table_state` returned."""
    for name, kept in state.items():
        if isinstance(kept, dict):
            for inner, values in kept.items():
                logs[name][inner].extend(values)
        else:
            logs[name].extend(kept)
