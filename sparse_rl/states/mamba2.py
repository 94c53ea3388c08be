"""The scan of Mamba 2 (Bamba, Granite 4 hybrid, Nemotron-H, Falcon-H1): over a sequence, and step by step.

A head keeps a matrix M [N, P]. A token with input x, time step t, and its group's vectors B and C changes and reads it:

    M <- exp(t A) M + B (t x);    out = C M + D x

The functions stand in for transformers' functions of the same arguments. They compute in float64, and return the dtype
of their inputs. The state is float64.

Sizes in shapes: B sequences, S tokens, H heads of P channels, G groups of heads, N size of a channel's state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.states import convolution

Limits = tuple[float, float]  # of a time step
UNLIMITED = (0.0, float("inf"))


def _time_steps(dt: Tensor, bias: Tensor, limits: Limits) -> Tensor:
    return F.softplus(dt.double() + bias.double()).clamp(*limits)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
    dt_limit: Limits,
    return_final_states: bool,
    initial_states: Tensor | None = None,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan sequences, one chunk after the other. Returns the outputs [B, S, H, P], and the final state [B, H, P, N]
    if it is wanted.

    x : [B, S, H, P]
    dt : [B, S, H], time steps before bias, softplus and limits
    A, D, dt_bias : [H]
    B, C : [B, S, G, N]
    initial_states : None, because sequences are computed as a whole
    """
    assert dt_softplus, "the families' time steps are positive"
    assert initial_states is None, "a sequence is computed from its first token on"
    t, wide = _time_steps(dt, dt_bias, dt_limit), x.double()
    of_heads = [m.double().repeat_interleave(x.shape[2] // m.shape[2], dim=2) for m in (C, B)]
    inputs = [m.transpose(1, 2) for m in (*of_heads, wide * t[..., None], t * A.double())]  # [B, H, S, ...]
    state = wide.new_zeros(len(x), x.shape[2], B.shape[-1], x.shape[3])
    out = []
    for start in range(0, x.shape[1], chunk_size):
        q, k, v, d = (m[:, :, start : start + chunk_size] for m in inputs)
        total = d.cumsum(-1)
        decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        out.append((q * total.exp()[..., None]) @ state + ((q @ k.mT) * decay) @ v)
        to_end = (total[..., -1:] - total).exp()[..., None]
        state = state * total[..., -1, None, None].exp() + (k * to_end).mT @ v
    result = (torch.cat(out, dim=2).transpose(1, 2) + D.double()[:, None] * wide).to(x.dtype).contiguous()
    return (result, state.mT.contiguous()) if return_final_states else result


def step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    dt_softplus: bool,
    z: Tensor | None = None,
    limits: Limits,
    **_: Any,
) -> Tensor:
    """Scan one token x [B, H, P], and move the state [B, H, P, N] on in place. Returns [B, H, P].

    dt, dt_bias, D, A : [B, H, P], [H, P], [H, P] and [H, P, N], the same for all channels of a head
    B, C : [B, G, N]
    z : [B, H, P], a gate; a family that gates after the scan gets the same product here
    limits : the mixer's limits of a time step, which transformers' own step ignores
    """
    assert dt_softplus, "the families' time steps are positive"
    t = _time_steps(dt[..., 0], dt_bias[..., 0], limits)
    wide, B, C = x.double(), *(m.double().repeat_interleave(x.shape[1] // m.shape[1], dim=1) for m in (B, C))
    decay = (t * A[:, 0, 0].double()).exp()[..., None, None]
    state.copy_(state.double() * decay + (wide * t[..., None])[..., None] * B[:, :, None])
    out = ((state.double() @ C[..., None])[..., 0] + D[:, :1].double() * wide).to(x.dtype)
    return out if z is None else out * F.silu(z)


def _unfused(*_: Any, **__: Any) -> None:
    """Decline, as on a CPU: the kernel reads the weights of projections beside their adapters."""


STEP = "mamba2_selective_state_update"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **convolution.FUNCTIONS,
    "mamba2_split_conv1d_scan_combined": _unfused,
    "mamba2_chunk_scan": scan,
    STEP: step,
}
"""transformers' name of each function that a mixer uses -> the function that stands in for it"""


def functions(mixer: Any, exact: bool) -> dict[str, Callable[..., Any]]:
    """Return those of FUNCTIONS with which a mixer computes; `exact` is True for float32 on a CPU."""
    limits = tuple(mixer.time_step_limit)
    own: dict[str, Callable[..., Any]] = {
        "mamba2_split_conv1d_scan_combined": _unfused,
        STEP: partial(step, limits=limits),
    }
    if exact:
        return FUNCTIONS | own
    return own if limits != UNLIMITED else {name: f for name, f in own.items() if name != STEP}


def numbers(mixer: Any) -> int:
    """Return how many numbers the recurrent state of one sequence has."""
    return int(mixer.num_heads * mixer.head_dim * mixer.ssm_state_size)
