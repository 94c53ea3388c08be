r"""The reward `math` checks whether the final answer has the same value as the gold answer, according to math-verify.

The answer of a completion is the content of its last ``\boxed{...}``, or else the answer that math-verify finds at the
end of the text. math-verify uses SymPy, which can hang, and SIGALRM, which works only in the main thread. Therefore
math-verify runs in worker processes (`math_pool.py`), which are killed if a comparison exceeds its time limit. Known
errors of math-verify are corrected in `math_spelling.py` and `math_guards.py`, and are listed in docs/rewards.md.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rewards.math_pool import MathPool
from rewards.text import BOX, completion_text, gold_text, last_boxed, require_column, require_whole

logger = logging.getLogger(__name__)

ANSWER_LIMIT = 2_000  # characters; a longer text is not an answer
TAIL_LIMIT = 10_000  # number of characters that are read at the end of a text without a box
WARNING_LIMIT = 20  # maximum number of gold answers named in the log; the metric counts all
CACHE_LIMIT = 100_000  # maximum number of gold answers in the cache


class MathReward:
    """Scores 1.0 if the answer equals the gold answer, else 0.0. Scores None if the gold answer cannot be parsed.

    timeout : seconds of processor time for one comparison; a comparison that takes longer scores 0.0. Comparisons that
        need more than half a second are run again after all others, and share 2 * `timeout` seconds per worker
    workers : maximum number of worker processes, of about 100 MB each; they start on first use
    require_boxed : if there is no box, True scores 0.0, and False looks for an answer in the text

    If `log_metric` is passed, each call logs `rewards/unparseable_gold`, the number of completions with reward None,
    and `rewards/math_timeout`, the number of completions that scored 0.0 because the comparison took too long.
    """

    __name__ = "math"

    def __init__(self, *, timeout: float = 5.0, workers: int = 4, require_boxed: bool = False) -> None:
        if type(timeout) not in (int, float) or not 0 < timeout < float("inf"):
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        if not isinstance(require_boxed, bool):
            raise ValueError(f"require_boxed must be true or false, not {require_boxed!r}")
        self.timeout, self.workers, self.require_boxed = timeout, require_whole("workers", workers, 1), require_boxed
        self._parseable: dict[str, bool] = {}  # gold answer -> True if it can be parsed
        self._reported: set[str] = set()
        self._pool = MathPool(workers, timeout)

    def __call__(
        self,
        completions: Sequence[Any],
        answer: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        golds = self._golds(require_column("math", "answer", answer, completions, columns))
        answers = [self._answer(completion_text(completion)) for completion in completions]

        # Many completions of a group have the same answer, so each distinct (gold, answer) pair is compared only once.
        pairs = list(dict.fromkeys((g, *a) for g, a in zip(golds, answers, strict=True) if g and a))
        requests = [{"op": "score", "gold": gold, "answer": [kind, response]} for gold, kind, response in pairs]
        verdicts = dict(zip(pairs, self._pool.answers(requests), strict=True))

        rewards: list[float | None] = []
        timeouts = 0
        for gold, response in zip(golds, answers, strict=True):
            verdict = verdicts[(gold, *response)] if gold and response else False
            rewards.append(float(verdict or False) if gold else None)
            timeouts += verdict is None
        if log_metric is not None:  # on every call, so that zeros count in TRL's averages
            log_metric("rewards/unparseable_gold", float(rewards.count(None)))
            log_metric("rewards/math_timeout", float(timeouts))
        return rewards

    def _answer(self, text: str) -> tuple[str, str] | None:
        """Return the answer in a completion as ("box" or "text", string). None means that there is no answer."""
        if BOX.search(text):
            box = (last_boxed(text) or "").strip()
            return ("box", box) if 0 < len(box) <= ANSWER_LIMIT else None
        tail = text[-TAIL_LIMIT:].strip()
        return ("text", tail) if tail and not self.require_boxed else None

    def _golds(self, answer: Sequence[Any]) -> list[str | None]:
        """Return the gold answers as bare text, or None for a gold answer that cannot be parsed, with a warning."""
        texts = [gold_text(gold) for gold in answer]
        if len(self._parseable) > CACHE_LIMIT:
            self._parseable = {}
        parseable = self._parseable  # a local reference, because another thread may replace the cache
        unparsed = [text for text in dict.fromkeys(texts) if text and text not in parseable]
        parseable.update((text, False) for text in unparsed if len(text) > TAIL_LIMIT)
        unparsed = [text for text in unparsed if text not in parseable]
        parsed = self._pool.answers([{"op": "gold", "gold": text} for text in unparsed])
        parseable.update((text, bool(ok)) for text, ok in zip(unparsed, parsed, strict=True))
        golds = [text if text and parseable[text] else None for text in texts]
        for raw, gold in zip(answer, golds, strict=True):
            if gold is None:
                self._report(f"{raw!r:.200}")
        return golds

    def _report(self, gold: str) -> None:
        if gold in self._reported or len(self._reported) >= WARNING_LIMIT:
            return
        self._reported.add(gold)
        logger.warning(
            "math reward: the gold answer %s cannot be parsed; its completions get no reward (None). Write it as "
            "LaTeX, put words in \\text{...}, or use the 'boxed' reward for exact text.%s",
            gold,
            " Further ones are not shown, but counted: rewards/unparseable_gold."
            * (len(self._reported) == WARNING_LIMIT),
        )
