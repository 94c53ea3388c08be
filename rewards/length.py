"""The reward `soft_overlong` is TRL's soft overlong punishment (DAPO, eq. 13)."""

from collections.abc import Sequence
from typing import Any

from rewards.text import require_column, require_whole


class SoftOverlongReward:
    """Punishes completions whose length is close to the limit.

    The reward is 0.0 up to max_completion_len - soft_punish_cache tokens, and then falls linearly to -1.0 at
    max_completion_len tokens.

    max_completion_len : limit on the number of tokens, normally the recipe's max_completion_length
    soft_punish_cache : number of tokens before the limit at which the punishment begins; 0 punishes only completions
        that are longer than the limit
    """

    __name__ = "soft_overlong"

    def __init__(self, *, max_completion_len: int, soft_punish_cache: int) -> None:
        self.max_completion_len = most = require_whole("max_completion_len", max_completion_len, 1)
        self.soft_punish_cache = require_whole("soft_punish_cache", soft_punish_cache, 0, most, "max_completion_len")

    def __call__(
        self, completions: Sequence[Any], completion_ids: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        ids = require_column("soft_overlong", "completion_ids", completion_ids, completions, columns)
        from trl.rewards import get_soft_overlong_punishment

        return get_soft_overlong_punishment(self.max_completion_len, self.soft_punish_cache)(completion_ids=ids)
