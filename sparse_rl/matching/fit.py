"""The fits of a compaction (AM section 3, appendices A.2 and C.2), differentiable and well posed.

A kv head has n reference queries and a block of N entries, of which t are kept; a value has D dimensions. The logits
include the scaling and earlier biases. All functions accept leading axes, and compute in float64 like their inputs.

The ridges and the gradient descent for the weights differ from the paper. The paper's own solvers, `paper_weights` and
`paper_values`, turn a rounding error of 1e-6 in the queries into a difference of 0.3 nats between log-probabilities. So
a trainer cannot reproduce the results of a sampler that uses these solvers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS, POWER = 30, 12  # steps of the weights' descent, and of the power iteration for the step size (our choices)
JITTER = 1e-13  # relative increase of the diagonal, in case keys repeat each other
# Ridge of the weights of keys chosen by pursuit (our choice): in our measurements it did not raise the KL divergence,
# and it made results depend least on rounding.
PURSUIT_RIDGE = 0.1


def features(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return phi = exp(logits - their maximum over entries) [..., n, N], and its sum, the mass [..., n] (A.2)."""
    phi = (logits - logits.amax(-1, keepdim=True)).exp()
    return phi, phi.sum(-1)


def fit_weights(kept: Tensor, mass: Tensor, bound: float) -> Tensor:
    """Return the weights w = argmin |kept w - mass|^2 with |log w| <= bound (AM equation for beta): [..., t].

    Our method is accelerated projected gradient descent from `flat_weights`. The paper takes two steps from clamped
    least-squares weights; if many entries stay, this fits worse than weights of 1 (no bias). `kept` is phi of the
    kept entries, [..., n, t]; `mass` is [..., n].
    """
    return descended(kept, mass, flat_weights(kept, mass), bound, STEPS)


def flat_weights(kept: Tensor, mass: Tensor) -> Tensor:
    """Return the single weight that fits the mass best, repeated for every entry: [..., t]."""
    total = kept.sum(-1)
    flat = (total * mass).sum(-1, keepdim=True) / total.square().sum(-1, keepdim=True)
    return flat.expand(*kept.shape[:-2], kept.shape[-1])


def descended(kept: Tensor, mass: Tensor, start: Tensor, bound: float, steps: int) -> Tensor:
    """Minimise |kept w - mass|^2 under |log w| <= bound by `steps` steps of FISTA, and return w.

    The step size is 1 / the greatest eigenvalue of kept^T kept.
    """
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
    """Return the weights w = argmin |kept w - mass|^2 + a ridge towards `flat_weights`, clamped to |log w| <= bound.

    The paper clamps plain least-squares weights (algorithm 3 with no steps, C.2). If there are hardly more queries than
    entries, rounding dominates that fit. The ridge makes the problem well posed. Returns [..., t].
    """
    weights = fit_values(kept, mass[..., None], flat_weights(kept, mass)[..., None], PURSUIT_RIDGE)[..., 0]
    return weights.clamp(math.exp(-bound), math.exp(bound))


def fit_values(x: Tensor, y: Tensor, values: Tensor, ridge: float) -> Tensor:
    """Return the fitted values of the kept entries, V + M: [..., t, D].

    V, `values`, are the values before the fit. The change M minimises |x M - (y - x V)|^2 + ridge mean_j |x_j|^2 |M|^2,
    where x_j is the row of query j in x. So the ridge pulls towards V. The paper uses no ridge: a ridge towards zero
    made its results worse (C.2).

    x, y : [..., n, t], attention over the kept entries under the new biases; [..., n, D], the output of the whole block
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


# ---- the paper's own solvers, for comparison ------------------------------------------------------------------------


def paper_weights(kept: Tensor, mass: Tensor, bound: float, steps: int) -> Tensor:
    """Return the weights of the paper's solver (algorithm 3).

    The solver clamps unbounded least-squares weights to |log w| <= bound, and takes `steps` projected gradient steps.
    Keys chosen by attention use bound 3 and 2 steps; keys chosen by pursuit use bound 7 and no step (C.2).
    """
    start = paper_values(kept, mass[..., None])[..., 0]
    return descended(kept, mass, start, bound, steps)


def paper_values(x: Tensor, y: Tensor) -> Tensor:
    """Return the values V of least norm that minimise |x V - y|^2, by SVD on the CPU: only there can torch solve
    rank-deficient systems. The paper uses QR on the GPU, in float32 (C.2).
    """
    return torch.linalg.lstsq(x.cpu(), y.cpu(), driver="gelsd").solution.to(x.device)
