r"""The reward `boxed` checks whether the content of the last ``\boxed{...}`` equals the gold answer as a string."""

from collections.abc import Sequence
from typing import Any

from rewards.text import completion_text, gold_text, last_boxed, require_column


class BoxedReward:
    r"""Scores 1.0 if the content of the last ``\boxed{...}``, without outer white space, is the gold answer, else 0.0.

    A box that is never closed scores 0.0. If there is no gold answer (None or empty), the reward is None.
    """

    __name__ = "boxed"

    def __call__(
        self, completions: Sequence[Any], answer: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        golds = map(gold_text, require_column("boxed", "answer", answer, completions, columns))
        boxes = (last_boxed(completion_text(completion)) for completion in completions)
        return [
            None if gold is None else float(box is not None and box.strip() == gold)
            for gold, box in zip(golds, boxes, strict=True)
        ]
