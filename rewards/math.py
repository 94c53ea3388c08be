r"""The reward `math` checks whether the final answer has the same value as the gold answer, according to math-verify.

math-verify uses SymPy, which can hang, and SIGALRM, which works only in the main thread. So it runs in worker processes
(math_worker.py), which are killed if a comparison exceeds its time limit.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from rewards.text import (
    BOX,
    HEADING,
    MARK,
    final_parts,
    gold_text,
    last_boxed,
    require_column,
    require_seconds,
    require_whole,
)
from rewards.workers import WorkerPool

logger = logging.getLogger(__name__)

ANSWER_LIMIT = 2_000  # characters; a longer text is not an answer
TAIL_LIMIT = 10_000  # number of characters that are read at the end of a text without a box
WARNING_LIMIT = 20  # maximum number of gold answers named in the log; the metric counts all
STALL, GRACE = 10, 60.0  # a worker that does not answer within STALL * limit + GRACE seconds is killed
ITEMS_PER_WORKER = 32  # 0.1 s of work; to start a worker takes 0.6 s of processor time
QUICK = 0.5  # seconds for a request in the first pass


class MathReward:
    """Scores 1.0 if the answer equals the gold answer, else 0.0. Scores None if the gold answer cannot be parsed.

    timeout : seconds of processor time for one comparison; a comparison that takes longer scores 0.0. Comparisons that
        need more than half a second are run again after all others, and share 2 * `timeout` seconds per worker
    workers : maximum number of worker processes, of about 100 MB each; they start on first use
    require_boxed : if there is no box, True scores 0.0, and False looks for an answer in the text

    docs/rewards.md names the metrics that a call logs.
    """

    __name__ = "math"
    golds = ("answer",)

    def __init__(self, *, timeout: float = 5.0, workers: int = 4, require_boxed: bool = False) -> None:
        if not isinstance(require_boxed, bool):
            raise ValueError(f"require_boxed must be true or false, not {require_boxed!r}")
        self.timeout, self.workers = require_seconds("timeout", timeout), require_whole("workers", workers, 1)
        self.require_boxed = require_boxed
        self._parseable: dict[str, bool] = {}  # gold answer -> True if it can be parsed
        self._reported: set[str] = set()
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._pool = WorkerPool("math_worker", workers, {**os.environ, **threads})

    def __call__(
        self,
        completions: Sequence[Any],
        answer: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        golds = self._golds(require_column("math", "answer", answer, completions, columns))
        answers = list(map(self._answer, final_parts(completions, columns)))

        # Many completions of a group have the same answer, so each distinct (gold, answer) pair is compared only once.
        keys = [(gold, *stated) if gold and stated else None for gold, stated in zip(golds, answers, strict=True)]
        pairs = [key for key in dict.fromkeys(keys) if key]
        requests = [{"op": "score", "gold": gold, "answer": [kind, response]} for gold, kind, response in pairs]
        verdicts: dict[Any, bool | None] = dict(zip(pairs, self._verdicts(requests), strict=True)) | {None: False}
        rewards = [float(verdicts[key] or False) if gold else None for gold, key in zip(golds, keys, strict=True)]
        if log_metric is not None:  # on every call, so that zeros count in TRL's averages
            log_metric("rewards/unparseable_gold", float(rewards.count(None)))
            log_metric("rewards/math_timeout", float(sum(verdicts[key] is None for key in keys)))
        return rewards

    def _answer(self, text: str) -> tuple[str, str] | None:
        """Return the answer in a text as ("box", "line" or "text", string). None means that there is no answer."""
        kind, answer = "box", last_boxed(text, BOX if self.require_boxed else MARK)
        if answer is None and not self.require_boxed:
            tail = text[-TAIL_LIMIT:]
            starts = [heading.start(1) for heading in HEADING.finditer(tail)]
            kind, answer = ("line", tail[starts[-1] :]) if starts else ("text", tail)
        answer = (answer or "").strip()
        return (kind, answer) if 0 < len(answer) <= (ANSWER_LIMIT if kind == "box" else TAIL_LIMIT) else None

    def _golds(self, answer: Sequence[Any]) -> list[str | None]:
        """Return the gold answers as bare text, or None for a gold answer that cannot be parsed, with a warning."""
        texts = [gold_text(gold) for gold in answer]
        kept = self._parseable
        new = [text for text in dict.fromkeys(texts) if text and text not in kept and len(text) <= TAIL_LIMIT]
        parsed = self._verdicts([{"op": "gold", "gold": text} for text in new])
        # A gold that took too long (None) is tried again in the next call.
        kept.update((text, ok) for text, ok in zip(new, parsed, strict=True) if ok is not None)
        golds = [text if text and kept.get(text) else None for text in texts]
        for raw, gold in zip(answer, golds, strict=True):
            shown = "" if gold else f"{raw!r:.200}"
            if shown and shown not in self._reported and len(self._reported) < WARNING_LIMIT:
                self._reported.add(shown)
                logger.warning(
                    "math reward: the gold answer %s cannot be parsed; its completions get no reward (None), as "
                    "rewards/unparseable_gold counts. Write it as LaTeX, put words in \\text{...}, or use the 'boxed' "
                    "reward for exact text.",
                    shown,
                )
        return golds

    def _verdicts(self, requests: list[dict[str, Any]]) -> list[bool | None]:
        """Return True, False or None for each request. None: the request exceeded its limit, or two workers died.

        Requests that need more than QUICK seconds run again in a second pass, where they share 2 * `timeout` *
        `workers` seconds: those that would run forever neither delay a call for long nor affect others.
        """
        quick = min(QUICK, self.timeout)
        verdicts = self._ask(requests, quick, -(-len(requests) // ITEMS_PER_WORKER))
        slow = [place for place, verdict in enumerate(verdicts) if verdict is None]
        limit = min(self.timeout, 2 * self.timeout * self.workers / max(1, len(slow)))
        if not slow or limit <= quick:
            return verdicts
        again = iter(self._ask([requests[place] for place in slow], limit, len(slow)))
        return [next(again) if verdict is None else verdict for verdict in verdicts]

    def _ask(self, requests: list[dict[str, Any]], limit: float, threads: int) -> list[bool | None]:
        def verdict(request: dict[str, Any]) -> bool | None:
            message = json.dumps({**request, "limit": limit}).encode() + b"\n"
            return (self._pool.ask(message, STALL * limit + GRACE) or {"ok": None})["ok"]

        return self._pool.map(verdict, requests, threads)
