"""Checks that the loss, the gradient norm and the weights of a run are finite.

The checks never make a step wait for the device: loss and norm are checked when they are logged, and weights when they
are written. No NaN is missed: the logged loss is a sum over all steps since the last log, and a NaN gradient makes the
weights NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

LOGGED = ("loss", "train_loss", "grad_norm")


def not_finite_metric(logs: Mapping[str, Any]) -> str | None:
    """Describe the first logged loss or gradient norm that is not finite. None means that all are finite."""
    return next((f"{name} is {logs[name]}" for name in LOGGED if not math.isfinite(logs.get(name, 0.0))), None)


@torch.no_grad()
def not_finite_weight(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """Describe the first weight whose float32 norm is not finite. None means that all are finite.

    Under ZeRO-3 each process checks its own part of the weights.
    """
    parts = [(name, getattr(weight, "ds_tensor", weight)) for name, weight in weights if weight.is_floating_point()]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for _, part in parts]
    finite = torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().tolist()
    return next((f"{name} is not finite" for (name, _), good in zip(parts, finite, strict=True) if not good), None)
