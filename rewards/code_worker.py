"""The process that runs programs for the reward `code`. One request is one test of one program.

    request:  two lengths (4 bytes each), then a JSON object and the source of statements, of these lengths
    reply:    a line of JSON, {"end": ..., "output": ...}, or {"error": ...} if the program could not be confined,
              or {"busy": ...} if the machine has no process left; each with "seconds", the time that was used

`CodeReward._run` makes the object. The output is what the program prints (stdin) or the JSON of a function's result
(call). The end is "passed" (without an error), "timeout" or "failed" (an exception, a signal, any other limit).

The worker's memory never holds a program or a test: it forks a supervisor before it reads the request. That forks a
process that confines itself (sandbox.py) and runs the program, and only then reads the statements, which run in another
one (code_statements.py). No process that runs a program ever holds an expected output.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import gc
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from types import ModuleType
from typing import Any, NoReturn

from rewards.code import read_json
from rewards.code_statements import PROGRAM, Peer, run_statements, serve_program
from rewards.sandbox import Sandbox
from rewards.workers import answer_requests

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


class Forked(BaseException):
    """Raised in a new process, where it unwinds the supervisor's frames, so that a program cannot find their variables.

    run : function that the process then calls
    """

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run


def end_with(run: Callable[[], object]) -> NoReturn:
    """Call `run`, and end as Python does, but without freeing all memory, which takes longer than most programs."""
    sys.argv = ["program.py"]
    sys.setrecursionlimit(50_000)
    sys.set_int_max_str_digits(MOST_DIGITS)
    for name, number, mode in (("stdin", STDIN, "r"), ("stdout", STDOUT, "w")):
        file = os.fdopen(number, mode, encoding="utf-8", closefd=False)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    status = 0
    try:
        with suppress(SystemExit):
            run()
    except BaseException:
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # also ends the threads of executors
        atexit._run_exitfuncs()
        for file in gc.get_objects():  # omits objects that gc.freeze() saw
            if isinstance(file, io.TextIOWrapper | io.BufferedWriter) and not file.closed and file.writable():
                file.flush()
    except BaseException:
        status = 1
    os._exit(status)


def no_files() -> dict[int, int]:
    null = os.open(os.devnull, os.O_RDWR)
    return {STDIN: null, STDOUT: null, STDERR: null}


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

    def begin(self, files: dict[int, int], run: Callable[[], object]) -> None:
        """Fork a process that confines itself and calls `run`. Raises OSError if it cannot be confined.

        files : the open files of the process: number -> number in this process
        """
        report, written = os.pipe()
        parent, files = os.getpid(), {**files, REPORT: written}
        process = os.fork()
        if not process:
            self.confine(parent, files)
            raise Forked(run)
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

    def confine(self, parent: int, files: dict[int, int]) -> None:
        """Confine this process, leave it only `files` under their new numbers, and report to its file REPORT."""
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it dies with its parent
            if os.getppid() != parent:
                os._exit(1)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # if memory runs out, the kernel ends this process first
        try:
            if self.request["complete"] and not sandbox().complete:
                raise OSError("a part of the sandbox is missing")
            sandbox().confine(int(self.request["seconds"]) + 2, self.request["memory"])
        except (OSError, ValueError) as error:
            os.write(files[REPORT], f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        copies = {number: fcntl.fcntl(present, fcntl.F_DUPFD, 32) for number, present in files.items()}
        os.closerange(0, 32)
        for number, copy in copies.items():
            os.dup2(copy, number)
        os.closerange(32, 65536)
        os.write(REPORT, CONFINED)
        os.close(REPORT)

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

    def succeeded(self) -> bool:
        """Wait for the process to end, and return True if its status is 0. Raises Ended at a limit."""
        while True:
            ended, status = os.waitpid(self.processes[0], os.WNOHANG)
            if ended:
                self.processes = []
                return not status
            self.check()
            time.sleep(0.0005)

    def check(self) -> None:
        now = time.monotonic()
        if now >= self.deadline:
            raise Ended("timeout")
        if now < self._next_check:
            return
        self._next_check = now + TICK
        if self._caller.poll(0):
            raise Ended("failed")
        for process in self.processes:
            with suppress(OSError):  # some systems do not say the processor time of a process, or its threads
                if time.clock_gettime((~process << 3) | 2) >= self.request["seconds"]:
                    raise Ended("timeout")
                if len(os.listdir(f"/proc/{process}/task")) > MOST_THREADS:
                    raise Ended("failed")

    def kill(self) -> None:
        for process in self.processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        self.processes = []


PASSED = b"passed"
# Programs may use these modules' names without importing them, as under LiveCodeBench's checker.
STARRED = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
IMPORTED = STARRED[:-2]
PRELUDE = "".join(f"from {name} import *\n" for name in STARRED) + "".join(f"import {name}\n" for name in IMPORTED)


@cache
def prelude() -> dict[str, Any]:
    """Return the names that a program may use without importing or defining them: built-in ones and PRELUDE's."""
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    return {**vars(builtins), **names}


def run_program(request: dict[str, Any]) -> None:
    kind = request["kind"]
    module = ModuleType("__main__" if kind == "stdin" else PROGRAM)
    # As built-in names, those of the prelude are not taken for names that the program defines.
    vars(module)["__builtins__"] = {**prelude(), "stdin": sys.stdin, "stdout": sys.stdout}
    sys.modules[module.__name__] = module
    if kind == "statements":
        peer = Peer(socket.socket(fileno=CHANNEL), judges=False)
        sys.stdout = vars(module)["__builtins__"]["stdout"] = peer.printed
        vars(module)["__builtins__"]["input"] = lambda prompt="": print(prompt, end="") or peer.ask("input")
    exec(compile(request["program"], "<program>", "exec"), vars(module))
    if kind == "call":
        owner = module.Solution() if hasattr(module, "Solution") else module
        lines = request["input"].split("\n") if request["input"] else []
        arguments = [read_json(line) for line in lines]
        result = json.dumps(getattr(owner, request["function"])(*arguments), default=_number)
        with open(CHANNEL, "w", encoding="ascii") as channel:
            channel.write(result + "\n")
    elif kind == "statements":
        serve_program(vars(module))


def _number(value: Any) -> Any:
    """Return the Python number or boolean of one of NumPy."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    raise TypeError(f"JSON has no {type(value).__name__}")


def supervise(request: dict[str, Any], statements: Callable[[], str], caller: int) -> dict[str, Any]:
    """Run one test, and return the reply.

    statements : reads the statements from the caller
    caller : open file that connects to the caller
    """
    watch, start = Watch(request, caller), time.monotonic()
    try:
        reply = _tested(watch, statements) if request["kind"] == "statements" else _run(watch)
    except Ended as end:
        reply = {"end": str(end)}
    except BlockingIOError as error:  # no process, or no memory for one
        reply = {"busy": str(error)}
    except OSError as error:
        reply = {"error": str(error)}
    watch.kill()  # not in `finally`, which a new process would run, too
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    share = (time.monotonic() - start) * request["seconds"] / request["real_seconds"]
    return {"seconds": max(used.ru_utime + used.ru_stime, share), **reply}


def _run(watch: Watch) -> dict[str, Any]:
    request = watch.request
    output, written = os.pipe()
    files = no_files()
    if request["kind"] == "stdin":
        memory = os.fdopen(os.memfd_create("input"), "wb") if hasattr(os, "memfd_create") else None  # of Linux
        with memory or tempfile.TemporaryFile(dir=tempfile.gettempdir()) as given:
            given.write(request["input"].encode("utf-8", "replace"))
            given.flush()
            files |= {STDIN: os.open(f"/dev/fd/{given.fileno()}", os.O_RDONLY), STDOUT: written}  # for reading only
    else:
        files[CHANNEL] = written
    watch.begin(files, partial(run_program, request))
    os.close(written)
    content = watch.read(output)
    if not (content if request["kind"] == "call" else watch.succeeded()):
        raise Ended("failed")
    return {"end": "passed", "output": content.decode("utf-8", "replace")}


def _tested(watch: Watch, statements: Callable[[], str]) -> dict[str, Any]:
    # Bare numbers, because a socket object that a new process inherits would close its number there.
    of_statements, of_program = (end.detach() for end in socket.socketpair())
    watch.begin({**no_files(), CHANNEL: of_program}, partial(run_program, watch.request))
    os.close(of_program)
    source = statements()
    output, written = os.pipe()

    def run() -> None:
        Peer(socket.socket(fileno=CHANNEL), judges=True)
        run_statements(source)
        os.write(VERDICT, PASSED)
        os.close(VERDICT)

    watch.begin({**no_files(), CHANNEL: of_statements, VERDICT: written}, run)
    os.close(of_statements)
    os.close(written)
    return {"end": "passed" if watch.read(output) == PASSED else "failed"}


def receive(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes. Raises EOFError if the connection ends before."""
    content = connection.recv(size, socket.MSG_WAITALL)
    if len(content) < size:
        raise EOFError
    return content


def serve(connection: socket.socket) -> None:
    try:
        lengths = struct.unpack(">II", receive(connection, 8))
        request = json.loads(receive(connection, lengths[0]))
        reply = supervise(request, lambda: receive(connection, lengths[1]).decode(), connection.fileno())
        connection.sendall(json.dumps(reply).encode() + b"\n")
    except Forked:
        connection.detach()
        raise
    except EOFError:
        os._exit(1)
    os._exit(0)


def main() -> None:
    try:
        answer_requests(lambda: (prelude(), sandbox()), serve)
        return
    except Forked as forked:
        run = forked.run
    end_with(run)
