"""The process that runs programs for the reward `code`. One request is one test of one program.

    request:  two lengths (4 bytes each), then a JSON object and the source of statements, of these lengths
    reply:    a line of JSON, {"end": ..., "output": ...}, or {"error": ...} if the program could not be confined,
              or {"busy": ...} if the machine has no process left

The keys of a request are `kind`, `program`, `input`, `function`, and the limits in confined.py. The kinds are

- stdin: the program gets `input` on its standard input; the output is its standard output.
- call: `function` of the program is called with the JSON values in the lines of `input`; the output is its result, in
  the form of code_values.py.
- statements: the statements run in a process of their own, and use the program's names (code_remote.py).

The end is "passed" (the program ended without an error, or the statements did), "failed" (an exception, a signal, no
memory left, too much output, too many threads) or "timeout".

The worker forks a supervisor *before* it reads the request, so the worker's memory never holds a program or a test. The
supervisor forks a process that confines itself (confined.py) and runs the program, and reads the statements only
afterwards. No process that runs a program ever holds an expected output: outputs are compared in the caller's process.
"""

from __future__ import annotations

import builtins
import gc
import json
import os
import socket
import struct
import sys
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

from rewards.code_remote import Connection, answer_calls, run_statements
from rewards.code_values import PROGRAM, read_json, to_text
from rewards.confined import (
    CHANNEL,
    STDIN,
    STDOUT,
    VERDICT,
    Ended,
    Forked,
    Watch,
    end_with,
    file_of,
    no_files,
    sandbox,
)

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


# ---- the process that runs a program or statements ---------------------------------------------------------


def run_program(request: dict[str, Any]) -> None:
    """Run the program of a request as its kind demands."""
    kind = request["kind"]
    module = ModuleType("__main__" if kind == "stdin" else PROGRAM)
    # As built-in names, those of the prelude are not taken for names that the program defines.
    vars(module)["__builtins__"] = {**prelude(), "stdin": sys.stdin, "stdout": sys.stdout}
    sys.modules[module.__name__] = module
    exec(compile(request["program"], "<program>", "exec"), vars(module))
    if kind == "call":
        owner = module.Solution() if hasattr(module, "Solution") else module
        lines = request["input"].split("\n") if request["input"] else []
        arguments = [read_json(line) for line in lines]
        result = to_text(getattr(owner, request["function"])(*arguments))
        with open(CHANNEL, "w", encoding="ascii") as channel:
            channel.write(result + "\n")
    elif kind == "statements":
        names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        answer_calls(names, Connection(socket.socket(fileno=CHANNEL)))


# ---- the supervisor ----------------------------------------------------------------------------------------


def supervise(request: dict[str, Any], statements: Callable[[], str], caller: int) -> dict[str, Any]:
    """Run one test, and return the reply.

    statements : reads the statements from the caller
    caller : open file that connects to the caller
    """
    watch = Watch(request, caller)
    try:
        reply = _tested(watch, statements) if request["kind"] == "statements" else _run(watch)
    except Ended as end:
        reply = {"end": str(end)}
    except BlockingIOError as error:  # no process, or no memory for one
        reply = {"busy": str(error)}
    except OSError as error:
        reply = {"error": str(error)}
    watch.kill()  # not in `finally`, which a new process would run, too
    return reply


def _run(watch: Watch) -> dict[str, Any]:
    request = watch.request
    output, written = os.pipe()
    files = no_files()
    if request["kind"] == "stdin":
        files |= {STDIN: file_of(request["input"]), STDOUT: written}
    else:
        files[CHANNEL] = written
    process = watch.begin(files, partial(run_program, request))
    os.close(written)
    content = watch.read(output)
    if not content if request["kind"] == "call" else watch.wait(process):
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
        run_statements(source, Connection(socket.socket(fileno=CHANNEL)))
        os.write(VERDICT, PASSED)
        os.close(VERDICT)

    watch.begin({**no_files(), CHANNEL: of_statements, VERDICT: written}, run)
    os.close(of_statements)
    os.close(written)
    return {"end": "passed" if watch.read(output) == PASSED else "failed"}


# ---- the worker --------------------------------------------------------------------------------------------


def receive(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes. Raises EOFError if the connection ends before."""
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 1 << 20))
        if not part:
            raise EOFError
        content += part
    return bytes(content)


def serve(connection: socket.socket) -> None:
    """Answer one request. Raises EOFError if there is none."""
    lengths = struct.unpack(">II", receive(connection, 8))
    request = json.loads(receive(connection, lengths[0]))
    reply = supervise(request, lambda: receive(connection, lengths[1]).decode(), connection.fileno())
    connection.sendall(json.dumps(reply).encode() + b"\n")


def main() -> None:
    """Fork a supervisor for each request, until the requests end."""
    connection = socket.socket(fileno=os.dup(STDIN))
    for number, present in no_files().items():
        os.dup2(present, number)
    prelude()
    sandbox()
    gc.freeze()  # the memory stays shared with all later processes
    connection.sendall(b'{"ok": true}\n')
    while supervisor := os.fork():
        _, status = os.waitpid(supervisor, 0)
        if status:  # the requests have ended, or the supervisor was killed
            return
    try:
        serve(connection)
    except EOFError:
        os._exit(1)
    except Forked as forked:
        connection.detach()
        run = forked.run
    else:
        os._exit(0)
    end_with(run)
