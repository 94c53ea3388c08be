"""Choice of the keys that a compaction keeps (AM section 3.3, appendices C.1, C.2 and F.1).

Orthogonal matching pursuit chooses keys one at a time (algorithm 1). The fast pursuit is algorithm 2: an iteration
chooses `k` keys, and the weights are fitted again after every `tau` iterations. As printed, algorithm 2 takes t
iterations of k keys, and so chooses t x k keys; it must choose t keys, so we take t / k iterations.
Between two fits of the weights the missing mass does not change, so these `tau` iterations choose the k x tau keys that
agree best with it. So the result depends on k x tau alone, and our code chooses this number of keys between two fits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparse_rl.matching.fit import JITTER

AGGREGATES = ("rms", "mean", "max")
FAST_K, FAST_TAU = 4, 2  # k and tau of AM-OMP-fast (C.1)
BETWEEN_FITS = {"omp": 1, "omp_fast": FAST_K * FAST_TAU}  # keys that a pursuit chooses between two fits of the weights
PURSUIT_BOUND = 7.0  # limit of |log w|; an entry with log w below the negative limit is discarded (C.2)


def attention_score(logits: Tensor, aggregate: str = "rms") -> Tensor:
    """Return the attention that each of N entries receives from n reference queries, [..., N], from logits [..., n, N].

    Attention is reduced over the queries by `aggregate`: rms (root mean square), mean or max.
    """
    attention = logits.softmax(-1)
    if aggregate == "rms":
        return attention.square().mean(-2).sqrt()
    return attention.mean(-2) if aggregate == "mean" else attention.amax(-2)


def pursued(phi: Tensor, count: int, allowed: Tensor, gram: bool, at_once: int = 1) -> Tensor:
    """Choose `count` entries per head by orthogonal matching pursuit of the mass: int64 [B, count], ascending.

    Chosen entries with log w below -PURSUIT_BOUND are discarded permanently, and the pursuit continues, until all
    weights are above the bound (C.2) or only `count` allowed entries are left. The arguments are those of `pursue`.
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
            new = _best(agreement.masked_fill(taken, float("-inf")), min(at_once, count - start))
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


def _best(agreement: Tensor, number: int) -> Tensor:
    """Return the indices of the `number` highest entries of each row of `agreement`, [B, number], highest first."""
    if number == 1:
        return agreement.argmax(-1, keepdim=True)
    return agreement.sort(dim=-1, descending=True, stable=True).indices[:, :number]


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
