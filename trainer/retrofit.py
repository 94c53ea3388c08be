"""The retrofit of a learned policy: trains a model to work with a small cache, and its scorers to select tokens.

KVpop (algorithm 1): the student runs under the mask of its own scorers over the whole text. If `cache.prefill` is
dense, a query of the prompt sees all tokens before it. The loss of a micro-batch with N completion tokens is

    loss = 1/N sum over tokens of (kl_weight tau^2 KL(teacher || student) + ce_weight CE)
           + boundary_weight * mean over layers of the boundary loss (sparse_rl/methods/kvpop/loss.py)

where tau is the temperature of the distillation and CE the cross-entropy. The scorers get detached keys and values, and
a mask has no gradient. Therefore the model learns only from KL and CE, and the scorers and their decay factor gamma
learn only from the boundary loss.

DMS: the student runs under soft gates (sparse_rl/methods/kvpop/dms.py). KL and CE teach the gates to evict the right
tokens, and a target share sets the number of evicted tokens. In place of the boundary loss stands

    weight * max(0, target - mean alpha),       target = 1 - 1 / CR,

where alpha in [0, 1] is the value of a gate; an open gate (1) evicts its token. The mean of alpha is over all tokens,
layers and kv heads. The target compression ratio CR rises linearly from 1 to `compression` over `anneal_steps` steps.
If more gates are open than the target asks for, this term is 0, and only KL and CE close gates. Validation uses hard
gates, as decoding does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, set_seed

from sparse_rl.attention.views import LayerMap, map_of_model
from sparse_rl.errors import NotFiniteError
from sparse_rl.methods.kvpop.dms import DMS, GatedView
from sparse_rl.methods.kvpop.policy import KVpop, LearnedPolicy
from sparse_rl.models.directory import SCORERS, attach_scorers
from sparse_rl.models.load import base_of
from trainer.arguments import with_settings
from trainer.batch import Batch, Example
from trainer.config import KVpopConfig, KVpopLossConfig
from trainer.distill import TaughtArguments, TaughtTrainer
from trainer.losses import ScorerLoss


@with_settings(KVpopLossConfig, KVpopConfig)
class KVpopArguments(TaughtArguments):
    kind: ClassVar[str] = "kvpop"

    @cached_property
    def kvpop(self) -> KVpopConfig:
        return self.settings(KVpopConfig)


class KVpopTrainer(TaughtTrainer):
    """Trains a model together with its scorers, which are attached to a model without them. It takes the parameters of
    TaughtTrainer, and the learned policy that defines the scorers."""

    args: KVpopArguments
    policy: LearnedPolicy
    scorer_loss: ScorerLoss  # not set under dms
    summed: tuple[str, ...] = ("kl", "ce", "right", "boundary", "held", "of", "retention", "sequences")

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: Any,
        policy: LearnedPolicy,
        args: KVpopArguments,
        *data: Any,
        **kwargs: Any,
    ) -> None:
        self.policy = policy
        if not hasattr(model, SCORERS):
            set_seed(args.seed)
            attach_scorers(model, policy)
        # ZeRO-3 needs a single dtype; scorers compute in float32 anyway.
        scorers = getattr(model, SCORERS).to(model.dtype)
        if not args.kvpop.train_base:
            model.requires_grad_(False)
            scorers.requires_grad_(True)
        super().__init__(model, teacher, args, *data, **kwargs)
        if isinstance(policy, KVpop):
            self.scorer_loss = ScorerLoss(policy.config, args.kvpop.target, args.kvpop.boundary)
        self.learned_policy, self.scorer_learning_rate = policy, args.kvpop.scorer_learning_rate

    def _losses(self, student: Any, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        batch = Batch.make(examples, self.accelerator.device)
        view = self._view(student, batch)
        with self.accelerator.autocast():
            try:
                hidden = batch.hidden_under(student, view)
            except NotFiniteError as error:
                mend = "start again with a lower scorer_learning_rate, or learning_rate"
                raise NotFiniteError(f"after step {self.state.global_step} {error}; {mend}") from error
            loss, *distilled, count = self._distilled(student, batch, hidden)
        own, *measured = self._own_loss(view.of_policy, count)
        retention = torch.stack(list(view.of_policy.retained.values())).mean(0).sum()
        measured += [retention, torch.tensor(float(len(batch.rows)))]
        return loss + own, *distilled, *(x.detach().to(count) for x in measured), count

    def _view(self, student: Any, batch: Batch) -> LayerMap:
        learns = any(True for _ in base_of(student).cache_scorers.parameters())
        options: dict[str, Any] = {"kernel": self.args.attention_kernel, "measure": not student.training}
        return self.scorer_loss.view(student, *batch.sizes(), batch.ids.shape[1], learn=learns, **options)

    def _own_loss(self, view: Any, count: Tensor) -> tuple[Tensor, ...]:
        """Return the weighted boundary loss of all tokens, and the sums `boundary`, `held` and `of` (see `summed`)."""
        boundary = torch.stack(list(view.losses.values()) or [count.new_zeros(())]).mean() * count
        held, total = (sum((pair[i] for pair in view.recalls.values()), torch.zeros(())) for i in (0, 1))
        return self.args.kvpop.boundary_weight * boundary, boundary, held, total

    def _measured(self) -> dict[str, float]:
        sums = self._sums
        measured = {**super()._measured(), "boundary_loss": sums["boundary"] / sums["tokens"]}
        return measured | ({"recall": sums["held"] / sums["of"]} if sums["of"] else {})

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule: `lr_scheduler_type` for the model, warm-up and cosine decay for the scorers."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            base: Any = super().create_scheduler(num_training_steps, optimizer)
            (own,) = set(base.lr_lambdas)
            args = self.args.kvpop
            low = args.scorer_final_learning_rate / args.scorer_learning_rate
            cosine = partial(_warm_cosine, warmup=args.scorer_warmup_steps, steps=num_training_steps, low=low)
            lambdas = [cosine if group["scorer"] else own for group in optimizer.param_groups]
            self.lr_scheduler = LambdaLR(optimizer, lambdas)
        return self.lr_scheduler


def _warm_cosine(step: int, *, warmup: int, steps: int, low: float) -> float:
    """Return the learning rate as a share of its maximum: linear up to step `warmup`, then a cosine down to `low`."""
    if step < warmup:
        return step / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2


class GateTrainer(KVpopTrainer):
    """KVpopTrainer that trains the gates of the policy dms instead of scorers."""

    policy: DMS
    summed: tuple[str, ...] = ("kl", "ce", "right", "ratio", "open", "retention", "sequences")

    def compression(self) -> float:
        done = min(1.0, self.state.global_step / max(1, self.args.kvpop.gates.anneal_steps))
        return 1 + (self.policy.config.compression - 1) * done

    def _view(self, student: Any, batch: Batch) -> LayerMap:
        policy, (lengths, prompts) = self.policy.config, batch.sizes()
        base, width = base_of(student), batch.ids.shape[1]
        view = GatedView(
            base.cache_scorers,
            policy,
            lengths,
            prompts=prompts if policy.prefill == "dense" else None,
            temperature=self.args.kvpop.gates.temperature if student.training else None,
            kernel=self.args.attention_kernel,
        )
        return map_of_model(view, base.config, lengths, width, self.args.attention_kernel)

    def _own_loss(self, view: GatedView, count: Tensor) -> tuple[Tensor, ...]:
        share = view.share()
        ratio = (1 - 1 / self.compression() - share).clamp(min=0) * count
        return self.args.kvpop.gates.weight * ratio, ratio, share * count

    def _measured(self) -> dict[str, float]:
        sums = self._sums
        gate_metrics = {"gates_open": sums["open"] / sums["tokens"], "ratio_loss": sums["ratio"] / sums["tokens"]}
        return {**super(KVpopTrainer, self)._measured(), **gate_metrics}
