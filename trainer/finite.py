"""Is what a run has learned still a number? Its loss, its gradient norm, and the weights that it is about to keep.

No step waits for the device because of it: loss and norm are looked at when they are logged, and weights when they
are written. A loss between two logs is in their sum, and a gradient that is no number makes the weights none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

LOGGED = ("loss", "train_loss", "grad_norm")


def not_finite_metric(logs: Mapping[str, Any]) -> str | None:
    """The first metric that a run lives by and that is no number; None where all are."""
    return next((f"{name} is {logs[name]}" for name in LOGGED if not math.isfinite(logs.get(name, 0.0))), None)


@torch.no_grad()
def not_finite_weight(weights: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first weight whose norm, in float32, is no number: what is computed with it is none either.

    Under ZeRO-3 a process looks at its own part. All are reduced where they lie, and one list comes back.
    """
    parts = [(name, getattr(weight, "ds_tensor", weight)) for name, weight in weights if weight.is_floating_point()]
    norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for _, part in parts]
    finite = torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().tolist()
    return next((f"{name} is not finite" for (name, _), good in zip(parts, finite, strict=True) if not good), None)
