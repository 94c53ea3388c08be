"""A few math workers, kept alive between calls, with a limit for every request and for all of a call together.

Knows the protocol of `math_worker.py` and nothing about rewards. Safe to call from any thread, from daemonic
processes and after a fork; what cannot be shared with another process is started anew there.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

# The package is found where this file lies, whatever the path says; -P: nothing from the working directory.
WORKER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from rewards.math_worker import main; del sys.path[0]; main()",
    str(Path(__file__).resolve().parents[1]),
)
START_LIMIT = 120.0  # seconds for the interpreter and its imports; not charged to any item
STALL, GRACE = 10, 5.0  # a worker that has not kept its limit after STALL times that and GRACE seconds is killed
ITEMS_PER_WORKER = 8  # fewer are not worth the start of another worker
QUICK = 0.5  # seconds that every item may take; the few that need longer share what is left for the call


class WorkerDied(Exception):
    """The worker ended before it answered (not by our hand)."""


class Worker:
    """One worker process and the socket to it. One request at a time."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", *WORKER],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the parent to handle
            )
        self.replies = self.socket.makefile("rb")
        try:
            self.socket.settimeout(START_LIMIT)
            if error := self._reply().get("error"):
                raise WorkerDied(f"it cannot run math-verify: {error}")
        except (WorkerDied, OSError) as problem:
            self.kill()
            raise RuntimeError(f"the math worker did not start ({sys.executable}): {problem}") from problem
        except BaseException:
            self.kill()
            raise

    def ask(self, request: dict[str, Any], limit: float) -> bool | None:
        """The worker's answer, None where it took longer than `limit` seconds of processor time.

        Raises TimeoutError where the worker does not answer for far longer than that, WorkerDied if it died.
        """
        message = json.dumps({**request, "limit": limit}).encode() + b"\n"
        self.socket.settimeout(STALL * limit + GRACE)
        try:
            self.socket.sendall(message)
            return self._reply()["ok"]
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
            with suppress(ProcessLookupError):  # its child too: they are a session of their own
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        else:
            self.process.returncode = 0  # another process's child: nothing of ours to wait for


def _kill_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().kill()


class MathPool:
    """At most `size` workers, started when they are needed.

    `map` gives True or False per request, and None where it was cut off or the worker died twice over it. A request may
    take `timeout` seconds of processor time, but what needs more than QUICK waits for the others. Then these slow ones
    have twice `timeout` on each worker, in even shares. So bombs do not hold up a call, nor harm their neighbours.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self._idle: list[Worker] = []
        self._start_afresh()
        weakref.finalize(self, _kill_all, self._idle)  # at the pool's end, and at the interpreter's

    def __reduce__(self) -> tuple[type, tuple[int, float]]:
        return MathPool, (self.size, self.timeout)  # workers are not pickled

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self.size)

    def map(self, requests: list[dict[str, Any]]) -> list[bool | None]:
        """The answers, in the order of the requests."""
        if self._pid != os.getpid():  # after a fork: the workers are the parent's, and locks may be held
            self._start_afresh()
            _kill_all(self._idle)
        quick = min(QUICK, self.timeout)
        answers = self._ask_all(requests, quick, -(-len(requests) // ITEMS_PER_WORKER))
        slow = [place for place, answer in enumerate(answers) if answer is None]
        share = min(self.timeout, 2 * self.timeout * self.size / max(1, len(slow)))
        if slow and share > quick:
            again = self._ask_all([requests[place] for place in slow], share, len(slow))
            for place, answer in zip(slow, again, strict=True):
                answers[place] = answer
        return answers

    def _ask_all(self, requests: list[dict[str, Any]], limit: float, threads: int) -> list[bool | None]:
        if min(threads, self.size) <= 1:
            return [self._ask(request, limit) for request in requests]
        executor = ThreadPoolExecutor(min(threads, self.size), thread_name_prefix="math-reward")
        try:
            return list(executor.map(lambda request: self._ask(request, limit), requests))
        finally:
            executor.shutdown(cancel_futures=True)

    def _ask(self, request: dict[str, Any], limit: float) -> bool | None:
        with self._slots:
            for _ in range(2):  # a worker may be shot from outside (out of memory): that is not the answer's fault
                worker = self._take()
                try:
                    answer = worker.ask(request, limit)
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
