"""The compaction of one block: choose the entries that stay, and fit new biases and values for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparse_rl.clock import part
from sparse_rl.errors import NotFiniteError
from sparse_rl.matching.fit import features, fit_values, fit_weights, paper_values, paper_weights, pursuit_weights
from sparse_rl.matching.select import BETWEEN_FITS, PURSUIT_BOUND, attention_score, pursued

BOUND = 3.0  # limit of |log w| in one compaction, if keys are chosen by attention; earlier biases are added to log w


@dataclass(frozen=True)
class Fit:
    """Settings of a fit.

    select : attention chooses the keys that receive the most attention; omp chooses keys by orthogonal matching pursuit
        of the attention mass; omp_fast is omp with 8 keys in a step
    aggregate : reduction of the attention over the reference queries: rms, mean or max
    ridge : weight of the ridge in the fit of values, > 0; see `fit_values`
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

    def parts(self, at_once: int) -> Iterator[Block]:
        """Yield the block in parts of at most `at_once` rows."""
        for start in range(0, len(self.keys), at_once):
            rows = slice(start, start + at_once)
            of_rows = (self.keys[rows], self.values[rows], self.queries[rows], self.bias[rows], self.competing[rows])
            yield Block(*of_rows, self.scaling)

    def logits(self) -> Tensor:
        """Return the logits `scaling` q . k + bias: float64 [R, H, n, N], -inf for entries that do not compete."""
        logits = self.queries.double() @ self.keys.double().mT * self.scaling + self.bias.double()[:, :, None]
        return logits.masked_fill(~self.competing[:, :, None], float("-inf"))


def match(block: Block, count: int, fit: Fit) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the entries of a block that stay, and fit biases and values for them (AM section 3).

    A trainer, which needs gradients, calls `refit` instead.

    count : number of entries that stay; each row must have at least `count` competing entries. Among equal scores,
        the earlier entry stays

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
    """Choose the entries of a block that stay, as `match` does, without a fit.

    count : number of entries that stay

    Returns the indices of the entries, int64 [R, H, count], ascending. Raises NotFiniteError for a NaN score.
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
    output error is |output - output of the block| / |output of the block|, with norms over all these queries.

    index, bias, values : the fitted entries, [R, H, t], [R, H, t] and [R, H, t, D], as `match` returns them
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
    """Return log w of the entries `index`, float64 [R, H, t], from logits [R, H, n, N]."""
    phi, mass = features(logits)
    kept = phi.gather(3, index[:, :, None].expand(-1, -1, phi.shape[2], -1))
    bound = PURSUIT_BOUND if fit.pursues else BOUND
    if fit.paper:
        return paper_weights(kept, mass, bound, steps=0 if fit.pursues else 2).log()
    return (pursuit_weights if fit.pursues else fit_weights)(kept, mass, bound).log()


def fit_bytes(rows: int, kv_heads: int, queries: int, entries: int, kept: int, head_dim: int) -> int:
    """Return the bytes of temporary memory that a fit of `rows` rows in one call takes, in one layer.

    queries : number of reference queries of a kv head
    entries, kept : number of entries in a block, and of fitted entries

    The memory holds, in float64, three arrays of the size of the logits, two arrays of kept x kept, and the keys,
    values and queries of the block.
    """
    return 8 * rows * kv_heads * (3 * queries * entries + 2 * kept**2 + 2 * head_dim * (entries + queries))
