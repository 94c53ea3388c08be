r"""`boxed`: is the last ``\boxed{...}`` the gold answer, character for character? No mathematics, no parser."""

from collections.abc import Sequence
from typing import Any

from rewards.text import completion_text, gold_text, last_boxed, require_column


class BoxedReward:
    r"""1.0 where the content of the last ``\boxed{...}`` equals the gold answer, both stripped; else 0.0.

    A box that never closes scores 0.0. Where there is no gold answer (None or empty) the reward is None.
    """

    __name__ = "boxed"

    def __call__(
        self, completions: Sequence[Any], answer: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        require_column("boxed", "answer", answer, completions, list(columns))
        assert answer is not None
        rewards: list[float | None] = []
        for completion, gold in zip(completions, map(gold_text, answer), strict=True):
            said = last_boxed(completion_text(completion))
            rewards.append(None if gold is None else float(said is not None and said.strip() == gold))
        return rewards
