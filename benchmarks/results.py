"""Files of results: the numbers of a benchmark, with the command, commit, date and machine that produced them.

python benchmarks/results.py     # prints the table of all result files for docs/benchmarks.md
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]
HOUSE = Path(__file__).parents[1]
MEASURED = ("sparse_rl", "rollout", "trainer", "rewards", "recipes", "benchmarks/*.py")  # what a number may depend on


def write(out: Path, **found: Any) -> None:
    """Write the results to `out`, with the description of the measurement under `measured`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"measured": measured(), **found}, indent=2) + "\n")


def measured() -> dict[str, str]:
    """Return command, commit (with + if files differ from it), date, machine and torch version of this process."""
    import torch

    from sparse_rl.commands.machine import processor

    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    git = ("git", "-C", str(HOUSE))
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--", *MEASURED], capture_output=True, text=True).stdout
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    threads = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        "commit": (commit or "unknown") + "+" * bool(changed),
        "date": datetime.date.today().isoformat(),
        "machine": device,
        "threads": threads,
        "torch": torch.__version__,
    }


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values (one per seed or text) and its standard error, which is NaN for a single value."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.mean(values), error


def with_rows_before(out: Path, settings: dict[str, Any], rows: Rows, key: Callable[[dict[str, Any]], Any]) -> Rows:
    """Return `rows`, and the rows of the file `out` whose key no row of `rows` has.

    Exits if that file has other settings. Each new row gets its own commit and date, because rows of a file may differ
    in these.
    """
    if rows:
        how = measured()
        rows = [{**row, "commit": how["commit"], "date": how["date"]} for row in rows]
    if not out.exists():
        return rows
    content = json.loads(out.read_text())
    if content.get("settings") != json.loads(json.dumps(settings)):
        sys.exit(f"{out} was measured with other settings, {content.get('settings')}; remove this file, or set --out")
    return list({key(row): row for row in [*content["rows"], *rows]}.values())


def show(tables: Sequence[Table], markdown: bool) -> None:
    """Print tables for a terminal, or in Markdown for docs/benchmarks.md."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in tables:
        if not markdown:
            console.print(table)
            continue
        columns = [[str(cell) for cell in column.cells] for column in table.columns]
        print(f"{table.title}\n\n| {' | '.join(str(column.header) for column in table.columns)} |")
        print("|---" * len(columns) + "|")
        for cells in zip(*columns, strict=True):
            print(f"| {' | '.join(cells)} |")
        print()


def provenance(folder: Path = HOUSE / "benchmarks" / "results") -> str:
    """Return a Markdown table with a row for each file of results, with the commits and dates of all its rows."""
    lines = ["| results | command | commit | date | machine |", "|---|---|---|---|---|"]
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text())
        how, rows = content["measured"], content.get("rows", [])
        rows = [row for row in rows if isinstance(row, dict)] or [how]
        commits, dates = (sorted({row.get(name, how[name]) for row in rows}) for name in ("commit", "date"))
        when = f"{', '.join(commits)} | {', '.join(dates)}"
        lines.append(f"| {file.stem} | `{how['command']}` | {when} | {how['machine']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(provenance())
