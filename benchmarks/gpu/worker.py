"""Runs one stage in a process group of its own, passes on its rows as they come, and ends all its processes.

A stage is a generator function of Options that yields rows (dicts of JSON values). It may raise anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HOUSE = Path(__file__).parents[2]
Row = dict[str, Any]
FAILURE = "failure"  # key of a row whose measurement raised an exception
PR_SET_PDEATHSIG = 1


class NotRunError(Exception):
    """Raised by a stage that cannot measure anything here; the message gives the reason."""


@dataclass(frozen=True)
class Options:
    """Inputs of a stage. earlier : rows of this stage from earlier calls that were cut"""

    device: str
    small: bool
    earlier: Sequence[Row] = field(default=())

    @property
    def dtype(self) -> str:
        """The dtype that the stages compute in."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def measured(self, **keys: Any) -> bool:
        """Return True if an earlier call has a row with these values."""
        return any(keys.items() <= row.items() for row in self.earlier)


def attempt(keys: Row, work: Callable[[], Row]) -> Row:
    """Return the row `keys` with the results of `work`. If `work` raises, return it with the failure in one line."""
    try:
        return {**keys, **work()}
    except Exception as error:  # the other rows of the stage are still wanted
        traceback.print_exc()
        return {**keys, FAILURE: in_a_line(error)}
    finally:
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def in_a_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, at most 300 characters."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:300]


def work(function: str, options: Options, log: str, rows: Connection) -> None:
    """Be the process of a stage. Send each row, and in the end the status and its reason."""
    os.setsid()
    if sys.platform == "linux":  # the kernel kills this process as soon as its parent has ended
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    module, _, name = function.partition(":")
    try:
        for row in getattr(importlib.import_module(module), name)(options):
            rows.send(row)
        rows.send(("done", ""))
    except NotRunError as error:
        rows.send(("not run", str(error)))
    except Exception as error:
        traceback.print_exc()
        rows.send(("failed", in_a_line(error)))
    sys.stderr.flush()
    os._exit(0)  # a library's thread or destructor must not turn a finished stage into a failure


def run_stage(function: str, options: Options, limit: float, on_row: Callable[[Row], None]) -> dict[str, Any]:
    """Run a stage for at most `limit` seconds, call `on_row` with each row, and return status, reason and log."""
    context, rows, measured = multiprocessing.get_context("spawn"), 0, 0
    end = time.monotonic() + limit
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        process = context.Process(target=work, args=(function, options, log.name, sender))
        process.start()
        sender.close()
        status, reason = "", f"reached its limit of {limit:.0f} s"
        try:
            while receiver.poll(max(0.0, end - time.monotonic())):
                row = receiver.recv()
                if isinstance(row, tuple):
                    status, reason = row
                    break
                rows += 1
                measured += FAILURE not in row
                on_row(row)
        except EOFError:
            process.join()
            killer = signal.Signals(-(process.exitcode or 0) or signal.SIGKILL).name
            status, reason = "failed", f"was killed by {killer}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
        status = status or ("cut" if measured else "failed")
        if status == "done" and not measured:
            status, reason = "failed", "all its rows failed" if rows else "ended without a row"
        lines = log.read().replace(f"{HOUSE}/", "").replace(f"{sys.prefix}/", "").splitlines()[-12:]
    return {"status": status, "reason": reason, "log": lines if status in ("cut", "failed") else []}
