"""The reward `repetition` is TRL's penalty on repeated n-grams of tokens (Demystifying Long CoT, appendix C.2)."""

from collections.abc import Sequence
from typing import Any

from rewards.text import require_column, require_whole


class RepetitionReward:
    """Punishes repetition: the reward is max_penalty times the fraction of the completion's n-grams that are repeats.

    ngram_size : number of tokens per n-gram; a completion with fewer tokens scores 0.0
    max_penalty : lowest possible reward, at most 0
    """

    __name__ = "repetition"

    def __init__(self, *, ngram_size: int = 3, max_penalty: float = -1.0) -> None:
        if type(max_penalty) not in (int, float) or not -float("inf") < max_penalty <= 0:
            raise ValueError(f"max_penalty must be a number <= 0, not {max_penalty!r}")
        self.ngram_size, self.max_penalty = require_whole("ngram_size", ngram_size, 1), max_penalty

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        rows = require_column("repetition", "completion_ids", completion_ids, completions, columns)
        # Tensors hash by identity, so n-grams of tensors would never repeat.
        ids = [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
        from trl.rewards import get_repetition_penalty_reward

        return get_repetition_penalty_reward(self.ngram_size, self.max_penalty)(completion_ids=ids)
