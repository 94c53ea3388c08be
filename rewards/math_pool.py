"""Keeps a pool of math workers alive between calls, and limits the time of each request and of a whole call.

The pool may be called from any thread, from daemonic processes and after a fork; a forked process starts its own
workers. The protocol is described in `math_worker.py`.
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

# The package is imported from this file's location, regardless of sys.path; -P excludes the working directory.
WORKER = (
    "import sys; sys.path.insert(0, sys.argv[1]); from rewards.math_worker import main; del sys.path[0]; main()",
    str(Path(__file__).resolve().parents[1]),
)
START_LIMIT = 120.0  # seconds for starting the interpreter and its imports; no request is charged for this time
STALL, GRACE = 10, 5.0  # a worker that does not answer within STALL * limit + GRACE seconds is killed
ITEMS_PER_WORKER = 8  # fewer requests do not justify starting another worker
QUICK = 0.5  # limit in seconds for a request in the first pass; slower requests run again in a second pass


class WorkerDied(Exception):
    """Raised if a worker ended before it answered, although the pool did not kill it."""


class Worker:
    """One worker process and the socket that connects to it. A worker handles one request at a time."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.socket, worker_end = socket.socketpair()
        with worker_end:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", *WORKER],
                stdin=worker_end.fileno(),
                stdout=worker_end.fileno(),
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # only the parent handles Ctrl-C
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
        """Return the worker's answer. None means that the request took more than `limit` seconds of processor time.

        Raises TimeoutError if the worker does not answer within STALL * limit + GRACE seconds, and WorkerDied if it
        died.
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
        """Kill the worker if this process started it, and close the socket."""
        self.replies.close()
        self.socket.close()
        if self.owner == os.getpid():
            with suppress(ProcessLookupError):  # also kills its child, which is in the same session
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        else:
            self.process.returncode = 0  # the child of another process, which this process cannot wait for


def _kill_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().kill()


class MathPool:
    """A pool of at most `size` workers, which are started when they are needed.

    In a first pass, each request may take QUICK seconds of processor time. Slower requests run again in a second pass,
    where they share `size` * 2 * `timeout` seconds equally, with at most `timeout` seconds each. Therefore requests
    that would run forever neither delay a call for long nor affect other requests.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self._idle: list[Worker] = []
        self._start_afresh()
        weakref.finalize(self, _kill_all, self._idle)  # when the pool is deleted or the interpreter exits

    def __reduce__(self) -> tuple[type, tuple[int, float]]:
        return MathPool, (self.size, self.timeout)  # workers are not pickled

    def _start_afresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self.size)

    def map(self, requests: list[dict[str, Any]]) -> list[bool | None]:
        """Return True, False or None for each request. None: the request exceeded its limit, or two workers died."""
        if self._pid != os.getpid():  # after a fork: the workers belong to the parent, and locks may be held
            self._start_afresh()
            _kill_all(self._idle)
        quick = min(QUICK, self.timeout)
        answers = self._ask_all(requests, quick, -(-len(requests) // ITEMS_PER_WORKER))
        slow = [place for place, answer in enumerate(answers) if answer is None]
        slow_limit = min(self.timeout, 2 * self.timeout * self.size / max(1, len(slow)))
        if slow and slow_limit > quick:
            slow_answers = self._ask_all([requests[place] for place in slow], slow_limit, len(slow))
            for place, answer in zip(slow, slow_answers, strict=True):
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
            for _ in range(2):  # a worker may be killed from outside (out of memory), independently of the request
                worker = self._take()
                try:
                    answer = worker.ask(request, limit)
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
