"""The compaction of one block: choose the entries that stay, and fit new biases and values for them.

The fits (AM section 3, appendices A.2 and C.2) are differentiable and well posed. A kv head has n reference queries and
a block of N entries, of which t are kept; a value has D dimensions. The logits include the scaling and earlier biases.
Fits accept leading axes, and compute in float64 like their inputs.

The ridges and the gradient descent for the weights differ from the paper. The paper's own solvers, `paper_weights` and
`paper_values`, turn a rounding error of 1e-6 in the queries into a difference of 0.3 nats between log-probabilities. So
a trainer cannot reproduce the results of a sampler that uses these solvers.

Keys are chosen by the attention that they receive, or by orthogonal matching pursuit (AM section 3.3, appendices C.1,
C.2 and F.1), which chooses keys one at a time (algorithm 1). The fast pursuit is algorithm 2: an iteration chooses `k`
keys, and the weights are fitted again after every `tau` iterations. As printed, algorithm 2 takes t iterations of k
keys, and so chooses t x k keys; it must choose t keys, so we take t / k iterations. Between two fits of the weights the
missing mass does not change, so these `tau` iterations choose the k x tau keys that agree best with it. So the result
depends on k x tau alone, and our code chooses this number of keys between two fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparse_rl.clock import part
from sparse_rl.errors import NotFiniteError

BOUND = 3.0  # limit of |log w| in one compaction, if keys are chosen by attention; earlier biases are added to log w
PURSUIT_BOUND = 7.0  # limit of |log w|; an entry with log w below the negative limit is discarded (C.2)
FAST_K, FAST_TAU = 4, 2  # k and tau of AM-OMP-fast (C.1)
BETWEEN_FITS = {"omp": 1, "omp_fast": FAST_K * FAST_TAU}  # keys that a pursuit chooses between two fits of the weights
STEPS, POWER = 30, 12  # steps of the weights' descent, and of the power iteration for the step size (our choices)
JITTER = 1e-13  # relative increase of the diagonal, in case keys repeat each other
# Ridge of the weights of keys chosen by pursuit (our choice): in our measurements it did not raise the KL divergence,
# and it made results depend least on rounding.
PURSUIT_RIDGE = 0.1


@dataclass(frozen=True)
class Fit:
    """Settings of a fit.

    select, aggregate, ridge : as in `AMConfig`
    paper : True uses the paper's own solvers, whose results a trainer cannot reproduce
    biases, values : False leaves the biases, or the values, as they are
    """

    select: Literal["attention", "omp", "omp_fast"] = "attention"
    aggregate: str = "rms"
    ridge: float = 1e-3
    paper: bool = False
    biases: bool = True
    values: bool = True

    @property
    def pursues(self) -> bool:
        """True if keys are chosen by orthogonal matching pursuit."""
        return self.select in BETWEEN_FITS


@dataclass(frozen=True)
class Block:
    """N entries and n reference queries of R rows and H kv heads. Only competing entries belong to the block.

    keys, values : [R, H, N, D], keys after RoPE
    queries : [R, H, n, D], reference queries of all query heads of a group, after RoPE
    bias : float32 [R, H, N], from earlier compactions; added to the logits
    competing : bool [R, 1 or H, N]; False for entries that stay unchanged and have no part in the fit
    scaling : the factor on q . k
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    bias: Tensor
    competing: Tensor
    scaling: float

    def of(self, rows: Tensor | slice) -> Block:
        """Return some rows of the block."""
        of_rows = (self.keys[rows], self.values[rows], self.queries[rows], self.bias[rows], self.competing[rows])
        return Block(*of_rows, self.scaling)

    def parts(self, at_once: int) -> Iterator[Block]:
        """Yield the block in parts of at most `at_once` rows."""
        for start in range(0, len(self.keys), at_once):
            yield self.of(slice(start, start + at_once))

    def logits(self) -> Tensor:
        """Return the logits `scaling` q . k + bias: float64 [R, H, n, N], -inf for entries that do not compete."""
        logits = self.queries.double() @ self.keys.double().mT * self.scaling + self.bias.double()[:, :, None]
        return logits.masked_fill(~self.competing[:, :, None], float("-inf"))


def match(block: Block, count: int, fit: Fit) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the entries of a block that stay, and fit biases and values for them (AM section 3).

    A trainer, which needs gradients, calls `refit` instead. In each row, `count` entries stay; at least as many must
    compete. Among equal scores, the earlier entry stays.

    Returns the indices of the entries, int64 [R, H, count], ascending; the biases, float32 [R, H, count]; and the
    values, [R, H, count, D], in the dtype of the block's values. Raises NotFiniteError if keys, values or queries are
    not finite.
    """
    index = choose(block, count, fit)
    bias, values = refit(block, index, fit)
    if not bool(values.isfinite().all()):
        raise NotFiniteError("a fitted value is not finite")
    return index, bias, values


@part("selection", detail=True)
def choose(block: Block, count: int, fit: Fit) -> Tensor:
    """Choose the entries that stay, as `match` does, without a fit: their indices, int64 [R, H, count], ascending.

    Raises NotFiniteError for a NaN score.
    """
    logits = block.logits()
    score = attention_score(logits, fit.aggregate)
    if bool((score.isnan() & block.competing).any()):
        raise NotFiniteError("a NaN score")
    if fit.pursues:
        phi = features(logits)[0].flatten(0, 1)
        allowed = block.competing.expand(score.shape).flatten(0, 1)
        return pursued(phi, count, allowed, phi.is_cuda, BETWEEN_FITS[fit.select]).view(*score.shape[:2], count)
    among = score.float().masked_fill(~block.competing, float("-inf"))
    return among.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values


@torch.no_grad()
def residuals(block: Block, index: Tensor, bias: Tensor, values: Tensor) -> tuple[float, float]:
    """Return two errors of a fit: the mass error and the output error.

    The mass error is the mean |log(mass / mass of the block)| over the reference queries of all rows and heads. The
    output error is |output - output of the block| / |output of the block|, with norms over all these queries. The
    fitted entries, as `match` returns them, are index, bias and values, [R, H, t], [R, H, t] and [R, H, t, D].
    """
    logits = block.logits()
    deep = index[..., None].expand(*index.shape, block.values.shape[-1])
    fitted = block.queries.double() @ block.keys.gather(2, deep).double().mT * block.scaling + bias.double()[:, :, None]
    output, wanted = fitted.softmax(-1) @ values.double(), logits.softmax(-1) @ block.values.double()
    mass = (fitted.logsumexp(-1) - logits.logsumexp(-1)).abs().mean()
    return float(mass), float((output - wanted).norm() / wanted.norm())


def refit(block: Block, index: Tensor, fit: Fit) -> tuple[Tensor, Tensor]:
    """Fit biases and values for given entries, with gradients.

    First, weights w = argmin |phi w - mass|^2 are computed within bounds (phi and mass: see `features`). The old bias +
    log w, rounded to the dtype of the values, is the new bias. Second, a ridge regression of the block's outputs on
    the attention under the new biases gives the values (fit.py). `fit` can leave out either step.

    index : int64 [R, H, t], the t entries of each kv head that stay

    Returns the biases, float32 [R, H, t], and the values, [R, H, t, D].
    """
    with part("fit of biases", detail=True):
        logits, bias = block.logits(), block.bias.gather(2, index)
        if fit.biases:
            bias = (bias.double() + _log_weights(logits, index, fit)).to(block.values.dtype).float()
    with part("fit of values", detail=True):
        deep = index[..., None].expand(*index.shape, block.values.shape[-1])
        keys, values = block.keys.gather(2, deep).double(), block.values.gather(2, deep).double()
        if not fit.values:
            return bias, values.to(block.values.dtype)
        x = (block.queries.double() @ keys.mT * block.scaling + bias.double()[:, :, None]).softmax(-1)
        y = logits.softmax(-1) @ block.values.double()
        fitted = paper_values(x, y) if fit.paper else fit_values(x, y, values, fit.ridge)
        return bias, fitted.to(block.values.dtype)


def _log_weights(logits: Tensor, index: Tensor, fit: Fit) -> Tensor:
    phi, mass = features(logits)
    kept = phi.gather(3, index[:, :, None].expand(-1, -1, phi.shape[2], -1))
    bound = PURSUIT_BOUND if fit.pursues else BOUND
    if fit.paper:
        return paper_weights(kept, mass, bound, steps=0 if fit.pursues else 2).log()
    return (pursuit_weights if fit.pursues else fit_weights)(kept, mass, bound).log()


# ---- fits of weights and values -------------------------------------------------------------------------------------


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
    """Return the weights of the paper's solver (algorithm 3): unbounded least-squares weights, clamped to |log w| <=
    bound, and then `steps` projected gradient steps. Keys chosen by attention use bound 3 and 2 steps; keys chosen by
    pursuit use bound 7 and no step (C.2).
    """
    return descended(kept, mass, paper_values(kept, mass[..., None])[..., 0], bound, steps)


def paper_values(x: Tensor, y: Tensor) -> Tensor:
    """Return the values V of least norm that minimise |x V - y|^2, by SVD on the CPU: only there can torch solve
    rank-deficient systems. The paper uses QR on the GPU, in float32 (C.2).
    """
    return torch.linalg.lstsq(x.cpu(), y.cpu(), driver="gelsd").solution.to(x.device)


# ---- choice of keys --------------------------------------------------------------------------------------------------


def attention_score(logits: Tensor, aggregate: str = "rms") -> Tensor:
    """Return the attention that each entry receives from the reference queries, [..., N], from logits [..., n, N]."""
    attention = logits.softmax(-1)
    if aggregate == "rms":
        return attention.square().mean(-2).sqrt()
    return attention.mean(-2) if aggregate == "mean" else attention.amax(-2)


def pursued(phi: Tensor, count: int, allowed: Tensor, gram: bool, at_once: int = 1) -> Tensor:
    """Choose `count` entries per head by orthogonal matching pursuit of the mass: int64 [B, count], ascending.

    Chosen entries with log w below -PURSUIT_BOUND are discarded, and the pursuit continues, until all weights are above
    the bound (C.2) or only `count` allowed entries are left. The arguments are those of `pursue`.
    """
    chosen, weights = pursue(phi, count, allowed, gram, at_once=at_once)
    allowed = allowed.clone()
    while True:
        poor = weights < math.exp(-PURSUIT_BOUND)
        spare = allowed.sum(-1) - count
        # If there are more poor entries than can be spared, discard those that were chosen last.
        poor &= poor.flip(-1).cumsum(-1).flip(-1) <= spare[:, None]
        discarded = poor.sum(-1)
        if not bool(discarded.any()):
            return chosen.sort(-1).values
        for number in discarded.unique().tolist():
            if not number:
                continue
            again = (discarded == number).nonzero()[:, 0]
            bad, previous = poor[again], chosen[again]
            allowed[again] &= ~torch.zeros_like(allowed[again]).scatter_(-1, previous, bad)
            kept_first = bad.int().argsort(dim=-1, stable=True)
            still_chosen = previous.gather(-1, kept_first)[:, : count - number]
            chosen[again], weights[again] = pursue(phi[again], count, allowed[again], gram, still_chosen, at_once)


def pursue(
    phi: Tensor, count: int, allowed: Tensor, gram: bool, given: Tensor | None = None, at_once: int = 1
) -> tuple[Tensor, Tensor]:
    """Choose entries of each of B heads by orthogonal matching pursuit (algorithm 1, or 2 if `at_once` is above 1).

    Each step chooses the entries whose features agree best with the missing mass, and recomputes the weights of all
    chosen entries with a Cholesky factor that grows by their rows. Step i takes O(i^2); the paper's least-squares fit
    from scratch takes O(n i^2).

    phi : [B, n, N], features of N entries for n reference queries
    allowed : bool [B, N], True for entries that may be chosen
    gram : True computes phi^T phi once, so that each step reads rows of the product, which suits a GPU; False reads
        phi in each step
    given : int64 [B, m], entries that are chosen already; None means that there are none
    at_once : number of entries that a step chooses; the last step chooses what is missing

    Returns the entries in order of choice, int64 [B, count], and their weights, [B, count]. Among entries that agree
    equally well, the earlier entry is chosen first.
    """
    batch, n, entries = phi.shape
    rows = torch.arange(batch, device=phi.device)[:, None]
    mass, taken = phi.sum(-1), ~allowed
    products = phi.mT @ phi if gram else None
    wanted = products.sum(-1) if products is not None else (mass[:, None] @ phi)[:, 0]  # mass = phi @ ones
    agreement = wanted.clone()
    read = phi.new_zeros(batch, count, entries if gram else n)
    factor = phi.new_zeros(batch, count, count)
    chosen = torch.zeros(batch, count, dtype=torch.long, device=phi.device)
    weights = phi.new_zeros(batch, 0)
    start = 0
    while start < count:
        if given is not None and start < given.shape[1]:
            new = given
        else:
            free, number = agreement.masked_fill(taken, float("-inf")), min(at_once, count - start)
            new = free.argmax(-1, keepdim=True)
            if number > 1:
                new = free.sort(dim=-1, descending=True, stable=True).indices[:, :number]
        stop = start + new.shape[1]
        taken = taken.scatter(1, new, True)
        chosen[:, start:stop] = new
        if products is not None:
            read[:, start:stop] = products[rows, new]
            cross = read[:, start:stop].gather(2, chosen[:, None, :stop].expand(-1, stop - start, -1)).mT
        else:
            read[:, start:stop] = phi.mT[rows, new]
            cross = read[:, :stop] @ read[:, start:stop].mT
        _grow(factor, cross, start)
        solved = torch.cholesky_solve(wanted.gather(1, chosen[:, :stop])[..., None], factor[:, :stop, :stop])
        weights = solved[..., 0].clamp(0.0, math.exp(PURSUIT_BOUND))
        fitted = (weights[:, None] @ read[:, :stop])[:, 0]
        agreement = wanted - fitted if products is not None else ((mass - fitted)[:, None] @ phi)[:, 0]
        start = stop
    return chosen, weights


def _grow(factor: Tensor, cross: Tensor, start: int) -> None:
    """Add the rows of g new entries to the Cholesky factor of the entries' products.

    factor : [B, count, count], the factor of `start` entries, which is changed in place
    cross : [B, start + g, g], products of all these entries with the new ones
    """
    stop = cross.shape[1]
    if start:
        solved = torch.linalg.solve_triangular(factor[:, :start, :start], cross[:, :start], upper=False)
        factor[:, start:stop, :start] = solved.mT
    for i in range(start, stop):
        row, column = factor[:, i, :i], cross[:, :, i - start]
        corner = column[:, i] * (1 + JITTER) - row.square().sum(-1)
        factor[:, i, i] = corner.clamp(min=JITTER * 1e-3).sqrt()  # for a key that repeats others, the corner is about 0
        if i + 1 < stop:
            below = column[:, i + 1 :] - (factor[:, i + 1 : stop, :i] @ row[..., None])[..., 0]
            factor[:, i + 1 : stop, i] = below / factor[:, i, i, None]
