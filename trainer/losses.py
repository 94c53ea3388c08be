"""What the distilling trainers minimise, shared by all of them.

With teacher p and student s at temperature tau (p = softmax(z / tau)), per token over the vocabulary V:

    forward   KL(p || s) = sum_v p_v (log p_v - log s_v)
    reverse   KL(s || p)
    jsd       b KL(p || m) + (1 - b) KL(s || m),  m = b p + (1 - b) s           generalised JSD (GKD eq. 3)

The loss is tau^2 times that (G-KV appendix C; Hinton et al. 2015: the gradient then does not shrink with tau), times
its weight, plus a weight times the cross-entropy of the tokens at temperature 1. Where only the teacher's top k are
known, both distributions are coarsened to k + 1 outcomes, the last being "any other token": a true KL, and a lower
bound of the whole one. `renormalise` instead drops the rest of both.

No [S, V] tensor of float32 is ever alive: the student's head runs over `chunk` positions at a time, and again in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention import LayerTarget

Divergence = Literal["forward", "reverse", "jsd"]


@dataclass
class TopK:
    """A teacher's distribution at one temperature, coarsened, over N positions.

    ids int [N, K]; logprobs float [N, K]; tail float [N], the log-mass of all other tokens (-inf for none)
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    tail: torch.Tensor

    def __getitem__(self, part: slice) -> TopK:
        return TopK(self.ids[part], self.logprobs[part], self.tail[part])

    @classmethod
    def of(cls, logits: torch.Tensor, count: int, temperature: float) -> TopK:
        """The `count` most probable tokens of logits [N, V]."""
        logprobs = (logits.float() / temperature).log_softmax(-1)
        top = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
        return cls(top.indices, top.values, _rest(logprobs, top.indices))

    @classmethod
    def of_hidden(
        cls,
        hidden: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        count: int,
        temperature: float,
        chunk: int,
    ) -> TopK:
        """The same of hidden states [N, H], with the logits of no more than `chunk` positions alive."""
        starts = range(0, len(hidden), chunk)
        parts = [cls.of(head(hidden[start : start + chunk]), count, temperature) for start in starts]
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logprobs", "tail")))


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of one token, and how it is computed.

    temperature : tau, the sampling temperature
    divergence, jsd_beta : which, and b of jsd
    kl_weight, ce_weight : of tau^2 times the divergence, and of the cross-entropy
    renormalise : of top-k distributions: drop the other tokens, instead of counting them as one outcome
    chunk : positions whose logits are alive at a time
    """

    temperature: float = 1.0
    divergence: Divergence = "forward"
    jsd_beta: float = 0.5
    kl_weight: float = 1.0
    ce_weight: float = 0.0
    renormalise: bool = False
    chunk: int = 512

    def __call__(
        self,
        hidden: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        teacher: Callable[[slice], torch.Tensor | TopK],
        targets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums over N positions.

        Parameters
        ----------
        hidden : the student's last hidden states [N, H] at the positions that predict `targets` int64 [N]
        head : hidden states [n, H] -> logits [n, V]
        teacher : a slice of the positions -> the teacher's logits [n, V], or its top-k at `temperature`

        Returns
        -------
        (loss, divergence, cross-entropy), float32 scalars; gradients flow from the loss alone.
        """
        total = hidden.new_zeros(3, dtype=torch.float32)
        for start in range(0, len(hidden), self.chunk):
            part = slice(start, start + self.chunk)
            total = total + checkpoint(
                self._chunk, hidden[part], head, teacher, part, targets[part],
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
        kl, ce = total[1], total[2]
        return total[0], kl.detach(), ce.detach()

    def _chunk(
        self,
        hidden: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        teacher: Callable[[slice], torch.Tensor | TopK],
        part: slice,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        logits = head(hidden).float()
        with torch.no_grad():
            known = teacher(part)
        kl = self.per_token(logits, known).sum()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.ce_weight > 0):
            ce = F.cross_entropy(logits, targets, reduction="sum")
        return torch.stack([self.kl_weight * self.temperature**2 * kl + self.ce_weight * ce, kl, ce])

    def per_token(self, logits: torch.Tensor, teacher: torch.Tensor | TopK) -> torch.Tensor:
        """The divergence of student logits [N, V] from the teacher's: float32 [N], without tau^2."""
        student = (logits.float() / self.temperature).log_softmax(-1)
        if isinstance(teacher, TopK):
            ids = teacher.ids.long()
            known, student_known = teacher.logprobs.float(), student.gather(-1, ids)
            if self.renormalise:
                known, student = known.log_softmax(-1), student_known.log_softmax(-1)
            else:
                known = torch.cat([known, teacher.tail.float()[:, None]], dim=-1)
                student = torch.cat([student_known, _rest(student, ids)[:, None]], dim=-1)
        else:
            known = (teacher.float() / self.temperature).log_softmax(-1)
        if self.divergence == "forward":
            return _kl(known, student)
        if self.divergence == "reverse":
            return _kl(student, known)
        beta = torch.tensor(self.jsd_beta, device=known.device)
        mixture = torch.logaddexp(known + beta.log(), student + (1 - beta).log())
        return beta * _kl(known, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of log-probs [N, K]; an outcome that p excludes adds nothing."""
    impossible = p == float("-inf")
    difference = (p - q).masked_fill(impossible, 0.0)
    return (p.exp() * difference).sum(-1)


def _rest(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The log-mass [N] of the tokens that `ids` [N, K] leave out of logprobs [N, V]; -inf for none."""
    if ids.shape[-1] == logprobs.shape[-1]:
        return logprobs.new_full(logprobs.shape[:1], float("-inf"))
    return logprobs.scatter(-1, ids, float("-inf")).logsumexp(-1)


@dataclass(frozen=True)
class Pairs:
    """At sampled queries q, the token that leaves the window and the worst of those that the target keeps.

    new, boundary int64 [B, Hkv, N]: tokens; label float [B, Hkv, N]: +1 where the target keeps the new one, else -1
    weight float [B, Hkv, N]: 0 where there is no pair; else with a mean of 1
    """

    new: torch.Tensor
    boundary: torch.Tensor
    label: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class BoundaryLoss:
    """KVpop's loss of a layer's scores r, against the target's r*: right where the cache decides.

    The best k by r* are what a cache would hold. At query q the token t_new = q - w becomes eligible; y = +1 if it is
    among them, else -1; t_bnd is the worst of them. With r_t(q) = r_t + (floor(q/n) - floor(t/n)) log gamma,

        L = E[omega softplus(-y (r_new(q) - r_bnd(q)) / tau)]
        omega ~ (omega_min + (1 - omega_min) sigmoid(D / tau_omega)) min(1 / (2 rho), c),  D = y (r*_new(q) - r*_bnd(q))

    rho is the share of the pair's kind (kept or dropped) in its head; the weights have a mean of 1. Where the new token
    is the worst of those kept, the pair says nothing. omega_min, tau_omega, c, and how queries are drawn are ours.

    temperature : tau
    margin, margin_floor, margin_temperature : whether D weighs, omega_min, tau_omega
    balance : c
    queries : drawn per row, with repetition; None: all
    late : the share of them drawn with a density that grows linearly towards the row's end
    """

    temperature: float = 1.0
    margin: bool = True
    margin_floor: float = 0.1
    margin_temperature: float = 1.0
    balance: float = 10.0
    queries: int | None = 1024
    late: float = 0.5

    def draw(self, lengths: torch.Tensor, first: int, width: int) -> torch.Tensor:
        """Queries int64 [B, N] from `first` up to each row's end; -1 in rows that are too short."""
        count = (lengths - first).clamp(min=0)[:, None]
        if self.queries is None:
            drawn = torch.arange(width, device=lengths.device).expand(len(lengths), -1) - first
            return torch.where((drawn >= 0) & (drawn < count), drawn + first, -1)
        part = torch.rand(len(lengths), self.queries)
        late = round(self.late * self.queries)
        part[:, :late] = part[:, :late].sqrt()
        drawn = (part.to(lengths.device).double() * count).long().clamp(max=count - 1)
        return torch.where(count > 0, drawn + first, -1)

    @torch.no_grad()
    def pairs(
        self, target: LayerTarget, log_decay: torch.Tensor, queries: torch.Tensor, *, window: int, decay_every: int
    ) -> Pairs:
        """Of a layer, at int64 [B, N]."""
        best, heads = target.best, target.scores.shape[1]
        at = queries.clamp(min=0)[:, None].expand(-1, heads, -1)
        new = (at - window).clamp(min=0)
        boundary = best.boundary.gather(-1, at).long()
        real = (queries >= 0)[:, None] & (boundary >= 0) & (boundary != new)
        boundary = boundary.clamp(min=0)
        kept = best.evict_at.gather(-1, new) > at
        label = torch.where(kept, 1.0, -1.0)
        weight = real.float()
        if self.margin:
            lead = label * _lead(target.scores, log_decay, decay_every, new, boundary)
            sure = (lead.clamp(min=0) / self.margin_temperature).sigmoid()
            weight = weight * (self.margin_floor + (1 - self.margin_floor) * sure)
        pairs = real.sum((0, 2)).clamp(min=1)
        rho = ((real & kept).sum((0, 2)) / pairs)[:, None]
        weight = weight * (0.5 / torch.where(kept, rho, 1 - rho)).clamp(max=self.balance)
        return Pairs(new, boundary, label, weight * (real.sum() / weight.sum().clamp(min=1e-12)))

    def __call__(
        self, scores: torch.Tensor, log_decay: torch.Tensor, pairs: Pairs, *, decay_every: int
    ) -> torch.Tensor:
        """The mean over the pairs of scores float32 [B, Hkv, S]; gradients reach the scores and gamma."""
        lead = _lead(scores, log_decay, decay_every, pairs.new, pairs.boundary)
        each = pairs.weight * F.softplus(-pairs.label * lead / self.temperature)
        return each.sum() / (pairs.weight > 0).sum().clamp(min=1)


def _lead(
    scores: torch.Tensor, log_decay: torch.Tensor, decay_every: int, new: torch.Tensor, boundary: torch.Tensor
) -> torch.Tensor:
    """r_new(q) - r_bnd(q), whatever q is: float32 [B, Hkv, N]."""
    younger = boundary // decay_every - new // decay_every  # <= 0
    return scores.gather(-1, new) - scores.gather(-1, boundary) + younger * log_decay[:, None]
