"""Estimators of an evaluation, computed from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k if c = `correct` of n samples are correct (Chen et al. 2021).

    It is 1 - C(n - c, k) / C(n, k), where C(a, b) is the number of ways to choose b of a samples.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of independent values and the standard error of the mean.

    The mean is None if there are no values, and the standard error is None for fewer than two values.
    """
    if not values:
        return None, None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))
