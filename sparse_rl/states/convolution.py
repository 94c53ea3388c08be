"""The short convolution of LFM2, which also precedes the other kinds of mixers: over a sequence, and step by step.

The functions stand in for transformers' functions of the same arguments. They compute in float64, and return the dtype
of their inputs; a scan over a sequence and a step thus round alike.

Sizes in shapes: B sequences, C channels, S tokens, K taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN


def scan(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any) -> Tensor:
    """Convolve each channel of x [B, C, S] with the weights [C, K] of the last K tokens. Returns [B, C, S]."""
    wide = F.pad(x.double(), (weight.shape[-1] - 1, 0))
    out = F.conv1d(wide, weight.double()[:, None], None if bias is None else bias.double(), groups=x.shape[1])
    return _activated(out, activation).to(x.dtype)


def step(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Convolve one token x [B, C, 1] with the inputs before it, `state` [B, C, K], which is moved on in place."""
    state.copy_(torch.cat([state, x], dim=-1)[..., -state.shape[-1] :])
    out = (state[..., -weight.shape[-1] :].double() * weight.double()).sum(-1, keepdim=True)
    out = out if bias is None else out + bias.double()[:, None]
    return _activated(out, activation).to(x.dtype)


def _activated(out: Tensor, activation: str | None) -> Tensor:
    return out if activation is None else ACT2FN[activation](out)


FUNCTIONS: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": scan, "causal_conv1d_update": step}
"""transformers' name of each function that a mixer uses -> the function that stands in for it"""


def functions(mixer: Any, exact: bool) -> dict[str, Callable[..., Any]]:
    """Return those of FUNCTIONS with which a mixer computes; `exact` is True for float32 on a CPU."""
    return FUNCTIONS if exact else {}


def numbers(mixer: Any) -> int:
    """Return how many numbers the recurrent state of one sequence has."""
    return 0
