"""The clock and the table that the benchmarks in CPU seconds share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import Rows


def seconds(work: Callable[[], Any], runs: int) -> float:
    """CPU seconds of this process, the least of some runs: other work on the machine counts little."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def show(title: str, rows: Rows, keys: int) -> None:
    """Print a table of rows, whose first `keys` columns say of what; the next is what the others are compared with."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        names = list(row)
        cells = [f"{row[name]:.3g} ({row[name] / row[names[keys]]:.2g} ×)" for name in names[keys:]]
        table.add_row(*(str(row[name]) for name in names[:keys]), *cells)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
