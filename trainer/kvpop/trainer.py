"""KVpop's retrofit (algorithm 1): a model learns to live under a small cache, and its scorers which tokens to keep.

The student runs under the mask that its own scorers induce, over the whole text: query q sees the sinks, the window and
the k tokens that rank best; within a prompt all, where `cache.prefill` is dense. Per micro-batch of N completion tokens

    loss = 1/N sum over tokens of (kl_weight tau^2 KL(teacher || student) + ce_weight CE)
           + boundary_weight * mean over layers of the boundary loss (trainer/losses/boundary.py)

The scorers see keys and values without their gradient, and a mask has none: so the model learns from KL and CE alone,
and scorers and gamma from the boundary loss alone. The teacher is dense. Two learning rates: the model's is that
of every training; the scorers' rises, and falls along a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, set_seed

from sparse_rl.attention.views.learned import FutureTarget, LearnedView
from sparse_rl.errors import NotFiniteError
from sparse_rl.models.base import base_of
from sparse_rl.models.directory import SCORERS, attach_scorers
from sparse_rl.policies.base import Policy
from sparse_rl.policies.kvpop import KVpop
from sparse_rl.scorers.base import NOT_DECAYED
from trainer.batches import Batch
from trainer.examples import Example
from trainer.kvpop.config import KVpopConfig
from trainer.losses.boundary import BoundaryLoss
from trainer.teacher.arguments import TaughtArguments
from trainer.teacher.cache import TeacherCache
from trainer.teacher.trainer import TaughtTrainer


@dataclass
class KVpopArguments(TaughtArguments):
    """What a KVpopTrainer has: `kvpop` is what the retrofit adds."""

    kvpop: KVpopConfig = field(default_factory=KVpopConfig)


class KVpopTrainer(TaughtTrainer):
    """Retrofits a model with scorers, which are attached to it where it has none.

    Parameters: TaughtTrainer's; policy : of the cache, with its scorer
    """

    args: KVpopArguments
    summed = ("kl", "ce", "boundary", "held", "of", "retention", "sequences")

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel | TeacherCache,
        policy: KVpop,
        args: KVpopArguments,
        examples: Sequence[Example],
        validation: Sequence[Example] | None = None,
        **kwargs: Any,
    ) -> None:
        self.policy = policy
        if not hasattr(model, SCORERS):
            set_seed(args.seed)
            attach_scorers(model, policy)
        getattr(model, SCORERS).to(model.dtype)  # ZeRO-3 wants one dtype; they compute in float32 in any case
        if not args.kvpop.train_base:
            model.requires_grad_(False)
            getattr(model, SCORERS).requires_grad_(True)
        super().__init__(model, teacher, args, examples, validation, **kwargs)
        self.boundary, self.target = BoundaryLoss(args.kvpop.boundary), FutureTarget(args.kvpop.target)

    # ---- the loss -------------------------------------------------------------------------------------------------

    def _losses(self, student: Any, examples: Sequence[Example]) -> tuple[torch.Tensor, ...]:
        policy = self.policy.config
        batch = Batch.make(examples, self.accelerator.device)
        lengths = torch.tensor([row[0].length for row in batch.rows], device=self.accelerator.device)
        first = policy.sinks + policy.window + policy.k  # the first query at which something is evicted
        scorers = base_of(student).cache_scorers
        decay: dict[str, Any] = {"decay_every": policy.decay_every}
        queries = self.boundary.draw(lengths, first, batch.ids.shape[1])
        learns = any(True for _ in scorers.parameters())
        view = LearnedView(
            scorers,
            policy,
            lengths,
            prompts=torch.tensor([len(row[0].prompt) for row in batch.rows], device=lengths.device)
            if policy.prefill == "dense"
            else None,
            target=self.target if learns or not student.training else None,
            prepare=partial(self.boundary.pairs, queries=queries, window=policy.window, **decay) if learns else None,
            loss=partial(self.boundary, **decay) if learns else None,
            kernel=self.args.attention_kernel,
        )
        with self.accelerator.autocast():
            try:
                hidden = batch.hidden_under(student, view)
            except NotFiniteError as error:
                mend = "start again with a lower scorer_learning_rate, or learning_rate"
                raise NotFiniteError(f"after step {self.state.global_step} {error}; {mend}") from error
            loss, kl, ce, count = self._distilled(student, batch, hidden)
        losses = torch.stack(list(view.losses.values())) if learns else hidden.new_zeros(1, dtype=torch.float32)
        boundary = losses.mean() * count
        held, of = (sum((pair[i] for pair in view.recalls.values()), torch.zeros(())) for i in (0, 1))
        retention = torch.stack(list(view.retained.values())).mean(0).sum()
        sequences = torch.tensor(float(len(lengths)))
        measured = (x.to(count) for x in (kl, ce, boundary.detach(), held, of, retention, sequences))
        return loss + self.args.kvpop.boundary_weight * boundary, *measured, count

    def _measured(self) -> dict[str, float]:
        """Also the boundary loss, and how much of what the target would keep is kept."""
        sums = self._sums
        measured = {**super()._measured(), "boundary_loss": sums["boundary"] / sums["tokens"]}
        return measured | ({"recall": sums["held"] / sums["of"]} if sums["of"] else {})

    # ---- two learning rates ---------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """AdamW over the model, at the training's learning rate, and the scorers, at their own."""
        if self.optimizer is None:
            whole: Any = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(whole))
            groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
            for name, weight in whole.named_parameters():
                if weight.requires_grad:
                    scorer = SCORERS in name.split(".")
                    key = scorer, name.split(".")[-1] not in NOT_DECAYED if scorer else name in decayed
                    groups.setdefault(key, []).append(weight)
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
            rates = self.args.learning_rate, self.args.kvpop.scorer_learning_rate
            self.optimizer = kind(
                [
                    {
                        "params": weights,
                        "lr": rates[scorer],
                        "weight_decay": self.args.weight_decay if decays else 0.0,
                        "scorer": scorer,
                    }
                    for (scorer, decays), weights in sorted(groups.items(), key=lambda item: item[0])
                ],
                **options,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The model's rate as any training has it; the scorers' rises over the warm-up and falls along a cosine."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            base: Any = super().create_scheduler(num_training_steps, optimizer)
            (own,) = set(base.lr_lambdas)
            args = self.args.kvpop
            low = args.scorer_final_learning_rate / args.scorer_learning_rate
            cosine = partial(_warm_cosine, warmup=args.scorer_warmup_steps, steps=num_training_steps, low=low)
            both = [cosine if group["scorer"] else own for group in optimizer.param_groups]
            self.lr_scheduler = LambdaLR(optimizer, both)
        return self.lr_scheduler

    def learned_policy(self) -> Policy:
        return self.policy


def _warm_cosine(step: int, *, warmup: int, steps: int, low: float) -> float:
    """The share of the peak at a step: linear up to 1, then a cosine down to `low`."""
    if step < warmup:
        return step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2
