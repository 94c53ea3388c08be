"""Tables that the terminal shows, as HTML: a report shows the same ones."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from sparse_rl.analysis.report.page import heading, note, table


def from_terminal(shown: Table, where: str = "") -> str:
    """Return a table of the terminal as HTML, with its title and caption.

    where : source of the numbers, which tells tables with the same title apart
    """
    columns = [[_plain(cell) for cell in column.cells] for column in shown.columns]
    names = [_plain(column.header).replace("-\n", "").replace("\n", " ") for column in shown.columns]
    left = [name for name, column in zip(names, shown.columns, strict=True) if column.justify != "right"]
    title = _plain(shown.title)
    parts = [
        heading(title) if title else "",
        table(names, list(zip(*columns, strict=True)), f"{title} {where}".strip() or "table", left),
    ]
    return "".join(parts) + (note(_plain(shown.caption)) if shown.caption else "")


def _plain(cell: Any) -> str:
    if isinstance(cell, Text):
        return cell.plain
    return "" if cell is None else Text.from_markup(str(cell)).plain
