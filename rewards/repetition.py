"""`repetition`: TRL's penalty on repeated n-grams of tokens (Demystifying Long CoT, appendix C.2)."""

from collections.abc import Sequence
from typing import Any

from rewards.text import require_column, require_whole


class RepetitionReward:
    """max_penalty times the fraction of the completion's n-grams that are repeats; 0.0 where none is.

    ngram_size : tokens per n-gram; a completion shorter than this scores 0.0
    max_penalty : the most negative reward, never above 0
    """

    __name__ = "repetition"

    def __init__(self, *, ngram_size: int = 3, max_penalty: float = -1.0) -> None:
        if type(max_penalty) not in (int, float) or not -float("inf") < max_penalty <= 0:
            raise ValueError(f"max_penalty must be a number from 0 down, not {max_penalty!r}")
        self.ngram_size, self.max_penalty = require_whole("ngram_size", ngram_size, 1), max_penalty

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        given = require_column("repetition", "completion_ids", completion_ids, completions, columns)
        # Tensors hash by identity: no n-gram of theirs would ever repeat.
        ids = [row.tolist() if hasattr(row, "tolist") else list(row) for row in given]
        from trl.rewards import get_repetition_penalty_reward

        return get_repetition_penalty_reward(self.ngram_size, self.max_penalty)(completion_ids=ids)
