"""Distillation under recorded evictions (G-KV appendix C).

A student with a small cache learns the token distributions of a teacher with a full cache, under a recorded trace. The
completions come from a dataset (the teacher's outputs, filtered by a reward) or from the student. In the first case an
engine simulates the evictions: it decodes the given tokens with the starting model under the policy, and records the
trace. In the second case sampling under eviction records the trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from rollout.engine import Engine, SamplingConfig
from sparse_rl.models.base import base_of
from trainer.batches import Batch, trace_of
from trainer.distill.config import DistillConfig
from trainer.examples import Example
from trainer.scored.config import ScorersConfig
from trainer.teacher.trainer import TaughtArguments, TaughtTrainer
from trainer.weights import give_weights, live_weights


@dataclass
class DistillArguments(TaughtArguments):
    """Arguments of a DistillTrainer. scorers : settings for training the policy's scorers; None keeps them fixed"""

    kind: ClassVar[str] = "distill"
    distill: DistillConfig = field(default_factory=DistillConfig)
    scorers: ScorersConfig | None = None


class DistillTrainer(TaughtTrainer):
    """Distils a teacher into a model under the evictions of an engine.

    It takes the parameters of TaughtTrainer (model, teacher, args, examples, validation), and:

    engine : engine that records the evictions; the student is trained under the engine's policy
    sleep : True frees the engine's memory while the student is trained, if the engine supports this
    """

    args: DistillArguments

    def __init__(
        self,
        model: Any,
        teacher: Any,
        engine: Engine,
        args: DistillArguments,
        *data: Any,
        sleep: bool = False,
        **kwargs: Any,
    ) -> None:
        self.engine = engine
        super().__init__(model, teacher, args, *data, **kwargs)
        self._sleeper = cast(Any, engine) if sleep and hasattr(engine, "sleep") else None
        self.carry_scorers_of(engine.policy, args.scorers)
        if self.scorer_loss is not None:
            self.summed = (*self.summed, "boundary")
        self._sampling = None
        if args.distill.completions == "student":
            self._sampling = SamplingConfig(args.distill.max_completion_length, args.loss.temperature)
        self._live = getattr(engine, "model", None) is base_of(self.model)  # the engine uses the live student
        self._synced: int | None = None

    def _prepared(self, examples: Sequence[Example]) -> list[Example]:
        prompts = [example.prompt for example in examples]
        with self.refused_at_this_step(), self._engine_weights() as engine:
            if self._sampling is None:
                completions = [example.completion for example in examples]
                rollouts = engine.simulate(prompts, completions, self.args.loss.temperature)
            else:
                seed = self.sampling_seed(self.state.global_step)
                rollouts = engine.generate(prompts, dataclasses.replace(self._sampling, seed=seed))
        return [Example.from_rollout(rollout) for rollout in rollouts]

    def _count(self, examples: Sequence[Example]) -> Tensor:
        """Return the number of completion tokens of all processes. Add retention and sequences to the logged sums."""
        tokens = sum(len(example.completion) for example in examples)
        retention = sum(example.trace.retention() for example in examples if example.trace is not None)
        local = torch.tensor([[tokens, len(examples), retention]], dtype=torch.float64, device=self.accelerator.device)
        local *= self._weight
        tokens, sequences, retention = self.accelerator.gather(local).sum(0).tolist()
        self._sums["sequences"] += sequences
        self._sums["retention"] += retention
        return torch.tensor(tokens, device=self.accelerator.device)

    @contextmanager
    def _engine_weights(self) -> Iterator[Engine]:
        """Yield the engine with the weights that are due.

        These are the student's current weights if the engine shares the student's module or samples completions.
        Otherwise they are the starting model's weights, and after a refresh the student's weights at the last refresh.
        """
        every = 1 if self._sampling is not None else self.args.distill.refresh_every
        with ExitStack() as stack:
            if self._sleeper is not None:
                self._sleeper.wake_up()
                stack.callback(self._sleeper.sleep)
            if self._live:
                stack.enter_context(live_weights(self))
            elif every:
                due = self.state.global_step - self.state.global_step % every
                if due != self._synced and (due or self._sampling is not None):
                    give_weights(self.engine, self.model, self.accelerator)
                self._synced = due
            yield self.engine

    def _losses(self, student: Any, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        args = self.args
        through = args.match_gradient == "through"
        batch = Batch.make(examples, self.accelerator.device, args.distill.packing, args.attention_kernel, through)
        with self.accelerator.autocast():
            if self.scorer_loss is None:
                return self._distilled(student, batch, batch.hidden(student, replayed=True))
            assert args.scorers is not None
            traces = [trace_of(example) for example in batch.examples]
            view = self.scorer_loss.view(
                student, *batch.sizes(), batch.ids.shape[1], kernel=args.attention_kernel, traces=traces
            )
            loss, *others, count = self._distilled(student, batch, batch.hidden_under(student, view))
            boundary = torch.stack(list(view.losses.values())).mean() * count
        return loss + args.scorers.weight * boundary, *others, boundary.detach(), count

    def _measured(self) -> dict[str, float]:
        scorer_metrics = (
            {"boundary_loss": self._sums["boundary"] / self._sums["tokens"]} if self.scorer_loss is not None else {}
        )
        return {**super()._measured(), **scorer_metrics}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._synced = None
