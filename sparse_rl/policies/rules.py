"""The policies that evict by a score, on a schedule: StreamingLLM, H2O, lined attention, TOVA, and the scored windows.

The scored-window family (SnapKV, MorphKV, R-KV, G-KV, CAKE) uses one score with different parts switched on. The score
of an older entry is the attention that the last queries pay to it: A[g, w, j] is the attention of query head g of the
group, at query w of the window, to entry j. The softmax runs over all entries held, causally inside the window. Scores
are computed for competing entries j, which are neither sinks nor in the window:

    S_j  = mean_w max_g A[g, w, j]                         local score            G-KV eqs. 1-2
    S^_j = S_j / max_i S_i                                 normalised             G-KV eq. 3
    F_j  = max(a F'_j, S^_j)                               global score, "max"    G-KV eq. 3
         = a F'_j + (1 - a) S^_j                           "mean"                 G-KV eq. 4
         = a F'_j + S^_j                                   "sum"                  G-KV eq. 5
    R_j  = softmax_j mean_i sim(i, j)                      redundancy             R-KV eqs. 4-6

F'_j is the global score of entry j from the previous compaction. An entry that was in the window at that compaction, or
came later, has no F'_j; for it, F = S^. F is stored before pooling and redundancy. kernels/redundancy.py defines the
mean of sim(i, j). G-KV's appendix writes a sum, which would multiply the argument of the softmax by the number of
entries; R-KV's paper, and the code of both, average. l is `lam`, a is `alpha`, Var_w is the variance over the window:

    snapkv   max-pool(S)                     SnapKV eq. 4 (kernel 7) at decode time, as extended by G-KV
    morphkv  S                               MorphKV §3 (attention fused over the window)
    rkv      l max-pool(S) - (1 - l) R       R-KV eq. 7, l = 0.1
    gkv      l F - (1 - l) R / max R         G-KV §5, §7.3 and appendix D, l = 0.7 (Qwen) or 0.9 (Llama), a = 0.8
    cake     S + gamma Var_w max_g A         CAKE's attention shift, as G-KV compares it (no pooling, no layer budgets)

gamma = 200 is the value in CAKE's own code; pooling over competing entries only is our choice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.kernels import mean_similarity
from sparse_rl.methods.config import (
    CAKEConfig,
    FullConfig,
    GKVConfig,
    H2OConfig,
    LinedConfig,
    MorphKVConfig,
    RKVConfig,
    ScoredWindowConfig,
    SnapKVConfig,
    StreamingConfig,
    TovaConfig,
)
from sparse_rl.policies.base import Entries, Policy


class Full(Policy):
    """The baseline RL-Full: keeps all entries; `compact` is never called."""

    config: FullConfig


class Streaming(Policy):
    """StreamingLLM (Xiao et al. 2023, §3.2): keep the attention sinks and the most recent tokens.

    A departure: the paper's rolling cache renumbers the positions of its entries; here each entry keeps its position,
    as in G-KV's baseline.
    """

    config: StreamingConfig
    score_reads = ()

    def score(self, layer: int, entries: Entries) -> Tensor:
        return entries.positions.float()


CHUNK = 256  # prompt queries whose attention is computed at a time


class H2O(Policy):
    """H2O (Zhang et al. 2023, §4): keep the tokens with the most accumulated attention and the most recent tokens.

    The score of token j is the sum F_j = sum_q A[q, j] of the attention that all queries q of prefill and decoding, of
    all query heads of the group, have paid to it, without decay.
    """

    config: H2OConfig
    entry_memory = {"mass": 0.0}
    every_query = True
    score_reads = ()

    def observe(self, layer: int, entries: Entries, queries: Tensor, query_positions: Tensor) -> None:
        for start in range(0, queries.shape[2], CHUNK):
            positions = query_positions[:, start : start + CHUNK]
            attention = entries.attention(queries[:, :, start : start + CHUNK], positions)
            real = (positions < entries.seen[:, None])[:, None, None, :, None]
            entries.state["mass"] += attention.masked_fill(~real, 0.0).sum(dim=(2, 3))

    def score(self, layer: int, entries: Entries) -> Tensor:
        return entries.state["mass"]


class Lined(H2O):
    """Lined attention (LuKA 3.1): keep heavy hitters, whose number is a fraction of the tokens, and the most recent
    tokens.

    The fraction is taken of the tokens seen, so that the budget grows, or of the prompt's length (section 4.2); the
    schedule is `KeepsAFraction`. A departure: at each step, the paper selects again among all past tokens. Here a
    compaction runs every `period` tokens, and an evicted token never comes back, as under every other policy.
    """

    config: LinedConfig  # type: ignore[assignment]  # LinedConfig has no budget


class Tova(Policy):
    """TOVA (Oren et al. 2024, §3.2): after each step, drop the token to which the LAST query pays the least attention.

    Attention is averaged over all heads of the layer, so that its kv heads keep the same tokens. The newest token
    competes like any other (window = 0).
    """

    config: TovaConfig

    @property
    def last_queries(self) -> int:
        return 1

    def score(self, layer: int, entries: Entries) -> Tensor:
        mean = entries.mean_over_ranks(entries.window_attention(1).mean(dim=(1, 2, 3)))  # [R, N]
        return mean[:, None].expand(-1, entries.positions.shape[1], -1)


NO_HISTORY = -1.0


class ScoredWindow(Policy):
    """Computes the parts of the score from the window's queries."""

    config: ScoredWindowConfig

    @property
    def last_queries(self) -> int:
        return self.config.window

    def window_scores(self, entries: Entries) -> Tensor:
        """Return max_g A, float32 [R, Hkv, W, N] for W window queries and N entries."""
        return entries.window_attention(self.config.window).amax(dim=2)

    def local_score(self, entries: Entries) -> Tensor:
        """Return the local score S, float32 [R, Hkv, N]: `window_scores` averaged over the window (G-KV eqs. 1-2)."""
        return self.window_scores(entries).mean(dim=2)

    def _max_pool(self, scores: Tensor, entries: Entries, kernel: int) -> Tensor:
        """Return each competing entry's maximum score over `kernel` neighbours in order of position: [R, Hkv, N]."""
        order = entries.by_position()
        competing = entries.competing(self.config.sinks, self.config.window)
        in_order = scores.masked_fill(~competing, 0.0).gather(-1, order)
        pooled = F.max_pool1d(in_order, kernel, stride=1, padding=kernel // 2)
        return torch.empty_like(pooled).scatter_(-1, order, pooled)


class SnapKV(ScoredWindow):
    config: SnapKVConfig

    def score(self, layer: int, entries: Entries) -> Tensor:
        return self._max_pool(self.local_score(entries), entries, self.config.pooling)


class MorphKV(ScoredWindow):
    config: MorphKVConfig

    def score(self, layer: int, entries: Entries) -> Tensor:
        return self.local_score(entries)


class RKV(ScoredWindow):
    config: RKVConfig

    def score(self, layer: int, entries: Entries) -> Tensor:
        importance = self._max_pool(self.local_score(entries), entries, self.config.pooling)
        return self.config.lam * importance - (1 - self.config.lam) * redundancy(entries)


class GKV(ScoredWindow):
    config: GKVConfig
    entry_memory = {"history": NO_HISTORY}

    def score(self, layer: int, entries: Entries) -> Tensor:
        competing = entries.competing(self.config.sinks, self.config.window)
        local = _over_max(self.local_score(entries), competing)
        history = entries.state["history"]
        if self.config.form == "max":
            merged = torch.maximum(self.config.alpha * history, local)
        elif self.config.form == "mean":
            merged = self.config.alpha * history + (1 - self.config.alpha) * local
        else:
            merged = self.config.alpha * history + local
        global_score = torch.where(history >= 0, merged, local)
        entries.state["history"] = global_score.masked_fill(~competing, NO_HISTORY)

        score = self._max_pool(global_score, entries, self.config.pooling) if self.config.pooling > 1 else global_score
        if self.config.redundancy:
            score = self.config.lam * score - (1 - self.config.lam) * _over_max(redundancy(entries), competing)
        return score


class CAKE(ScoredWindow):
    config: CAKEConfig

    def score(self, layer: int, entries: Entries) -> Tensor:
        scores = self.window_scores(entries)
        return scores.mean(dim=2) + self.config.gamma * scores.var(dim=2, correction=0)


def _over_max(scores: Tensor, competing: Tensor) -> Tensor:
    """Divide the scores of each head by the maximum over its competing entries; 0 if that maximum is 0."""
    top = scores.masked_fill(~competing, 0.0).amax(-1, keepdim=True)
    return scores / top.clamp(min=torch.finfo(scores.dtype).tiny)


def redundancy(entries: Entries) -> Tensor:
    """Return R, float32 [R, Hkv, N] (R-KV §3.2)."""
    assert entries.keys is not None
    return mean_similarity(entries.keys, entries.positions, entries.lengths).softmax(-1)
