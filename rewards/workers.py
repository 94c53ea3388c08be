"""Keeps a pool of worker processes alive between calls, and limits the time of each request.

The pool may be called from any thread, from daemonic processes and after a fork; a forked process starts its own
workers. A worker is a Python process that runs `main` of a module of this package, with a socket as its standard input
and output. It first writes {"ok": true}, or {"error": text} if it cannot work, and then answers each request with one
line of JSON.
"""

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


class WorkerDied(Exception):
    """Raised if a worker ended before it answered, although the pool did not kill it."""


class Worker:
    """One worker process and the socket that connects to it. A worker handles one request at a time."""

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
            self.socket.settimeout(START_LIMIT)
            if error := self._reply().get("error"):
                raise WorkerDied(error)
        except (WorkerDied, OSError) as problem:
            self.kill()
            raise RuntimeError(f"{module} did not start ({sys.executable}): {problem}") from problem
        except BaseException:
            self.kill()
            raise

    def ask(self, message: bytes, seconds: float) -> dict[str, Any]:
        """Return the worker's reply. Raises TimeoutError without a reply in `seconds`, and WorkerDied if it died."""
        self.socket.settimeout(seconds)
        try:
            self.socket.sendall(message)
            return self._reply()
        except ConnectionError as error:
            raise WorkerDied(str(error)) from error

    def _reply(self) -> dict[str, Any]:
        line = self.replies.readline()
        if not line:
            raise WorkerDied("it closed its output")
        return json.loads(line)

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
    environment : environment variables of the workers
    """

    def __init__(self, module: str, size: int, environment: Mapping[str, str]) -> None:
        self.module = module
        self.size = size
        self.environment = environment
        self._idle: list[Worker] = []
        self._start_afresh()
        weakref.finalize(self, _kill_all, self._idle)  # when the pool is deleted or the interpreter exits

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return WorkerPool, (self.module, self.size, self.environment)  # workers are not pickled

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
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
                except WorkerDied:
                    worker.kill()
                    continue
                except TimeoutError:
                    worker.kill()
                    return None
                except BaseException:  # after an interrupt, the worker's next reply would belong to this request
                    worker.kill()
                    raise
                with self._lock:
                    self._idle.append(worker)
                return reply
        return None

    def _take(self) -> Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return Worker(self.module, self.environment)
            if worker.process.poll() is None:
                return worker
            worker.kill()
