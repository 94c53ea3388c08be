"""KVpop's boundary loss: scorers learn which tokens a cache should keep, from the tokens near the boundary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.methods.kvpop.view import LayerTarget


@dataclass(frozen=True)
class Pairs:
    """One pair of tokens for each of N sampled queries, in each kv head of B rows: [B, Hkv, N] each."""

    new: Tensor  # int64, the token that leaves the window when the query arrives
    boundary: Tensor  # int64, the worst of the tokens that the training target keeps at this query
    label: Tensor  # float, +1 if the target keeps the new token, else -1
    weight: Tensor  # float, omega, the weight of the pair in the loss; 0 if the query has no pair


class BoundaryLoss:
    """KVpop's loss: it trains a layer's scores r to decide as the training target's scores r* do.

    The target keeps the k tokens with the best r*. At query q, token t_new = q - w leaves the window of w tokens. The
    label y is +1 if t_new is one of the k tokens that the target keeps, else -1. t_bnd is the worst of these k tokens.
    The score of token t, decayed up to query q, is r_t(q) = r_t + (floor(q/n) - floor(t/n)) log gamma, where n is
    `decay_every` and gamma the decay of the kv head. The loss is

        L = E[omega softplus(-y (r_new(q) - r_bnd(q)) / tau)]
        omega = beta / E[beta] (omega_min + (1 - omega_min) sigmoid(D / tau_omega))                  appendix B.5
        beta = min(max(1 / (2 rho), c_min), c_max),  D = y (r*_new(q) - r*_bnd(q))

    rho is, among the pairs of the kv head, the share with the same label (kept or dropped) as this pair. The balance
    beta is normalised to a mean of 1 before it is multiplied by the margin weight, so that a layer with small margins
    has a small loss. If the new token is itself the worst of the k, there is no pair. Decayed scores are compared, as
    in equation 7 of the full paper and equation 2 of the workshop paper, so that gamma is trained too; the decay of two
    tokens differs, because it depends on their age. The workshop paper has no balance; balance_min and balance_max of 1
    turn it off. Our choices: the values of omega_min, tau_omega, c_min and c_max, the mean E[beta] over all pairs of a
    layer, and the distribution of queries.

    `BoundaryConfig` names these parameters. Queries are drawn with repetition; a share `late` of them has a density
    that grows linearly towards the row's end.
    """

    def __init__(self, config: BoundaryConfig) -> None:
        self.config = config

    def draw(self, lengths: Tensor, first: int, width: int) -> Tensor:
        """Draw the positions of N queries for each of B rows, from position `first` up to the row's end: int64 [B, N].

        Rows that are too short have -1. If no number of queries is set, all tokens from `first` on are, and N is
        `width`.
        """
        count = (lengths - first).clamp(min=0)[:, None]
        if self.config.queries is None:
            drawn = torch.arange(width, device=lengths.device).expand(len(lengths), -1) - first
            return torch.where((drawn >= 0) & (drawn < count), drawn + first, -1)
        part = torch.rand(len(lengths), self.config.queries)
        late = round(self.config.late * self.config.queries)
        part[:, :late] = part[:, :late].sqrt()
        drawn = (part.to(lengths.device).double() * count).long().clamp(max=count - 1)
        return torch.where(count > 0, drawn + first, -1)

    @torch.no_grad()
    def pairs(self, target: LayerTarget, log_decay: Tensor, queries: Tensor, *, window: int, decay_every: int) -> Pairs:
        """Return the pairs of one layer at the sampled queries, int64 [B, N] from `draw`; -1 means no query.

        log_decay : log gamma, float32 [Hkv]
        """
        best, heads = target.best, target.scores.shape[1]
        at = queries.clamp(min=0)[:, None].expand(-1, heads, -1)
        new = (at - window).clamp(min=0)
        boundary = best.boundary.gather(-1, at).long()
        real = (queries >= 0)[:, None] & (boundary >= 0) & (boundary != new)
        boundary = boundary.clamp(min=0)
        kept = best.evict_at.gather(-1, new) > at
        label = torch.where(kept, 1.0, -1.0)
        pairs = real.sum((0, 2)).clamp(min=1)
        rho = ((real & kept).sum((0, 2)) / pairs)[:, None]
        balance = (0.5 / torch.where(kept, rho, 1 - rho)).clamp(self.config.balance_min, self.config.balance_max)
        balance = balance.masked_fill(~real, 0.0)
        weight = balance * (real.sum() / balance.sum().clamp(min=1e-12))  # the mean over the pairs is 1
        if self.config.margin:
            lead = label * _lead(target.scores, log_decay, decay_every, new, boundary)
            margin_weight = (lead.clamp(min=0) / self.config.margin_temperature).sigmoid()
            weight = weight * (self.config.margin_floor + (1 - self.config.margin_floor) * margin_weight)
        return Pairs(new, boundary, label, weight)

    def __call__(self, scores: Tensor, log_decay: Tensor, pairs: Pairs, *, decay_every: int) -> Tensor:
        """Return the loss L of one layer, a scalar: the mean over the layer's pairs. Gradients reach scores and gamma.

        scores, log_decay : r, float32 [B, Hkv, S], and log gamma, float32 [Hkv]
        """
        lead = _lead(scores, log_decay, decay_every, pairs.new, pairs.boundary)
        losses = pairs.weight * F.softplus(-pairs.label * lead / self.config.temperature)
        return losses.sum() / (pairs.weight > 0).sum().clamp(min=1)


def _lead(scores: Tensor, log_decay: Tensor, decay_every: int, new: Tensor, boundary: Tensor) -> Tensor:
    """Return r_new(q) - r_bnd(q), float32 [B, Hkv, N]. This difference is the same for every q."""
    younger = boundary // decay_every - new // decay_every  # <= 0
    return scores.gather(-1, new) - scores.gather(-1, boundary) + younger * log_decay[:, None]
