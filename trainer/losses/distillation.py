"""What the taught trainings minimise: the divergence from a teacher, and cross-entropy.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.losses.config import DistillationLossConfig


@dataclass
class TopK:
    """A teacher's distribution at one temperature, coarsened, over N positions.

    ids int [N, K]; logprobs float [N, K]; tail float [N], the log-mass of all other tokens (-inf for none)
    """

    ids: Tensor
    logprobs: Tensor
    tail: Tensor

    def __getitem__(self, part: slice) -> TopK:
        return TopK(self.ids[part], self.logprobs[part], self.tail[part])

    @classmethod
    def of_logits(cls, logits: Tensor, count: int, temperature: float) -> TopK:
        """The `count` most probable tokens of logits [N, V]."""
        logprobs = (logits.float() / temperature).log_softmax(-1)
        top = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
        return cls(top.indices, top.values, _rest(logprobs, top.indices))

    @classmethod
    def of_hidden(
        cls, hidden: Tensor, head: Callable[[Tensor], Tensor], count: int, temperature: float, chunk: int
    ) -> TopK:
        """What `of_logits` gives of hidden states [N, H], with the logits of no more than `chunk` positions alive.

        head : hidden states -> logits [n, V]; count : K
        """
        starts = range(0, len(hidden), chunk)
        return cls.joined([cls.of_logits(head(hidden[start : start + chunk]), count, temperature) for start in starts])

    @classmethod
    def joined(cls, parts: Sequence[TopK]) -> TopK:
        """Of the positions of these, one after another."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logprobs", "tail")))


class DistillationLoss:
    """The loss of one token, over many; tau is the sampling temperature."""

    def __init__(self, config: DistillationLossConfig) -> None:
        self.config = config

    def __call__(
        self,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        teacher: Callable[[slice], Tensor | TopK],
        targets: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums over N positions: (loss, divergence, cross-entropy), float32; gradients flow from the loss alone.

        hidden : the student's last hidden states [N, H] at the positions that predict `targets` int64 [N]
        head : hidden states [n, H] -> logits [n, V]
        teacher : a slice of the positions -> the teacher's logits [n, V], or its top-k at `temperature`
        """
        config = self.config

        def sums(part: slice, hidden: Tensor) -> Tensor:
            logits = head(hidden).float()
            with torch.no_grad():
                known = teacher(part)
            kl = self.per_token(logits, known).sum()
            with torch.set_grad_enabled(torch.is_grad_enabled() and config.ce_weight > 0):
                ce = F.cross_entropy(logits, targets[part], reduction="sum")
            return torch.stack([config.kl_weight * config.temperature**2 * kl + config.ce_weight * ce, kl, ce])

        total = hidden.new_zeros(3, dtype=torch.float32)
        for start in range(0, len(hidden), config.chunk):
            part = slice(start, start + config.chunk)
            total = total + checkpoint(sums, part, hidden[part], use_reentrant=False, preserve_rng_state=False)
        loss, kl, ce = total
        return loss, kl.detach(), ce.detach()

    def per_token(self, logits: Tensor, teacher: Tensor | TopK) -> Tensor:
        """The divergence of student logits [N, V] from the teacher's: float32 [N], without tau^2."""
        student = (logits.float() / self.config.temperature).log_softmax(-1)
        if isinstance(teacher, TopK):
            ids = teacher.ids.long()
            known, student_known = teacher.logprobs.float(), student.gather(-1, ids)
            if self.config.renormalise:
                known, student = known.log_softmax(-1), student_known.log_softmax(-1)
            else:
                known = torch.cat([known, teacher.tail.float()[:, None]], dim=-1)
                student = torch.cat([student_known, _rest(student, ids)[:, None]], dim=-1)
        else:
            known = (teacher.float() / self.config.temperature).log_softmax(-1)
        if self.config.divergence == "forward":
            return _kl(known, student)
        if self.config.divergence == "reverse":
            return _kl(student, known)
        beta = torch.tensor(self.config.jsd_beta, device=known.device)
        mixture = torch.logaddexp(known + beta.log(), student + (1 - beta).log())
        return beta * _kl(known, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probs [N, K]; an outcome that p excludes adds nothing."""
    impossible = p == float("-inf")
    difference = (p - q).masked_fill(impossible, 0.0)
    return (p.exp() * difference).sum(-1)


def _rest(logprobs: Tensor, ids: Tensor) -> Tensor:
    """The log-mass [N] of the tokens that `ids` [N, K] leave out of logprobs [N, V]; -inf for none."""
    if ids.shape[-1] == logprobs.shape[-1]:
        return logprobs.new_full(logprobs.shape[:1], float("-inf"))
    return logprobs.scatter(-1, ids, float("-inf")).logsumexp(-1)
