"""Measures everything on a GPU, and writes a report. The project need not be installed.

    python -m benchmarks.gpu                          # 75 minutes on an H100; writes runs/gpu/results.json and .md
    python -m benchmarks.gpu --minutes 45             # leaves out the last stages, which matter least
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import write_report
from benchmarks.gpu.stages import ENVIRONMENT, STAGES, Stage
from benchmarks.gpu.worker import FAILURE, Options, Row, run_stage

OUT = Path("runs/gpu/results.json")
FORMAT = 2
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# Triton interprets its kernels, and nothing is compiled: for small sizes compilation takes too long.
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


class Results:
    """The results of all calls. Every change is on disk when the method returns."""

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        self.file, self.content, self.stages = file, content, content["stages"]

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_name(f"{self.file.name}.new")
        new.write_text(json.dumps(self.content, indent=1, default=str) + "\n")
        os.replace(new, self.file)

    def run(self, stage: Stage, seconds: float) -> None:
        """Run a stage for at most `seconds`. Rows of an earlier call that was cut remain, except failed rows."""
        held = self.stages[stage.name]
        earlier = [] if held["status"] == "done" else [row for row in held["rows"] if FAILURE not in row]
        held |= {"status": "running", "reason": "the command was ended during this stage", "rows": list(earlier)}
        self.save()
        options, start = Options(self.content["device"], self.content["small"], earlier), time.monotonic()

        def add(row: Row) -> None:
            held["rows"].append({**row, "call": len(self.content["calls"]) - 1})
            self.save()

        outcome = run_stage(stage.function, options, seconds, add)
        if outcome["reason"] == "ended without a row" and earlier:  # earlier calls had measured them all
            outcome = {"status": "done", "reason": "", "log": []}
        held |= outcome | {"seconds": held["seconds"] + time.monotonic() - start}
        self.save()


def main(arguments: Sequence[str], stages: Sequence[Stage] = STAGES, environment: str = ENVIRONMENT) -> int:
    """Run the command, and return 0 if the report is written, even if stages failed.

    stages : all stages, the most important ones first
    environment : "module:name" of the stage that runs at the start of each call and describes the machine
    """
    names = [stage.name for stage in stages]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to test the stages")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="leave out stages that do not fit into it")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="continue from these results")
    parser.add_argument("--out", type=Path, metavar="FILE", default=OUT, help=f"results; default: {OUT}")
    parser.add_argument("--only", nargs="+", choices=names, metavar="STAGE", default=names, help=", ".join(names))
    options = parser.parse_args(arguments)
    if options.resume is not None:
        try:
            results = Results(options.resume.absolute(), json.loads(options.resume.read_text()))
            if results.content["format"] != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--resume: {options.resume} cannot be read: {error}")
    elif options.out.exists():
        parser.error(f"--out: {options.out} exists; continue it with --resume {options.out}, or name another file")
    else:
        given = {"format": FORMAT, "device": options.device, "small": options.small}
        results = Results(options.out.absolute(), {**given, "calls": [], "stages": {}})
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda number, _: sys.exit(128 + number))
    os.environ.update(OFFLINE | (ON_CPU if results.content["device"] == "cpu" else {}))
    run(results, stages, options, environment)
    return 0


def run(results: Results, stages: Sequence[Stage], options: argparse.Namespace, environment: str) -> None:
    """Run the stages. Stages that an earlier call began and did not complete run last: one may have ended that call."""
    end, call = time.monotonic() + 60 * options.minutes, dict[str, Any]()
    outcome = run_stage(environment, Options(results.content["device"], results.content["small"]), 120, call.update)
    results.content["calls"].append(call | ({"not known": outcome["reason"]} if outcome["reason"] else {}))
    new = {"status": "not run", "reason": "not reached", "seconds": 0.0, "log": []}
    for stage in stages:
        results.stages.setdefault(stage.name, {**new, "rows": []})
    named, begun = len(options.only) < len(stages), ("running", "cut", "failed")
    try:
        for stage in sorted(stages, key=lambda stage: results.stages[stage.name]["status"] in begun):
            held, left = results.stages[stage.name], (end - time.monotonic()) / 60
            if stage.name not in options.only or (held["status"] == "done" and not named):
                continue
            if missing := [library for library in stage.needs if importlib.util.find_spec(library) is None]:
                held["reason"] = f"not installed: {', '.join(missing)}"
            elif stage.minutes > left:
                held["reason"] = f"left out: it needs about {stage.minutes:g} minutes, and {max(left, 0):.1f} are left"
            else:
                results.run(stage, 60 * min(stage.limit, left))
            print(f"{stage.name}: {held['status']}, {len(held['rows'])} rows. {held['reason']}", flush=True)
    finally:
        results.save()
        print(f"results: {results.file}\nreport: {write_report(results.file, results.content)}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
