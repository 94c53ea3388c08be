"""Runs one stage in a process group of its own, passes on its rows as they come, and ends all its processes.

A stage ends in one of these ways: done; cut (it reached its limit after some rows); failed (it raised, was killed,
reached its limit without a row, or gave no row); not run (it cannot measure anything here, and says why).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.worker import FAILURE, NOT_RUN, Row

HOUSE = Path(__file__).parents[2]
MARK = "SPARSE_RL_GPU_STAGE"  # variable that all processes of a stage inherit
POLL = 0.1  # seconds
LAST_LINES = 12


@dataclass(frozen=True)
class Outcome:
    """The end of a stage.

    status : done, cut, failed or not run
    reason : the cause in one line; empty if the stage is done
    seconds : duration
    stderr : last lines that the stage printed, if it was cut or failed
    """

    status: str
    reason: str
    seconds: float
    stderr: list[str]


def run_stage(
    function: str,
    *,
    device: str,
    small: bool,
    limit: float,
    on_row: Callable[[Row], None] = lambda row: None,
    trace: Path | None = None,
    folder: Path = Path("."),
    earlier: tuple[Row, ...] | list[Row] = (),
) -> Outcome:
    """Run the stage `function` ("module:name"), call `on_row` with each row, and return the outcome.

    limit : seconds after which the stage is ended
    trace, folder, earlier : fields of worker.Options
    """
    start, mark = time.monotonic(), uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="gpu_stage_") as temporary:
        rows_file, log = Path(temporary, "rows"), Path(temporary, "log")
        rows_file.touch()
        given: dict[str, Any] = {"function": function, "device": device, "small": small, "rows": str(rows_file)}
        given |= {"trace": trace and str(trace), "folder": str(folder), "earlier": list(earlier)}
        command = [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(given)]
        reader, timed_out = _Reader(rows_file, on_row), False
        with log.open("w") as stderr:
            process = subprocess.Popen(
                command, cwd=HOUSE, env=environment(device, mark), stdin=subprocess.DEVNULL, stdout=stderr,
                stderr=stderr, start_new_session=True,
            )  # fmt: skip
        try:
            while process.poll() is None:
                if time.monotonic() - start > limit:
                    timed_out = True
                    break
                time.sleep(POLL)
                reader.read()
        finally:
            end_all(mark, process)
        reader.read()
        status, reason = _judged(process.returncode, timed_out, limit, reader)
        text = log.read_text(errors="replace").replace(f"{HOUSE}/", "").replace(f"{sys.prefix}/", "")
        lines = text.splitlines()[-LAST_LINES:] if status in ("cut", "failed") else []
        if status == "failed" and not reason:
            reason = _last_error(lines)
        return Outcome(status, reason, time.monotonic() - start, lines)


def environment(device: str, mark: str) -> dict[str, str]:
    """Return the environment variables of a stage.

    On a CPU, Triton interprets its kernels, and nothing is compiled: for small sizes compilation takes too long.
    """
    variables = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
        variables.setdefault("OMP_NUM_THREADS", "1")
    return variables


def processes_of(mark: str) -> list[int]:
    """Return the ids of all processes of a stage, including processes that have left its process group."""
    wanted, ids = f"{MARK}={mark}".encode(), []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                ids.append(int(place.name))
    return ids


def end_all(mark: str, process: subprocess.Popen[Any]) -> None:
    """Kill all processes of a stage, and wait for the end of its first process, `process`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for _ in range(20):  # a process that is just being started appears in the next round
        if not (ids := processes_of(mark)):
            break
        for pid in ids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait()


class _Reader:
    """Reads the rows that the stage has written since the last call. An unfinished line is read by a later call."""

    def __init__(self, file: Path, on_row: Callable[[Row], None]) -> None:
        self.file, self.on_row = file, on_row
        self.place, self.rows, self.failures, self.garbage = 0, 0, 0, 0
        self.not_run: str | None = None

    def read(self) -> None:
        with self.file.open("rb") as file:
            file.seek(self.place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.place += len(line)
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not row:
            self.garbage += 1
        elif set(row) == {NOT_RUN}:
            self.not_run = str(row[NOT_RUN])
        else:
            self.rows += 1
            self.failures += FAILURE in row
            self.on_row(row)


def _judged(code: int, timed_out: bool, limit: float, reader: _Reader) -> tuple[str, str]:
    """Return status and reason. The reason is "" if the stage exited with an error; `run_stage` fills it in."""
    measured = reader.rows - reader.failures
    after = f"after {reader.rows} row{'s' * (reader.rows != 1)}"
    if timed_out:
        return "cut" if measured else "failed", f"reached its limit of {limit:.0f} s, {after}"
    if code < 0:
        why = ", as the system ends a process that needs too much memory" if code == -signal.SIGKILL else ""
        return "failed", f"was killed by {signal.Signals(-code).name} {after}{why}"
    if code:
        return "failed", ""
    if reader.not_run is not None:
        return NOT_RUN, reader.not_run
    if reader.garbage:
        return "failed", f"wrote {reader.garbage} lines that are no rows"
    if not reader.rows:
        return "failed", "ended without a row"
    if not measured:
        return "failed", f"all {reader.rows} rows failed"
    return "done", ""


def _last_error(lines: list[str]) -> str:
    words = [line.strip() for line in lines if line.strip()]
    return words[-1][:300] if words else "ended with an error and printed no message"
