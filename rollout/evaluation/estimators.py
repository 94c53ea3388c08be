"""Estimators of an evaluation, computed from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of pass@k from c = `correct` of n samples: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean of independent values and its standard error; each is None if there are too few values."""
    if not values:
        return None, None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
