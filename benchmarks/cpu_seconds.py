"""Timing in CPU seconds, and a table of timings, for several benchmarks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import Rows


def seconds(work: Callable[[], Any], runs: int) -> float:
    """Return the minimum CPU seconds of this process over some runs. Other work on the machine hardly changes them."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def show(title: str, rows: Rows, keys: int) -> None:
    """Print a table. The first `keys` columns describe a row; the rest are timings, also as multiples of the first."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        names = list(row)
        cells = [f"{row[name]:.3g} ({row[name] / row[names[keys]]:.2g} ×)" for name in names[keys:]]
        table.add_row(*(str(row[name]) for name in names[:keys]), *cells)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
