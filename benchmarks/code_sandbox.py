"""The reward `code` under attack, and its speed: hostile programs among honest ones, and programs per second.

At least 1,000 hostile programs of 25 classes and 200 honest ones (tests/rewards/hostile_programs.py) run 8 at a time.
Counted are hostile programs that score, honest ones with a wrong verdict, tests that outlive their limit by a second,
and what is left: processes, files, signals to the parent, leaked secrets, memory of the parent. Then honest programs
run alone, 1, 2 and 8 at a time. A program with one test costs two forks, and three with statements; the same program
in a Python started by subprocess.run is measured beside it.

    OMP_NUM_THREADS=1 python benchmarks/code_sandbox.py      # writes benchmarks/results/code_sandbox.json
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    sys.path.insert(1, str(Path(__file__).parents[1] / "tests/rewards"))

from hostile_programs import besiege, fenced, honest_cases, hostile_cases
from rich.console import Console
from rich.table import Table

from benchmarks.results import write
from rewards.code import CodeReward

ROUNDS = 3
TRIVIAL = "a, b = map(int, input().split())\nprint(a + b)"
TEST = {"input": "1 2\n", "output": "3\n"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-class", type=int, default=45, help="hostile programs of each class, at least")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds of processor time for one test")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/code_sandbox.json")
    options = parser.parse_args()
    siege = attack(options.per_class, options.timeout)
    speeds = [speed(workers) for workers in (1, 2, 8)]
    alone = statistics.median(started_alone() for _ in range(20))
    show(siege, speeds, alone)
    write(options.out, siege=siege, speeds=speeds, milliseconds_of_subprocess_run=1000 * alone)


def attack(per_class: int, timeout: float) -> dict[str, object]:
    """Run the siege, and return counts of everything that it found."""
    with tempfile.TemporaryDirectory() as folder:
        victim = Path(folder) / "victim"
        hostile, honest = list(hostile_cases(per_class, str(victim))), list(honest_cases())
        cases = [*hostile, *honest]
        random.Random(0).shuffle(cases)
        findings = besiege(cases, victim, timeout, workers=8)
    return {
        "hostile": len(hostile), "classes": len({case.label for case in hostile}), "honest": len(honest),
        "wrong_verdicts": len(findings.wrong), "late": len(findings.late), "processes_left": len(findings.processes),
        "files_left": len(findings.files), "signals": len(findings.signals), "leaks": len(findings.leaked),
        "parent_growth_mb": findings.growth / 2**20, "seconds": findings.seconds,
        "programs_per_second": len(cases) / findings.seconds, "details": findings.broken,
    }  # fmt: skip


def speed(workers: int) -> dict[str, float]:
    """Return programs per second: right programs with one test, of each kind, on warm workers."""
    reward = CodeReward(workers=workers)
    cases = [case for case in honest_cases(600) if case.reward == 1 and "sleep" not in case.program]
    row: dict[str, float] = {"workers": workers}
    for name, place in (("stdin", 0), ("functional", 1), ("statements", 2)):
        chosen = [case for case in cases if int(case.program.rpartition("# ")[2]) % 3 == place][:90]
        texts, tests = [fenced(case.program) for case in chosen], [first(case.tests) for case in chosen]
        rates = []
        for _ in range(ROUNDS + 1):  # the first round starts the workers
            start = time.perf_counter()
            assert reward(texts, tests=tests) == [1.0] * len(texts)
            rates.append(len(texts) / (time.perf_counter() - start))
        row[name] = statistics.median(rates[1:])
    return row


def first(tests: object) -> object:
    """Return tests with only the first of them."""
    if isinstance(tests, dict):
        return {key: value[:1] if isinstance(value, list) else value for key, value in tests.items()}
    return tests[:1]  # type: ignore[index]


def started_alone() -> float:
    """Return the seconds of a small program in a Python of its own, without a sandbox."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-c", TRIVIAL], input=TEST["input"], text=True, capture_output=True)
    return time.perf_counter() - start


def show(siege: dict[str, object], speeds: list[dict[str, float]], alone: float) -> None:
    console = Console(width=110)
    table = Table("siege", "")
    for key, value in siege.items():
        table.add_row(key, f"{value:.1f}" if isinstance(value, float) else str(value))
    console.print(table)
    table = Table("programs per second, at a time", "stdin", "functional", "statements")
    for row in speeds:
        table.add_row(f"{row['workers']:g}", *(f"{row[key]:.0f}" for key in ("stdin", "functional", "statements")))
    console.print(table)
    console.print(f"subprocess.run of a Python without a sandbox: {1000 * alone:.0f} ms")


if __name__ == "__main__":
    main()
