"""The process of one stage: calls its function and appends each row to a file, as one line of JSON.

    python -m benchmarks.gpu.worker SPECIFICATION      (JSON; started by process.py)

What the stage prints goes to its standard error. A row of measurement is a dict of JSON values; NaN and infinities are
written as text.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FAILURE = "failure"  # key of a row whose measurement raised an exception
NOT_RUN = "not run"  # key of a line that says why a stage measured nothing
PR_SET_PDEATHSIG = 1


class NotRunError(Exception):
    """Raised by a stage that cannot measure anything here; the message gives the reason."""


@dataclass(frozen=True)
class Options:
    """Inputs of a stage besides its device and its size.

    trace : folder of recorded traces, or None
    folder : folder for files that later calls may use again
    earlier : rows of this stage from earlier calls that were cut
    """

    trace: Path | None = None
    folder: Path = Path(".")
    earlier: Sequence[Row] = field(default=())

    def measured(self, **keys: Any) -> bool:
        """Return True if an earlier call has a row with these values, and this row is no failure."""
        wanted = json.loads(json.dumps(keys))
        return any(FAILURE not in row and wanted.items() <= row.items() for row in self.earlier)


def attempt(keys: Row, work: Callable[[], Row]) -> Row:
    """Return the row `keys` with the results of `work`. If `work` raises, return it with the failure in one line."""
    try:
        return {**keys, **work()}
    except NotRunError:
        raise
    except Exception as error:  # the other rows of the stage are still wanted
        traceback.print_exc()
        return {**keys, FAILURE: in_a_line(error)}
    finally:
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def in_a_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 300 characters."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]


def plain(value: Any) -> Any:
    """Return a value in which NaN and infinities, which JSON does not have, are text."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def load(function: str) -> Callable[..., Iterator[Row]]:
    """Import a function from its name "module:name"."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def end_with_parent() -> None:
    """Let the kernel kill this process as soon as the process that started it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(specification: str) -> None:
    end_with_parent()
    given = json.loads(specification)
    os.dup2(2, 1)  # libraries print to the standard output
    options = Options(given["trace"] and Path(given["trace"]), Path(given["folder"]), given["earlier"])
    with open(given["rows"], "a", encoding="utf-8") as file:

        def write(line: Row) -> None:
            file.write(json.dumps(plain(line)) + "\n")
            file.flush()

        try:
            for row in load(given["function"])(given["device"], given["small"], options):
                write(row)
        except NotRunError as error:
            write({NOT_RUN: str(error)})


if __name__ == "__main__":
    # The stages import this module under its name, so `main` must catch NotRunError of that module, not of __main__.
    importlib.import_module("benchmarks.gpu.worker").main(sys.argv[1])
    sys.stderr.flush()
    os._exit(0)  # a library's thread or destructor must not turn a finished stage into a failure
