"""What the benchmarks that count CPU seconds share: the clock, the table, and the file of results."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]


def seconds(work: Callable[[], Any], runs: int) -> float:
    """CPU seconds of this process, the least of some runs: other work on the machine counts little."""
    found = []
    for _ in range(runs):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


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


def write(out: Path, **found: Any) -> None:
    """The rows by name, and the machine."""
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine, **found}, indent=2) + "\n")
