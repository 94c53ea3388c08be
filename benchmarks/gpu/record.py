"""The results of all calls in one JSON file, which is replaced as a whole after each row.

    {"format": 1, "device", "small", "measured": how the latest call was measured,
     "calls": [{"environment": {topic: finding}, "measured": {...}}],
     "stages": {name: {"status", "reason", "failures", "seconds", "call", "rows": [{..., "call"}], "stderr"}}}

A stage's `status` is done, cut, failed, not run or running; it remains running if the whole command is killed.
`failures` is the number of attempts that failed, or were cut without a new row. A row's `call` is an index in `calls`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.process import Outcome
from benchmarks.gpu.worker import FAILURE, Row

FORMAT = 1
ATTEMPTS = 2  # failed attempts after which a stage is not tried again


class Record:
    """Reads and writes the results. Every change is on disk when the method returns."""

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        self.file, self.content = file, content

    @classmethod
    def new(cls, file: Path, device: str, small: bool) -> Record:
        content = {"format": FORMAT, "device": device, "small": small, "measured": {}, "calls": [], "stages": {}}
        return cls(file, content)

    @classmethod
    def load(cls, file: Path) -> Record:
        """Read a file. Raises ValueError if it holds no results."""
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{file} holds no results of format {FORMAT}")
        return cls(file, content)

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_name(f"{self.file.name}.{os.getpid()}.new")
        new.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        os.replace(new, self.file)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def begin_call(self, measured: dict[str, Any], environment: dict[str, Any]) -> None:
        self.content["calls"].append({"measured": measured, "environment": environment})
        self.content["measured"] = measured
        self.save()

    # ---- stages -----------------------------------------------------------------------------------------------------

    def stage(self, name: str) -> dict[str, Any]:
        """Return what is known about a stage. A new stage has the status "not run"."""
        empty: dict[str, Any] = {"status": "not run", "reason": "not reached", "failures": 0, "seconds": 0.0}
        return self.content["stages"].setdefault(name, {**empty, "rows": [], "stderr": []})

    def wants(self, name: str, only: bool) -> str | None:
        """Return None if a stage is to be run, or the reason why it is not.

        only : True if the user has named the stage
        """
        held = self.stage(name)
        if only:
            return None
        if held["status"] == "done":
            return "it is done"
        return f"it failed {held['failures']} times" if held["failures"] >= ATTEMPTS else None

    def interrupted(self, name: str) -> bool:
        """Return True if an earlier call has begun this stage and not completed it."""
        return self.stage(name)["status"] in ("running", "cut", "failed")

    def begin(self, name: str) -> list[Row]:
        """Begin a stage, and return those of its earlier rows that need not be measured again.

        All rows of a stage that was done are dropped, and so are failed rows of any stage.
        """
        held = self.stage(name)
        kept = [] if held["status"] == "done" else [row for row in held["rows"] if FAILURE not in row]
        held |= {"status": "running", "reason": "the command was ended during this stage", "rows": kept, "stderr": []}
        held["call"] = len(self.content["calls"]) - 1
        self.save()
        return list(kept)

    def add(self, name: str, row: Row) -> None:
        self.stage(name)["rows"].append({**row, "call": len(self.content["calls"]) - 1})
        self.save()

    def end(self, name: str, outcome: Outcome, before: int) -> None:
        """Enter the outcome of a stage that had `before` rows when it began."""
        held = self.stage(name)
        status, reason, rows = outcome.status, outcome.reason, held["rows"]
        grown = sum(FAILURE not in row for row in rows[before:]) > 0
        if status == "failed" and outcome.reason == "ended without a row" and before:
            status, reason = "done", ""  # all its rows had been measured by earlier calls
        if status == "failed" or (status == "cut" and not grown):
            held["failures"] += 1
        held |= {"status": status, "reason": reason, "stderr": outcome.stderr}
        held["seconds"] += outcome.seconds
        self.save()

    def leave_out(self, name: str, reason: str) -> None:
        """Enter the reason why a stage was not run, unless it has results."""
        held = self.stage(name)
        if held["status"] == "not run":
            held["reason"] = reason
            self.save()
