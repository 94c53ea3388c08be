"""Measures everything on a GPU, and writes a report. The project need not be installed.

    python -m benchmarks.gpu                          # 75 minutes on an H100; writes runs/gpu/results.json and .md
    python -m benchmarks.gpu --minutes 45             # leaves out the last stages, which matter least
    python -m benchmarks.gpu --resume runs/gpu/results.json     # continues an interrupted call, on any machine
    python -m benchmarks.gpu --device cpu --small     # all stages in a small form on a CPU: tests that they run

Each stage (stages.py) runs in a process of its own with a time limit, and its rows are saved as they come. A stage that
fails, hangs or is killed is reported, and the other stages run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.process import Outcome, run_stage
from benchmarks.gpu.record import Record
from benchmarks.gpu.report import write_report
from benchmarks.gpu.stages import STAGES, Stage
from benchmarks.gpu.worker import Row

OUT = Path("runs/gpu/results.json")
ENVIRONMENT = "benchmarks.gpu.environment:describe"
ENVIRONMENT_LIMIT = 120.0  # seconds


def main(arguments: Sequence[str], stages: Sequence[Stage] = STAGES, environment: str = ENVIRONMENT) -> int:
    """Run the command, and return its exit status: 0 if the report is written, even if stages failed.

    stages : all stages, the most important ones first
    environment : "module:name" of the stage that runs at the start of each call and describes the machine
    """
    parser = _parser(stages)
    options = parser.parse_args(arguments)
    if options.report is not None:
        print(f"report: {write_report(Record.load(options.report), stages)}")
        return 0
    record = _record(options, parser)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda number, _: sys.exit(128 + number))
    start = time.monotonic()
    _describe(record, environment, options)
    try:
        _run_all(record, stages, options, start)
    finally:
        place = write_report(record, stages)
    print(f"results: {record.file}\nreport: {place}", flush=True)
    return 0


def _parser(stages: Sequence[Stage]) -> argparse.ArgumentParser:
    names = [stage.name for stage in stages]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda, or the device of the resumed results")
    parser.add_argument("--small", action="store_true", help="small sizes, to test the stages")
    parser.add_argument("--minutes", type=float, help="leave out stages that do not fit into this time")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue from these results")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"results; default: the resumed file, or {OUT}")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="recorded traces (*.safetensors) for attention")
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="STAGE", help=f"run only these stages: {', '.join(names)}"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report of these results; run nothing")
    return parser


def _record(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Record:
    """Return the results to continue from, or new results. Ends the command with a message if arguments disagree."""
    if options.trace is not None and not options.trace.is_dir():
        parser.error(f"--trace: {options.trace} is not a folder")
    if options.resume is None:
        out = options.out or OUT
        if out.exists():
            parser.error(f"--out: {out} exists; continue it with --resume {out}, or name another file")
        options.device = options.device or "cuda"
        return Record.new(out.absolute(), options.device, options.small)
    try:
        record = Record.load(options.resume)
    except (OSError, ValueError) as error:
        parser.error(f"--resume: {options.resume} cannot be read: {error}")
    held, options.device = record.content, options.device or record.content["device"]
    if (options.device, options.small or held["small"]) != (held["device"], held["small"]):
        size = "small" if held["small"] else "full"
        parser.error(f"--resume: {options.resume} has {size} sizes on {held['device']}; use the same, or no --resume")
    options.small = held["small"]
    record.file = (options.out or options.resume).absolute()
    return record


def _describe(record: Record, environment: str, options: argparse.Namespace) -> None:
    """Begin a call: enter the machine and the versions into the record."""
    rows: list[Row] = []
    given: dict[str, Any] = {"device": options.device, "small": options.small, "limit": ENVIRONMENT_LIMIT}
    outcome = run_stage(environment, on_row=rows.append, **given)
    findings = {row["topic"]: row["finding"] for row in rows if "topic" in row}
    if outcome.status != "done":
        findings["environment"] = f"not known: {outcome.reason}"
    measured = next((row["measured"] for row in rows if "measured" in row), {})
    command = " ".join(["python -m benchmarks.gpu", *(["--small"] * options.small)])
    record.begin_call({**measured, "command": f"{command} --device {options.device}"}, findings)


def _run_all(record: Record, stages: Sequence[Stage], options: argparse.Namespace, start: float) -> None:
    """Run the stages. Stages that an earlier call began and did not complete run last: one may have ended that call."""
    for stage in stages:
        record.stage(stage.name)
    begun = {stage.name for stage in stages if record.interrupted(stage.name)}
    for number, stage in enumerate(sorted(stages, key=lambda stage: stage.name in begun), 1):
        outcome = _run_one(record, stage, options, start)
        if outcome is not None:
            held = record.stage(stage.name)
            words = f"{held['status']}, {len(held['rows'])} rows, {outcome.seconds:.0f} s"
            why = f": {held['reason']}" if held["reason"] else ""
            print(f"[{number}/{len(stages)}] {stage.name}: {words}{why}", flush=True)


def _run_one(record: Record, stage: Stage, options: argparse.Namespace, start: float) -> Outcome | None:
    """Run one stage if it is wanted and possible, else return None."""
    if options.only is not None and stage.name not in options.only:
        record.leave_out(stage.name, "left out by --only")
        return None
    if (reason := record.wants(stage.name, options.only is not None)) is not None:
        print(f"{stage.name}: not run again, {reason}", flush=True)
        return None
    left = float("inf") if options.minutes is None else options.minutes - (time.monotonic() - start) / 60
    if missing := stage.missing():
        reason = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    elif stage.minutes > left:
        have = f"{max(left, 0):.1f} of {options.minutes:g} minutes are left"
        reason = f"left out: {have}, and it needs about {stage.minutes:g}"
    if reason is not None:
        record.leave_out(stage.name, reason)
        print(f"{stage.name}: {reason}", flush=True)
        return None
    earlier = record.begin(stage.name)
    outcome = run_stage(
        stage.function,
        device=options.device,
        small=options.small,
        limit=60 * min(stage.limit, left),
        on_row=lambda row: record.add(stage.name, row),
        trace=options.trace and options.trace.absolute(),
        folder=record.file.parent,
        earlier=earlier,
    )
    record.end(stage.name, outcome, len(earlier))
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
