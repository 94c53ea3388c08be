"""A few math workers, kept alive between calls, with a hard wall-clock limit for every request.

Knows the protocol of `math_worker.py` and nothing about rewards. Safe to call from any thread, from daemonic
processes and after a fork; what cannot be shared with another process is started anew there.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("math_worker.py")
START_LIMIT = 120.0  # seconds for the interpreter and its imports; not charged to any item
ORPHAN_GRACE = 1.0  # seconds past the limit after which a worker whose parent is gone ends itself
ITEMS_PER_WORKER = 8  # fewer are not worth the start of another worker


class WorkerDied(Exception):
    """The worker ended before it answered (not by our hand)."""


class Worker:
    """One worker process and the socket to it. One request at a time."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                # -P: this folder has a math.py, which must not hide the standard library's
                [sys.executable, "-P", str(WORKER)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the parent to handle
            )
        self.replies = self.socket.makefile("rb")
        try:
            self.socket.settimeout(START_LIMIT)
            error = self._reply().get("error")
        except (WorkerDied, OSError) as problem:
            self.kill()
            raise RuntimeError(f"the math worker did not start ({sys.executable} {WORKER}): {problem}") from problem
        except BaseException:
            self.kill()
            raise
        if error:
            self.kill()
            raise RuntimeError(f"the math worker cannot run math-verify: {error}")

    def ask(self, request: dict[str, Any], timeout: float) -> bool:
        """The worker's answer; raises TimeoutError after `timeout` seconds, WorkerDied if it died."""
        message = json.dumps({**request, "limit": timeout + ORPHAN_GRACE}).encode() + b"\n"
        self.socket.settimeout(timeout)
        try:
            self.socket.sendall(message)
            return bool(self._reply()["ok"])
        except ConnectionError as error:
            raise WorkerDied(str(error)) from error

    def _reply(self) -> dict[str, Any]:
        line = self.replies.readline()
        if not line:
            raise WorkerDied("it closed its output")
        return json.loads(line)

    def kill(self) -> None:
        """End the process, if it is ours, and release the socket."""
        self.replies.close()
        self.socket.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        else:
            self.process.returncode = 0  # another process's child: nothing of ours to wait for


def _kill_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().kill()


class MathPool:
    """At most `size` workers, started when they are needed.

    `map` gives True or False per request, and None where the limit of `timeout` seconds was hit or the worker
    died twice over the same request.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self._idle: list[Worker] = []
        self._start_afresh()
        weakref.finalize(self, _kill_all, self._idle)  # at the pool's end, and at the interpreter's

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self.size)

    def map(self, requests: list[dict[str, Any]]) -> list[bool | None]:
        """The answers, in the order of the requests."""
        if self._pid != os.getpid():  # after a fork: the workers are the parent's, and locks may be held
            self._start_afresh()
            _kill_all(self._idle)
        threads = min(self.size, -(-len(requests) // ITEMS_PER_WORKER))
        if threads <= 1:
            return [self._ask(request) for request in requests]
        executor = ThreadPoolExecutor(threads, thread_name_prefix="math-reward")
        try:
            return list(executor.map(self._ask, requests))
        finally:
            executor.shutdown(cancel_futures=True)

    def _ask(self, request: dict[str, Any]) -> bool | None:
        with self._slots:
            for _ in range(2):  # a worker may be shot from outside (out of memory): that is not the answer's fault
                worker = self._take()
                try:
                    answer = worker.ask(request, self.timeout)
                except WorkerDied:
                    worker.kill()
                    continue
                except TimeoutError:
                    worker.kill()
                    return None
                except BaseException:  # interrupted in mid-exchange: its next reply would answer another question
                    worker.kill()
                    raise
                with self._lock:
                    self._idle.append(worker)
                return answer
        return None

    def _take(self) -> Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return Worker()
            if worker.process.poll() is None:
                return worker
            worker.kill()
