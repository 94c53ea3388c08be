"""Files of results: the numbers of a benchmark, with the command, commit, date and machine that produced them.

python benchmarks/results.py     # prints a table of all result files
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]
HOUSE = Path(__file__).parents[1]
RESULTS = HOUSE / "benchmarks/results"
MEASURED = ("sparse_rl", "rollout", "trainer", "rewards", "recipes", "benchmarks/*.py")  # what a number may depend on


@dataclass(frozen=True)
class Case:
    """One table of results.

    make : function from a size to name -> number, or -> function without arguments, whose seconds are measured
    columns : names of a size's parts
    sizes : one for each row, the smallest first
    clock : seconds of this process by default, which other work on the machine hardly changes
    """

    make: Callable[..., Mapping[str, Any]]
    columns: tuple[str, ...]
    sizes: Sequence[tuple[Any, ...]]
    clock: Callable[[], float] = time.process_time

    def row(self, size: tuple[Any, ...], runs: int) -> dict[str, Any]:
        """Return a size, its numbers and the median of the seconds of each function, after a warm-up."""
        made = dict(self.make(*size))
        times: dict[str, list[float]] = {name: [] for name, work in made.items() if callable(work)}
        for _ in range(runs + 1):
            for name, seconds in times.items():
                start = self.clock()
                made[name]()
                seconds.append(self.clock() - start)
        medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
        return {**dict(zip(self.columns, size, strict=True)), **made, **medians}


def measure_cases(cases: Mapping[str, Case], about: str) -> None:
    """Measure the cases that the command line names. Each is printed, and written to benchmarks/results/NAME.json."""
    import torch

    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=cases, metavar="CASE", help=", ".join(cases))
    parser.add_argument("--runs", type=int, default=5, help="repetitions of a timing")
    parser.add_argument("--small", action="store_true", help="one run of the smallest size, which is not written")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    for name in options.cases:
        case, rows = cases[name], Rows()
        for size in case.sizes[:1] if options.small else case.sizes:
            rows.append(case.row(size, 1 if options.small else options.runs))
            print(json.dumps(rows[-1], default=str), flush=True)
        show(name, rows)
        if not options.small:
            write(RESULTS / f"{name}.json", rows=rows)


def write(out: Path, **content: Any) -> None:
    """Write the results to `out`, with the description of the measurement under `measured`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"measured": measured(), **content}, indent=2) + "\n")


def measured() -> dict[str, str]:
    """Return command, commit (with + if files differ from it), date, machine and torch version of this process."""
    import torch

    from sparse_rl.commands.bench_runs import processor

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


def show(title: str, rows: Rows) -> None:
    """Print rows as a table, whose columns are their keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=title)
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def provenance(folder: Path = RESULTS) -> str:
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
