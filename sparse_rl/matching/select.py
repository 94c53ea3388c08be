"""Choice of the keys that a compaction keeps (AM section 3.3, appendices C.1, C.2 and F.1).

Pursuit is algorithm 1. Algorithm 2, which chooses several keys per step, is not implemented.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparse_rl.matching.fit import JITTER

AGGREGATES = ("rms", "mean", "max")
PURSUIT_BOUND = 7.0  # limit of |log w|; an entry with log w below the negative limit is discarded (C.2)


def attention_score(logits: Tensor, aggregate: str = "rms") -> Tensor:
    """Return the attention that each of N entries receives from n reference queries, [..., N], from logits [..., n, N].

    Attention is reduced over the queries by `aggregate`: rms (root mean square), mean or max.
    """
    attention = logits.softmax(-1)
    if aggregate == "rms":
        return attention.square().mean(-2).sqrt()
    return attention.mean(-2) if aggregate == "mean" else attention.amax(-2)


def pursued(phi: Tensor, count: int, allowed: Tensor, gram: bool) -> Tensor:
    """Choose `count` entries per head by orthogonal matching pursuit of the mass: int64 [B, count], ascending.

    Chosen entries with log w below -PURSUIT_BOUND are discarded permanently, and the pursuit continues, until all
    weights are above the bound (C.2) or only `count` allowed entries are left. The arguments are those of `pursue`.
    """
    chosen, weights = pursue(phi, count, allowed, gram)
    allowed = allowed.clone()
    while True:
        poor = weights < math.exp(-PURSUIT_BOUND)
        spare = allowed.sum(-1) - count
        # If there are more poor entries than can be spared, discard those that were chosen last.
        poor &= poor.flip(-1).cumsum(-1).flip(-1) <= spare[:, None]
        again = poor.any(-1).nonzero()[:, 0]
        if not len(again):
            return chosen.sort(-1).values
        bad, previous = poor[again], chosen[again]
        allowed[again] &= ~torch.zeros_like(allowed[again]).scatter_(-1, previous, bad)
        kept_first = bad.int().argsort(dim=-1, stable=True)
        still_chosen = previous.masked_fill(bad, -1).gather(-1, kept_first)
        chosen[again], weights[again] = pursue(phi[again], count, allowed[again], gram, still_chosen)


def pursue(phi: Tensor, count: int, allowed: Tensor, gram: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose entries of each of B heads by orthogonal matching pursuit (algorithm 1).

    Each step chooses the entry whose features agree best with the missing mass, and recomputes the weights of all
    chosen entries with a Cholesky factor that grows by a row. Step i takes O(i^2); the paper's least-squares fit from
    scratch takes O(n i^2).

    phi : [B, n, N], features of N entries for n reference queries
    allowed : bool [B, N], True for entries that may be chosen
    gram : True computes phi^T phi once, so that each step reads one row of the product, which suits a GPU; False reads
        phi in each step
    given : int64 [B, count], entries that are chosen already, followed by -1; None means that there are none

    Returns the entries in order of choice, int64 [B, count], and their weights, [B, count].
    """
    batch, n, entries = phi.shape
    rows = torch.arange(batch, device=phi.device)
    mass, taken = phi.sum(-1), ~allowed
    products = phi.mT @ phi if gram else None
    wanted = products.sum(-1) if products is not None else (mass[:, None] @ phi)[:, 0]  # mass = phi @ ones
    agreement = wanted.clone()
    read = phi.new_zeros(batch, count, entries if gram else n)
    factor = phi.new_zeros(batch, count, count)
    chosen = torch.zeros(batch, count, dtype=torch.long, device=phi.device)
    weights = phi.new_zeros(batch, 0)
    for i in range(count):
        new = agreement.masked_fill(taken, float("-inf")).argmax(-1)
        if given is not None:
            new = torch.where(given[:, i] >= 0, given[:, i], new)
        taken = taken.scatter(1, new[:, None], True)
        chosen[:, i] = new
        if products is not None:
            read[:, i] = products[rows, new]
            cross = read[:, i].gather(1, chosen[:, : i + 1])
        else:
            read[:, i] = phi[rows, :, new]
            cross = (read[:, : i + 1] @ read[:, i, :, None])[..., 0]
        corner = cross[:, i] * (1 + JITTER)
        if i:
            row = torch.linalg.solve_triangular(factor[:, :i, :i], cross[:, :i, None], upper=False)[..., 0]
            factor[:, i, :i] = row
            corner = corner - row.square().sum(-1)
        factor[:, i, i] = corner.clamp(min=JITTER * 1e-3).sqrt()  # for a key that repeats others, the corner is about 0
        solved = torch.cholesky_solve(wanted.gather(1, chosen[:, : i + 1])[..., None], factor[:, : i + 1, : i + 1])
        weights = solved[..., 0].clamp(0.0, math.exp(PURSUIT_BOUND))
        fitted = (weights[:, None] @ read[:, : i + 1])[:, 0]
        agreement = wanted - fitted if products is not None else ((mass - fitted)[:, None] @ phi)[:, 0]
    return chosen, weights
