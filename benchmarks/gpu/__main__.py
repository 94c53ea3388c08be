"""Measures everything on a GPU, and writes a report. The project need not be installed.

    python -m benchmarks.gpu                          # 95 minutes on an H100; writes runs/gpu/results.json and .md
    python -m benchmarks.gpu --minutes 45             # leaves out what does not fit
    python -m benchmarks.gpu --resume runs/gpu/results.json     # continues an interrupted call, on any machine
    python -m benchmarks.gpu --device cpu --small     # all stages in a small form on a CPU: tests that they run

Each stage (stages.py) runs in a process of its own with a time limit, and its rows are saved as they come. A stage that
fails, hangs or is killed is reported, and the other stages run. A stage's status is done, cut, failed, not run or
running; it remains running if the whole command is killed. A row's `call` is an index in `calls`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import FAILURE, STAGES, Options, Row, Stage, run_stage

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# Triton interprets its kernels, and nothing is compiled: for small sizes compilation takes too long.
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
NEW: Row = {"status": "not run", "reason": "not reached", "seconds": 0.0, "log": []}


def main(arguments: Sequence[str], stages: Sequence[Stage] = STAGES, machine: str = "stages describe") -> None:
    """Run the command. It ends well if the report is written, even if stages failed.

    stages : all stages, the most important ones first
    machine : place of the stage that runs at the start of each call and describes the machine
    """
    names = [stage.name for stage in stages]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to test the stages")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="leave out stages that do not fit into it")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue from these results")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default="runs/gpu/results.json", help="%(default)s if absent"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="STAGE", default=names, help=", ".join(names))
    options = parser.parse_args(arguments)
    file = (options.resume or options.out).absolute()
    content: Row = {"device": options.device, "small": options.small, "calls": [], "stages": {}}
    if options.resume:
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--resume: {file} cannot be read: {error}")
    elif file.exists():
        parser.error(f"--out: {file} exists; continue it with --resume {file}, or name another file")
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda number, _: sys.exit(128 + number))
    os.environ.update(OFFLINE | (ON_CPU if content["device"] == "cpu" else {}))
    run(file, content, stages, options, machine)


def run(file: Path, content: Row, stages: Sequence[Stage], options: argparse.Namespace, machine: str) -> None:
    """Run the stages, and save each row at once. Stages that an earlier call began and did not complete run last: one
    may have ended that call. Their rows remain, except failed rows.
    """
    end, call = time.monotonic() + 60 * options.minutes, Row()
    given = Options(content["device"], content["small"])
    outcome = run_stage(machine, given, 120, call.update)
    content["calls"].append(call | ({"not known": outcome["reason"]} if outcome["reason"] else {}))
    held_by = content["stages"] = {stage.name: {**NEW, "rows": []} for stage in stages} | content["stages"]
    named, begun = len(options.only) < len(stages), ("running", "cut", "failed")

    def add(rows: list[Row], row: Row) -> None:
        rows.append({**row, "call": len(content["calls"]) - 1})
        save(file, content)

    try:
        for stage in sorted(stages, key=lambda stage: held_by[stage.name]["status"] in begun):
            held, left = held_by[stage.name], (end - time.monotonic()) / 60
            if stage.name not in options.only or (held["status"] == "done" and not named):
                continue
            if missing := [library for library in stage.needs if importlib.util.find_spec(library) is None]:
                held["reason"] = f"not installed: {', '.join(missing)}"
            elif stage.minutes > 2 * left:
                held["reason"] = f"left out: it needs about {stage.minutes:g} minutes, and {max(left, 0):.1f} are left"
            else:
                earlier = [row for row in held["rows"] if FAILURE not in row] if held["status"] != "done" else []
                held |= {"status": "running", "reason": "the command was ended during this stage", "rows": [*earlier]}
                save(file, content)
                start, seconds = time.monotonic(), 60 * min(stage.limit, left)
                held |= run_stage(stage.place, replace(given, earlier=earlier), seconds, partial(add, held["rows"]))
                held["seconds"] += time.monotonic() - start
            print(f"{stage.name}: {held['status']}, {len(held['rows'])} rows. {held['reason']}", flush=True)
    finally:
        save(file, content)
        print(f"results: {file}\nreport: {write_report(file, content)}", flush=True)


def save(file: Path, content: Row) -> None:
    """Write the results so that they are whole on disk at every moment."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(content, indent=1, default=str) + "\n")
    os.replace(new, file)


def write_report(file: Path, content: dict[str, Any]) -> Path:
    """Write the report beside the results, and return its path."""
    parts = [f"# Measurements on {content['device']}{', small sizes: not for speed' * content['small']}"]
    stages = content["stages"].items()
    parts.append(table([{"stage": n, "result": verdict(s), "seconds": round(s["seconds"])} for n, s in stages]))
    for name, stage in stages:
        parts.append(f"## {name}\n\nResult: {verdict(stage)}.")
        parts += [table(stage["rows"])] * bool(stage["rows"])
        parts += ["Last lines that the stage printed:\n\n    " + "\n    ".join(stage["log"])] * bool(stage["log"])
    for number, call in enumerate(content["calls"]):
        rows = [{"topic": topic, "finding": finding} for topic, finding in call.items()]
        parts.append(f"## Call {number}: machine and versions\n\n{table(rows)}")
    place = file.with_suffix(".md")
    place.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return place


def verdict(stage: dict[str, Any]) -> str:
    """Return the result of a stage in a few words."""
    rows, status, reason = stage["rows"], stage["status"], stage["reason"]
    failed = sum(FAILURE in row for row in rows)
    if failed == len(rows):
        return f"not run: {reason or 'all rows failed'}"
    partly = f"; {failed} of {len(rows)} rows failed" if failed else ""
    tests = Counter(row["outcome"] for row in rows if "outcome" in row)
    counts = "".join(f", {number} {outcome}" for outcome, number in tests.items())
    return f"{status}{f' after {len(rows)} rows: {reason}' if reason else ''}{partly}{counts}"


def table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table, whose columns are the keys in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(shown(row.get(column, '')) for column in columns)} |" for row in rows)])


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


if __name__ == "__main__":
    main(sys.argv[1:])
