"""`soft_overlong`: TRL's soft overlong punishment (DAPO, eq. 13)."""

from collections.abc import Sequence
from typing import Any

from rewards.text import require_column


class SoftOverlongReward:
    """0.0 up to max_completion_len - soft_punish_cache tokens, then falling evenly to -1.0 at max_completion_len.

    Parameters
    ----------
    max_completion_len : int
        Tokens. Normally the recipe's max_completion_length.
    soft_punish_cache : int
        Tokens before that limit in which the punishment sets in; 0 punishes only what is longer than the limit.
    """

    __name__ = "soft_overlong"

    def __init__(self, *, max_completion_len: int, soft_punish_cache: int) -> None:
        if isinstance(max_completion_len, bool) or not isinstance(max_completion_len, int) or max_completion_len < 1:
            raise ValueError(f"max_completion_len must be a whole number from 1 up, not {max_completion_len!r}")
        if (
            isinstance(soft_punish_cache, bool)
            or not isinstance(soft_punish_cache, int)
            or not 0 <= soft_punish_cache <= max_completion_len
        ):
            raise ValueError(
                f"soft_punish_cache must be a whole number from 0 to max_completion_len ({max_completion_len}), "
                f"not {soft_punish_cache!r}"
            )
        self.max_completion_len, self.soft_punish_cache = max_completion_len, soft_punish_cache

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        require_column("soft_overlong", "completion_ids", completion_ids, completions, list(columns))
        from trl.rewards import get_soft_overlong_punishment

        punishment = get_soft_overlong_punishment(self.max_completion_len, self.soft_punish_cache)
        return punishment(completion_ids=completion_ids)
