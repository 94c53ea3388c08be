"""The losses besides TRL's: the divergence from a teacher, and the boundary loss of a learned policy's scorers.

Let p and s be the distributions of teacher and student at temperature tau (softmax of the logits divided by tau), and b
the setting `jsd_beta`. The divergence per token is one of

    forward   KL(p || s)
    reverse   KL(s || p)
    jsd       b KL(p || m) + (1 - b) KL(s || m),  m = b p + (1 - b) s           generalised JSD (GKD eq. 3)

The loss is kl_weight * tau^2 times the divergence, plus ce_weight times the cross-entropy of the completion tokens at
temperature 1. The factor tau^2 keeps the gradient from shrinking as tau grows (G-KV appendix C; Hinton et al. 2015).

With the teacher's k most probable tokens, the divergence is over k + 1 outcomes: these tokens, and "any other token".
This KL is a lower bound of the KL over the vocabulary. `renormalise` leaves other tokens out.

A float32 tensor of shape [tokens, vocabulary] never exists in memory: the student's head runs over `chunk` positions at
a time, and runs again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.views import LayerMap, map_of_model
from sparse_rl.experts import RouterReplay
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.config import BoundaryConfig, TargetConfig
from sparse_rl.methods.kvpop.loss import BoundaryLoss
from sparse_rl.methods.kvpop.target import FutureTarget
from sparse_rl.methods.kvpop.view import LearnedView
from sparse_rl.models.load import base_of
from sparse_rl.trace import EvictionTrace, batch_traces, policy_part
from trainer.config import DistillationLossConfig


@dataclass
class TopK:
    """The K most probable tokens of a teacher's distribution at one temperature, for N positions.

    ids : ids of the K most probable tokens, int [N, K]
    logprobs : log-probs of these tokens, float [N, K]
    tail : log-probability of all other tokens together, float [N]; -inf if there are no other tokens
    """

    ids: Tensor
    logprobs: Tensor
    tail: Tensor

    def __getitem__(self, part: slice) -> TopK:
        return TopK(self.ids[part], self.logprobs[part], self.tail[part])

    @classmethod
    def of_logits(cls, logits: Tensor, count: int, temperature: float) -> TopK:
        logprobs = (logits.float() / temperature).log_softmax(-1)
        top = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
        return cls(top.indices, top.values, _rest(logprobs, top.indices))

    @classmethod
    def of_hidden(
        cls, hidden: Tensor, head: Callable[[Tensor], Tensor], count: int, temperature: float, chunk: int
    ) -> TopK:
        """As of_logits, for hidden states of shape [N, hidden size]; `chunk` positions have logits at a time."""
        starts = range(0, len(hidden), chunk)
        return cls.joined([cls.of_logits(head(hidden[start : start + chunk]), count, temperature) for start in starts])

    @classmethod
    def joined(cls, parts: Sequence[TopK]) -> TopK:
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "logprobs", "tail")))


class DistillationLoss:
    def __init__(self, config: DistillationLossConfig) -> None:
        self.config = config

    def __call__(
        self,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        teacher: Callable[[slice], Tensor | TopK] | None,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sums of the loss, of the divergence and of the cross-entropy over N completion tokens, and the
        number of these tokens that have the largest logit at their position (the first of equal ones).

        All four are float32 scalars, and only the loss has gradients.

        hidden : the student's last hidden states at the positions that predict `targets`, [N, hidden size]
        head : function from hidden states [positions, hidden size] to logits [positions, vocabulary]
        teacher : function from a slice of the N positions to the teacher's logits [positions, vocabulary], or to its
            most probable tokens at the temperature of the configuration; None counts the divergence as 0
        targets : completion tokens, int64 [N]
        """
        config = self.config

        def sums(part: slice, hidden: Tensor) -> Tensor:
            logits = head(hidden).float()
            kl = logits.new_zeros(())
            if teacher is not None:
                with torch.no_grad():
                    reference = teacher(part)
                kl = self.per_token(logits, reference).sum()
            with torch.set_grad_enabled(torch.is_grad_enabled() and config.ce_weight > 0):
                ce = F.cross_entropy(logits, targets[part], reduction="sum")
            loss = config.kl_weight * config.temperature**2 * kl + config.ce_weight * ce
            right = (logits.argmax(-1) == targets[part]).sum()  # last: the backward pass stops before it
            return torch.stack([loss, kl, ce, right.to(loss)])

        total = hidden.new_zeros(4, dtype=torch.float32)
        for start in range(0, len(hidden), config.chunk):
            part = slice(start, start + config.chunk)
            total = total + checkpoint(sums, part, hidden[part], use_reentrant=False, preserve_rng_state=False)
        loss, kl, ce, right = total
        return loss, kl.detach(), ce.detach(), right.detach()

    def per_token(self, logits: Tensor, teacher: Tensor | TopK) -> Tensor:
        """Return the divergence at each position, float32 [N], without the factor tau^2. logits : [N, vocabulary]"""
        student = (logits.float() / self.config.temperature).log_softmax(-1)
        if isinstance(teacher, TopK):
            ids = teacher.ids.long()
            reference, student_known = teacher.logprobs.float(), student.gather(-1, ids)
            if self.config.renormalise:
                reference, student = reference.log_softmax(-1), student_known.log_softmax(-1)
            else:
                reference = torch.cat([reference, teacher.tail.float()[:, None]], dim=-1)
                student = torch.cat([student_known, _rest(student, ids)[:, None]], dim=-1)
        else:
            reference = (teacher.float() / self.config.temperature).log_softmax(-1)
        if self.config.divergence == "forward":
            return _kl(reference, student)
        if self.config.divergence == "reverse":
            return _kl(student, reference)
        beta = torch.tensor(self.config.jsd_beta, device=reference.device)
        mixture = torch.logaddexp(reference + beta.log(), student + (1 - beta).log())
        return beta * _kl(reference, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) [N] of log-probs p, q [N, K] at each position. An outcome of probability 0 under p adds 0."""
    impossible = p == float("-inf")
    difference = (p - q).masked_fill(impossible, 0.0)
    return (p.exp() * difference).sum(-1)


def _rest(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability [N] of all tokens outside `ids` [N, K]; -inf if there are no such tokens."""
    if ids.shape[-1] == logprobs.shape[-1]:
        return logprobs.new_full(logprobs.shape[:1], float("-inf"))
    return logprobs.scatter(-1, ids, float("-inf")).logsumexp(-1)


class ScorerLoss:
    """Computes the training target and the boundary loss of one policy's scorers."""

    def __init__(self, policy: KVpopPolicyConfig, target: TargetConfig, boundary: BoundaryConfig) -> None:
        self.policy, self.target, self.boundary = policy, FutureTarget(target), BoundaryLoss(boundary)

    def view(
        self,
        student: Any,
        lengths: Tensor,
        prompts: Tensor,
        width: int,
        *,
        kernel: str,
        traces: Sequence[EvictionTrace] | None = None,
        learn: bool = True,
        measure: bool = True,
    ) -> LayerMap:
        """Return the view for one forward pass; its LearnedView, `of_policy`, computes the scorers' loss in the pass.

        If the traces record experts, the view replays these, too.

        lengths, prompts : number of tokens of each row and of its prompt, int64 [rows]; rows are padded to `width`
        traces : traces under which attention runs, one per row; None means that the scorers' own decisions apply
        learn, measure : compute the boundary loss; count the kept tokens among those that the target would keep
        """
        policy, base = self.policy, base_of(student)
        decay: dict[str, Any] = {"decay_every": policy.decay_every}
        queries = self.boundary.draw(lengths, policy.sinks + policy.window + policy.k, width)
        batch = {} if traces is None else batch_traces(traces, [0] * len(traces), width)
        view = LearnedView(
            base.cache_scorers,
            policy,
            lengths,
            prompts=prompts if policy.prefill == "dense" else None,
            target=self.target if learn or measure else None,
            prepare=partial(self.boundary.pairs, queries=queries, window=policy.window, **decay) if learn else None,
            loss=partial(self.boundary, **decay) if learn else None,
            kernel=kernel,
            recorded=policy_part(batch)["evict_at"] if batch else None,
        )
        whole = map_of_model(view, base.config, lengths, width, kernel)
        whole.routers = RouterReplay(batch["routed"], lengths.device) if "routed" in batch else None
        return whole
