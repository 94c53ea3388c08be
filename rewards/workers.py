"""Keeps a pool of worker processes alive between calls, and limits the time of each request.

The pool may be called from any thread, from daemonic processes and after a fork; a forked process starts its own
workers. A worker is a Python process that runs `main` of a module of this package, which calls `answer_requests`.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# The package is imported from this file's location, regardless of sys.path; -P excludes the working directory.
START = (
    "import sys, importlib; sys.path.insert(0, sys.argv[1]); "
    "module = importlib.import_module('rewards.' + sys.argv[2]); del sys.path[0]; module.main()"
)
FOLDER = str(Path(__file__).resolve().parents[1])
START_LIMIT = 120.0  # seconds for starting the interpreter and its imports; no request is charged for this time


def answer_requests(prepare: Callable[[], object], serve: Callable[[socket.socket], object]) -> None:
    """Answer a pool's requests in child processes, each of which is a fork of this one after `prepare`, in turn.

    serve : called in a child. It reads requests from the socket, and answers each with a line of JSON. If SIGPROF ends
        the child, the reply is {"ok": null}; with any other status than 0, this function returns
    """
    connection = socket.socket(fileno=os.dup(0))
    for number in range(3):  # output of libraries must not mix with the replies
        os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), number)
    prepare()
    gc.freeze()  # the memory stays shared with all later processes
    connection.sendall(b'{"ok": true}\n')
    while child := os.fork():
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            connection.sendall(b'{"ok": null}\n')
        elif status:  # the requests have ended, or the child was killed
            return
    serve(connection)


class Worker:
    """One worker process and the socket that connects to it. It handles one request at a time."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self.socket, worker_end = socket.socketpair()
        with worker_end:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, FOLDER, module],
                stdin=worker_end.fileno(),
                stdout=worker_end.fileno(),
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,  # only the parent handles Ctrl-C
            )
        self.replies = self.socket.makefile("rb")
        try:
            self.ask(b"", START_LIMIT)
        except OSError as problem:
            raise RuntimeError(f"{module} did not start ({sys.executable}): {problem}") from problem

    def ask(self, message: bytes, seconds: float) -> dict[str, Any]:
        """Return the worker's reply. Raises TimeoutError without one in `seconds`, and ConnectionError if it died."""
        self.socket.settimeout(seconds)
        try:
            self.socket.sendall(message)
            if line := self.replies.readline():
                return json.loads(line)
            raise ConnectionResetError("it closed its output")
        except BaseException:  # after an interrupt, the next reply would belong to this request
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the worker if this process started it, and close the socket."""
        self.replies.close()
        self.socket.close()
        if self.owner == os.getpid():
            with suppress(ProcessLookupError):  # also kills its children, which are in the same session
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        else:
            self.process.returncode = 0  # the child of another process, which this process cannot wait for


def _kill_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().kill()


class WorkerPool:
    """A pool of at most `size` workers, which are started when they are needed.

    module : module of this package, whose `main` the workers run
    """

    def __init__(self, module: str, size: int, environment: Mapping[str, str]) -> None:
        self.module, self.size, self.environment = module, size, environment
        self._idle: list[Worker] = []
        self._start_afresh()
        weakref.finalize(self, _kill_all, self._idle)  # when the pool is deleted or the interpreter exits

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return WorkerPool, (self.module, self.size, self.environment)  # workers are not pickled

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._slots = threading.BoundedSemaphore(self.size)

    def map(self, function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
        """Return the function's value for each item. It is called in at most `threads` threads, and may call `ask`."""
        if self._pid != os.getpid():  # after a fork: the workers belong to the parent, and locks may be held
            self._start_afresh()
            _kill_all(self._idle)
        if min(threads, self.size) <= 1:
            return [function(item) for item in items]
        executor = ThreadPoolExecutor(min(threads, self.size), thread_name_prefix=self.module)
        try:
            return list(executor.map(function, items))
        finally:
            executor.shutdown(cancel_futures=True)

    def ask(self, message: bytes, seconds: float) -> dict[str, Any] | None:
        """Return a worker's reply. None: there was no reply in `seconds`, or two workers died. Call it within `map`."""
        with self._slots:
            for _ in range(2):  # a worker may be killed from outside (out of memory), independently of the request
                worker = self._take()
                try:
                    reply = worker.ask(message, seconds)
                except ConnectionError:
                    continue
                except TimeoutError:
                    return None
                self._idle.append(worker)
                return reply
        return None

    def _take(self) -> Worker:
        with suppress(IndexError):  # none is idle
            while (worker := self._idle.pop()).process.poll() is not None:
                worker.kill()
            return worker
        return Worker(self.module, self.environment)
