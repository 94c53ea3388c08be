"""The fits of a compaction (AM section 3, appendices A.2 and C.2), differentiable and well posed.

Of one kv head: n reference queries, a block of N entries with logits s + b (scaling and earlier biases in them), of
which t are kept, the set S. All functions take any leading axes, and compute in the dtype they are given: float64.

The departures from the paper are the ridges and the steps of the weights. The paper's own solvers are in
`paper_weights` and `paper_values`: they turn a rounding of 1e-6 in the queries into 0.3 nats, so that no trainer can
follow a sampler that uses them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS, POWER = 30, 12  # of the weights' descent; of the power iteration that finds its step (ours)
JITTER = 1e-13  # of the diagonal, where keys repeat each other
PURSUIT_RIDGE = 0.1  # of the weights of pursued keys (ours): no KL that was seen is higher, and rounding shows least


def features(logits: Tensor) -> tuple[Tensor, Tensor]:
    """phi = exp(logits - their maximum over entries) [..., n, N], and the mass, its sum [..., n] (A.2).

    An entry with a logit of -inf has no part.
    """
    phi = (logits - logits.amax(-1, keepdim=True)).exp()
    return phi, phi.sum(-1)


def fit_weights(kept: Tensor, mass: Tensor, bound: float) -> Tensor:
    """w = argmin |kept w - mass|^2 with |log w| <= bound (AM equation for beta): [..., t].

    kept : phi of S [..., n, t]; mass [..., n]

    By accelerated projected gradient descent from `flat_weights` (ours): the paper starts from an unbounded least
    squares and takes two steps, which is worse than no bias where many entries stay.
    """
    return descended(kept, mass, flat_weights(kept, mass), bound, STEPS)


def flat_weights(kept: Tensor, mass: Tensor) -> Tensor:
    """The one weight that fits the mass best, for every entry: [..., t]."""
    total = kept.sum(-1)
    flat = (total * mass).sum(-1, keepdim=True) / total.square().sum(-1, keepdim=True)
    return flat.expand(*kept.shape[:-2], kept.shape[-1])


def descended(kept: Tensor, mass: Tensor, start: Tensor, bound: float, steps: int) -> Tensor:
    """`steps` of FISTA on |kept w - mass|^2 within the bounds, each of 1 / the greatest eigenvalue."""
    low, high = math.exp(-bound), math.exp(bound)
    gram = kept.mT @ kept
    wanted = (kept.mT @ mass[..., None])[..., 0]
    direction = torch.ones_like(wanted)
    for _ in range(POWER):
        direction = (gram @ direction[..., None])[..., 0]
        direction = direction / direction.norm(dim=-1, keepdim=True)
    step = 1 / (1.02 * (gram @ direction[..., None])[..., 0].norm(dim=-1, keepdim=True))
    weights = ahead = start.clamp(low, high)
    momentum = 1.0
    for _ in range(steps):
        following = (ahead - step * ((gram @ ahead[..., None])[..., 0] - wanted)).clamp(low, high)
        next_momentum = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = following + (momentum - 1) / next_momentum * (following - weights)
        weights, momentum = following, next_momentum
    return weights


def pursuit_weights(kept: Tensor, mass: Tensor, bound: float) -> Tensor:
    """w = argmin |kept w - mass|^2 + a ridge towards `flat_weights`, clamped to |log w| <= bound: [..., t].

    Orthogonal matching pursuit ends with the least squares alone (A.2). Where queries are hardly more than entries,
    rounding decides its result. The ridge makes it a function of its input.
    """
    weights = fit_values(kept, mass[..., None], flat_weights(kept, mass)[..., None], PURSUIT_RIDGE)[..., 0]
    return weights.clamp(math.exp(-bound), math.exp(bound))


def fit_values(x: Tensor, y: Tensor, values: Tensor, ridge: float) -> Tensor:
    """V + argmin over D of |x D - (y - x V)|^2 + ridge mean_j |x_j|^2 |D|^2: [..., t, D].

    x : attention over S under the new biases [..., n, t]; y : the output of the whole block [..., n, D];
    values : V, what S had [..., t, D]

    The ridge shrinks towards the values that were there. The paper tried one that shrinks towards zero, which hurt, and
    has none (C.2).
    """
    missing = y - x @ values
    n, t = x.shape[-2:]
    scale = ridge * x.square().sum(-1).mean(-1)[..., None, None]
    eye = torch.eye(min(n, t), dtype=x.dtype, device=x.device)
    if n < t:  # the same minimum, with a system of n unknowns instead of t
        factor = torch.linalg.cholesky(x @ x.mT + scale * eye)
        return values + x.mT @ torch.cholesky_solve(missing, factor)
    factor = torch.linalg.cholesky(x.mT @ x + scale * eye)
    return values + torch.cholesky_solve(x.mT @ missing, factor)


# ---- the paper's own, for comparison --------------------------------------------------------------------------------


def paper_weights(kept: Tensor, mass: Tensor, bound: float, steps: int) -> Tensor:
    """An unbounded least squares, clamped to |log w| <= bound, and `steps` projected ones (algorithm 3).

    Of keys chosen by attention: bound 3, 2 steps; of pursued keys: bound 7, no step (C.2).
    """
    start = paper_values(kept, mass[..., None])[..., 0]
    return descended(kept, mass, start, bound, steps)


def paper_values(x: Tensor, y: Tensor) -> Tensor:
    """argmin over V of |x V - y|^2, of several the least; on the CPU, where torch solves systems without full rank."""
    return torch.linalg.lstsq(x.cpu(), y.cpu(), driver="gelsd").solution.to(x.device)
