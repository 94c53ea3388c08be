"""Limits the time of each comparison of answers, and of all comparisons of a call. math_worker.py makes them."""

import json
import os
from typing import Any

from rewards.workers import WorkerPool

STALL, GRACE = 10, 5.0  # a worker that does not answer within STALL * limit + GRACE seconds is killed
ITEMS_PER_WORKER = 8  # fewer requests do not justify starting another worker
QUICK = 0.5  # limit in seconds for a request in the first pass; slower requests run again in a second pass


class MathPool(WorkerPool):
    """A pool of at most `size` workers, which are started when they are needed.

    In a first pass, each request may take QUICK seconds of processor time. Slower requests run again in a second pass,
    where they share `size` * 2 * `timeout` seconds equally, with at most `timeout` seconds each. Therefore requests
    that would run forever neither delay a call for long nor affect other requests.
    """

    def __init__(self, size: int, timeout: float) -> None:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        super().__init__("math_worker", size, {**os.environ, **threads})
        self.timeout = timeout

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return MathPool, (self.size, self.timeout)

    def answers(self, requests: list[dict[str, Any]]) -> list[bool | None]:
        """Return True, False or None for each request. None: the request exceeded its limit, or two workers died."""
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
        """Return the answers of workers. Each request may take `limit` seconds of processor time."""

        def answer(request: dict[str, Any]) -> bool | None:
            message = json.dumps({**request, "limit": limit}).encode() + b"\n"
            reply = self.ask(message, STALL * limit + GRACE)
            return None if reply is None else reply["ok"]

        return self.map(answer, requests, threads)
