"""The estimators of an evaluation, over numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate of pass@k from `correct` of n samples: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and its standard error over independent values; None for too few."""
    if not values:
        return None, None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
