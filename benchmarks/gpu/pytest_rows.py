"""A pytest plugin that writes a line of JSON for each test as soon as it has ended: `-p benchmarks.gpu.pytest_rows`."""

from __future__ import annotations

import json
import os
from typing import Any

ROWS = "SPARSE_RL_TEST_ROWS"  # variable with the number of the file descriptor to write to


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of a test: its call, or its setup or teardown if that failed or skipped."""
    if report.when == "call" or report.outcome != "passed":
        outcome = "error" if report.outcome == "failed" and report.when != "call" else report.outcome
        row = {"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 3)}
        if outcome != "passed":
            row["reason"] = _reason(report)
        os.write(int(os.environ[ROWS]), (json.dumps(row) + "\n").encode())


def _reason(report: Any) -> str:
    """Return the first line of a failure's message, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):  # file, line and message of a skip
        return str(report.longrepr[2]).removeprefix("Skipped: ")[:300]
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
