"""Starts processes that are confined (sandbox.py), and watches their limits. code_worker.py says what they run.

A request holds the limits of its processes: `seconds` (of processor time), `real_seconds`, `memory` and `most_output`
(bytes), and `complete` (False starts processes although a part of the sandbox is missing).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import io
import os
import select
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

from rewards.sandbox import Limits, Sandbox

MOST_THREADS = 64
MOST_DIGITS = 50_000  # of a whole number that a program reads or prints
TICK = 0.02  # seconds between two checks of a program's threads and processor time
STDIN, STDOUT, STDERR, CHANNEL, REPORT, VERDICT = range(6)  # open files of a process that runs a program or statements
CONFINED = b"confined"


@cache
def sandbox() -> Sandbox:
    """Return the sandbox, in which a program may read Python with its packages and the system's libraries."""
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    python += [os.path.join(sys.base_prefix, "lib"), sysconfig.get_config_var("LIBDIR") or ""]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    return Sandbox([path for path in dict.fromkeys([*python, *system, "/dev/urandom"]) if path])


# ---- the confined process ----------------------------------------------------------------------------------


class Forked(BaseException):
    """Raised in a new process, where it unwinds the supervisor's frames, so that a program cannot find their variables.

    run : function that the process then calls
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run


def start(files: dict[int, int], request: dict[str, Any], run: Callable[[], object]) -> int:
    """Fork a process that confines itself, reports to its file REPORT, and calls `run`. Return its id.

    files : the open files of the process: number -> number in this process
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    die_with(parent)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if memory runs out, the kernel ends this process first
    try:
        if request["complete"] and not sandbox().complete:
            raise OSError("a part of the sandbox is missing")
        sandbox().confine(Limits(int(request["seconds"]) + 2, request["memory"]))
    except (OSError, ValueError) as error:
        os.write(files[REPORT], f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    use_files(files)
    os.write(REPORT, CONFINED)
    os.close(REPORT)
    raise Forked(run)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def use_files(files: dict[int, int]) -> None:
    """Give this process open files under new numbers (number -> present number), and close all others."""
    copies = {number: fcntl.fcntl(present, fcntl.F_DUPFD, 32) for number, present in files.items()}
    for number, copy in copies.items():
        os.dup2(copy, number)
    for number in range(32):
        if number not in copies:
            with suppress(OSError):
                os.close(number)
    os.closerange(32, 65536)


def end_with(run: Callable[[], object]) -> NoReturn:
    """Call `run`, and end this process much as Python ends."""
    sys.argv = ["program.py"]
    sys.setrecursionlimit(50_000)
    sys.set_int_max_str_digits(MOST_DIGITS)
    for name, number, mode in (("stdin", STDIN, "r"), ("stdout", STDOUT, "w")):
        file = os.fdopen(number, mode, encoding="utf-8", closefd=False)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    status = 0
    try:
        run()
    except SystemExit:
        pass
    except BaseException:
        status = 1
    try:
        finish()
    except BaseException:
        status = 1
    os._exit(status)


def finish() -> None:
    """Wait for threads, run the functions of atexit, and write what files still hold back.

    Python's own end does this, too, but frees all memory, which takes several times as long as most programs.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # also ends the threads of executors
    atexit._run_exitfuncs()
    for file in gc.get_objects():  # omits objects that gc.freeze() saw
        if isinstance(file, io.TextIOWrapper | io.BufferedWriter) and not file.closed and file.writable():
            file.flush()


def no_files() -> dict[int, int]:
    null = os.open(os.devnull, os.O_RDWR)
    return {STDIN: null, STDOUT: null, STDERR: null}


def file_of(text: str) -> int:
    """Return an open file with a text, for reading."""
    content = text.encode("utf-8", "replace")
    if not hasattr(fcntl, "F_ADD_SEALS"):
        from sparse_rl.temporary import temporary_folder

        with tempfile.TemporaryFile(dir=temporary_folder()) as temporary:
            temporary.write(content)
            temporary.seek(0)
            return os.dup(temporary.fileno())
    file = os.memfd_create("input", os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writer:
        writer.write(content)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    os.lseek(file, 0, os.SEEK_SET)
    return file


# ---- the process that watches it ---------------------------------------------------------------------------


class Ended(Exception):
    """Raised with the end of a run: "failed" or "timeout"."""


class Watch:
    """Watches processes of one run, whose limits are those of the request. The run also ends when the caller does."""

    def __init__(self, request: dict[str, Any], caller: int) -> None:
        self.request = request
        self._caller = select.poll()
        self._caller.register(caller, 0)  # reports only that the other end is closed
        self.processes: list[int] = []
        self.deadline = time.monotonic() + request["real_seconds"]
        self._next_check = 0.0

    def begin(self, files: dict[int, int], run: Callable[[], object]) -> int:
        """Start a process, and wait until it is confined. Raises OSError if it cannot be confined."""
        report, written = os.pipe()
        process = start({**files, REPORT: written}, self.request, run)
        self.processes.append(process)
        os.close(written)
        message = b""
        while part := os.read(report, 4096):
            message += part
        os.close(report)
        if not message:
            raise BlockingIOError("a process ended before it was confined")
        if message != CONFINED:
            raise OSError(message.decode(errors="replace"))
        return process

    def read(self, output: int) -> bytes:
        """Return all that the processes write to a pipe until they close it. Raises Ended at a limit."""
        content = bytearray()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while True:
            self.check()
            if not poll.poll(TICK * 1000):
                continue
            part = os.read(output, 1 << 16)
            if not part:
                return bytes(content)
            content += part
            if len(content) > self.request["most_output"]:
                raise Ended("failed")

    def wait(self, process: int) -> int:
        """Return the status of a process when it ends. Raises Ended at a limit."""
        while True:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self.processes.remove(process)
                return status
            self.check()
            time.sleep(0.0005)

    def check(self) -> None:
        """Raise Ended if a limit is reached."""
        now = time.monotonic()
        if now >= self.deadline:
            raise Ended("timeout")
        if now < self._next_check:
            return
        self._next_check = now + TICK
        if self._caller.poll(0):
            raise Ended("failed")
        for process in self.processes:
            if processor_seconds(process) >= self.request["seconds"]:
                raise Ended("timeout")
            if thread_count(process) > MOST_THREADS:
                raise Ended("failed")

    def kill(self) -> None:
        for process in self.processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        self.processes = []


def processor_seconds(process: int) -> float:
    """Return the processor time of a process; 0 if the system does not say it."""
    with suppress(OSError):
        return time.clock_gettime((~process << 3) | 2)
    return 0.0


def thread_count(process: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{process}/task"))
    return 1
