"""The gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid): over a sequence, and step by step.

A head keeps a matrix M [K, V]. A token with key k, value v, decay exp(g) and rate b decays it, and replaces what it
holds under the key by a mixture with the value; the query reads it:

    M <- exp(g) M;    M <- M + b k (v - k M);    out = q M

The functions stand in for transformers' functions of the same arguments. They compute in float64, and return the dtype
of their inputs, but the state in float64.

Sizes in shapes: B sequences, S tokens, H heads, K and V dimensions of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse_rl.states import convolution

CHUNK = 64  # tokens whose effect on one another is solved for at once


def _inputs(query: Tensor, key: Tensor, *others: Tensor) -> list[Tensor]:
    """Return all inputs [B, H, S, ...] in float64; queries and keys have unit length, and queries the factor K^-0.5."""
    wide = [x.double().transpose(1, 2) for x in (query, key, *others)]
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in wide[:2])
    return [query * query.shape[-1] ** -0.5, key, *wide[2:]]


def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the rule over sequences, one chunk after the other. Returns (outputs [B, S, H, V], final state or None).

    query, key : [B, S, H, K]
    value : [B, S, H, V]
    g, beta : [B, S, H], log of the decay, and the rate
    initial_state : None, because sequences are computed as a whole
    """
    assert use_qk_l2norm_in_kernel, "the families normalise queries and keys"
    assert initial_state is None, "a sequence is computed from its first token on"
    wide = _inputs(query, key, value, g, beta)
    state = wide[0].new_zeros(*wide[1].shape[:2], key.shape[-1], value.shape[-1])
    out = []
    for start in range(0, query.shape[1], CHUNK):
        q, k, v, d, b = (x[:, :, start : start + CHUNK] for x in wide)
        total = d.cumsum(-1)
        decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        from_start, to_end = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
        kb = k * b[..., None]
        right = torch.cat([v * b[..., None], kb * from_start], dim=-1)
        solved = torch.linalg.solve_triangular((kb @ k.mT) * decay, right, upper=False, unitriangular=True)
        new = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ state
        out.append((q * from_start) @ state + ((q @ k.mT) * decay) @ new)
        state = state * total[..., -1, None, None].exp() + (k * to_end).mT @ new
    return torch.cat(out, dim=2).transpose(1, 2).to(value.dtype), state if output_final_state else None


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the rule for one token, S = 1, after `initial_state` [B, H, K, V]. Returns (output, new state)."""
    q, k, v, d, b = (x[:, :, 0] for x in _inputs(query, key, value, g, beta))
    state = initial_state.double() * d.exp()[..., None, None]
    new = (v - (k[..., None, :] @ state)[..., 0, :]) * b[..., None]
    state = state + k[..., :, None] * new[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :][:, None].to(value.dtype), state


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **convolution.FUNCTIONS,
    "torch_chunk_gated_delta_rule": scan,
    "torch_recurrent_gated_delta_rule": step,
}
"""transformers' name of each function that a mixer uses -> the function that stands in for it"""


def functions(mixer: Any, exact: bool) -> dict[str, Callable[..., Any]]:
    """Return those of FUNCTIONS with which a mixer computes; `exact` is True for float32 on a CPU."""
    return FUNCTIONS if exact else {}


def numbers(mixer: Any) -> int:
    """Return how many numbers the recurrent state of one sequence has."""
    return int(mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim)
