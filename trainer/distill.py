"""Distillation under recorded evictions (G-KV appendix C): the student learns to say under a small cache what the
teacher says with a full one.

The completions are those of a dataset (outputs of the teacher, kept where a reward accepts them), whose evictions an
engine simulates: it decodes the given tokens with the starting model under the policy, and records. Or the student
samples them itself, under eviction. Either way the student is trained under the recorded trace, by losses.py:

    loss = 1/N sum over the N completion tokens of  kl_weight tau^2 KL(teacher || student | trace) + ce_weight CE

The teacher attends to everything. It is a model in memory, or the cache that teacher.py has written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments
from trl.models import unwrap_model_for_generation
from trl.models.utils import _ForwardRedirection, prepare_deepspeed

from rollout.config import SamplingConfig
from rollout.engine import Engine, Rollout
from sparse_rl.attention import adopt, refuse_reentrant_checkpointing
from trainer.batches import Batch, base_of
from trainer.losses import DistillationLoss, TopK
from trainer.resumable import Resumable
from trainer.rows import Row
from trainer.teacher import TeacherCache
from trainer.weights import named_weights


@dataclass
class DistillConfig(TrainingArguments):
    """transformers' TrainingArguments and what distillation adds. See the recipe keys of the same names.

    loss : what is minimised
    top_k : of a teacher in memory, count only so many tokens and the rest as one; None: the whole vocabulary
    sampling : how the student samples its own completions; None: they are those of the dataset
    """

    loss: DistillationLoss = field(default_factory=DistillationLoss)
    top_k: int | None = None
    sampling: SamplingConfig | None = None
    refresh_every: int = 0
    rollout_sleep: bool = False
    packing: bool = False
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        self.gradient_checkpointing_kwargs = {"use_reentrant": False}
        self.remove_unused_columns = False
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """As transformers has it for its logs: plain values."""
        sampling = None if self.sampling is None else vars(self.sampling)
        return {**super().to_dict(), "loss": vars(self.loss), "sampling": sampling}


class DistillTrainer(Resumable):
    """Distils a teacher into a model under the evictions of an engine.

    Parameters
    ----------
    model : the student
    teacher : a model with the student's vocabulary, or what it has said; never trained
    engine : records the evictions; its policy is the one that the student is trained under
    rows, validation : the dataset, and the held-out one
    """

    args: DistillConfig
    summed: tuple[str, ...] = ("kl", "ce")  # what `_losses` returns between the loss and the count

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel | TeacherCache,
        engine: Engine | None,
        args: DistillConfig,
        rows: Sequence[Row],
        validation: Sequence[Row] | None = None,
        **kwargs: Any,
    ) -> None:
        if engine is not None:
            self.engine = engine
        super().__init__(
            model=model,
            args=args,
            train_dataset=cast(Any, list(rows)),
            eval_dataset=None if validation is None else cast(Any, list(validation)),
            data_collator=cast(Any, list),
            **kwargs,
        )
        self.model_accepts_loss_kwargs = True  # our loss is already divided by all that one update counts
        adopt(base_of(self.model))
        refuse_reentrant_checkpointing(cast(Any, self.model))
        self.teacher = teacher if isinstance(teacher, TeacherCache) else self._prepare_teacher(adopt(teacher))
        self._live = getattr(engine, "model", None) is base_of(self.model)  # it samples from the student as it is
        self._redirect = _ForwardRedirection()
        self._sums: dict[str, float] = defaultdict(float)  # over all processes, since the last log
        self._weight = 1.0  # of a batch in the sums; 0 where a process repeats one because the others have one more
        self._synced: int | None = None

    def _prepare_teacher(self, teacher: PreTrainedModel) -> PreTrainedModel:
        teacher.requires_grad_(False).eval()
        plugin = self.accelerator.state.deepspeed_plugin
        if plugin is not None and plugin.zero_stage == 3:
            return cast(Any, prepare_deepspeed(cast(Any, teacher), self.accelerator))
        return cast(Any, teacher.to(cast(Any, self.accelerator.device)))

    # ---- sequences and their traces -----------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """The micro-batches of one update, each a list of rollouts; and how many completion tokens all processes have.

        One call of the engine serves them all.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return [], None
        rollouts = self._rollouts([row for batch in batches for row in batch])
        following = iter(rollouts)
        return [[next(following) for _ in batch] for batch in batches], self._count(rollouts)

    def _count(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """The completion tokens of all processes."""
        tokens, retention = sum(len(r.completion_ids) for r in rollouts), sum(r.trace.retention() for r in rollouts)
        local = torch.tensor([[tokens, len(rollouts), retention]], dtype=torch.float64, device=self.accelerator.device)
        local *= self._weight
        tokens, sequences, retention = self.accelerator.gather(local).sum(0).tolist()
        self._sums["sequences"] += sequences
        self._sums["retention"] += retention
        return torch.tensor(tokens, device=self.accelerator.device)

    def _rollouts(self, rows: Sequence[Row]) -> list[Rollout]:
        """The rows under eviction: simulated, or sampled by the student."""
        prompts = [row.prompt for row in rows]
        with self._engine_weights() as engine:
            if self.args.sampling is None:
                return engine.simulate(prompts, [row.completion for row in rows], self.args.loss.temperature)
            rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
            seed = ((self.args.seed + 1) * 1_000_003 + self.state.global_step) * ranks + rank
            return engine.generate(prompts, SamplingConfig(**{**vars(self.args.sampling), "seed": seed}))

    @contextmanager
    def _engine_weights(self) -> Iterator[Engine]:
        """The engine with the weights that it has to have: the starting ones, or from time to time the student's."""
        every = 1 if self.args.sampling is not None else self.args.refresh_every
        sleeper = cast(Any, self.engine) if self.args.rollout_sleep and hasattr(self.engine, "sleep") else None
        with ExitStack() as stack:
            if sleeper is not None:
                sleeper.wake_up()
                stack.callback(sleeper.sleep)
            if self._live:
                live = unwrap_model_for_generation(self.model_wrapped, self.accelerator)
                stack.enter_context(live)
                stack.enter_context(self.accelerator.autocast())
            elif every:
                due = self.state.global_step - self.state.global_step % every
                if due != self._synced and (due or self.args.sampling is not None):
                    self.engine.load_weights(named_weights(self.model, self.accelerator))
                self._synced = due
            yield self.engine

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # transformers' estimate wants a dict of tensors

    # ---- the loss -------------------------------------------------------------------------------------------------

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The whole of it runs inside the wrapper's forward, where DeepSpeed and DDP expect the parameters' use."""
        student = self.accelerator.unwrap_model(model)
        loss, *others = self._redirect(model, student, self._losses, student, inputs)
        sums = self.accelerator.gather(torch.stack(others)[None].detach() * self._weight).sum(0)
        for name, value in zip((*self.summed, "tokens"), sums.tolist(), strict=True):
            self._sums[name] += value
        total = sums[-1] if num_items_in_batch is None else num_items_in_batch
        return loss / total * self.accelerator.num_processes  # whose gradients are averaged

    def _losses(self, student: Any, rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, ...]:
        """Sums over the completion tokens: the loss, what is `summed`, count."""
        batch = Batch.of(rollouts, self.accelerator.device, self.args.packing, self.args.attention)
        with self.accelerator.autocast():
            return self._distilled(student, batch, batch.hidden(student, replayed=True))

    def _distilled(self, student: Any, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sums over the completion tokens, of the student's hidden states: the loss, divergence, cross-entropy, count.

        Under autocast, where that is in use.
        """
        loss, head = self.args.loss, base_of(student).get_output_embeddings()
        if isinstance(self.teacher, TeacherCache):
            known = self.teacher.read(batch.rollouts, self.accelerator.device)
            sums = loss(hidden, head, known.__getitem__, batch.targets)
        else:
            whole = cast(Any, self.accelerator.unwrap_model(self.teacher))
            with torch.no_grad():  # through DeepSpeed's own forward, where it wraps the teacher
                said = self._redirect(self.teacher, whole, lambda: batch.hidden(whole, replayed=False))
            teach = whole.get_output_embeddings()
            if self.args.top_k is None:
                sums = loss(hidden, head, lambda part: teach(said[part]), batch.targets)
            else:
                with torch.no_grad():
                    known = TopK.of_hidden(said, teach, self.args.top_k, loss.temperature, loss.chunk)
                sums = loss(hidden, head, known.__getitem__, batch.targets)
        return *sums, torch.tensor(float(len(batch.targets)), device=hidden.device)

    # ---- what is logged -------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._sums["tokens"] and "loss" in logs:
            logs |= {**self._measured(), "tokens": self._sums["tokens"]}
            logs["cache/retention"] = logs.pop("retention")
            self._sums.clear()
        super().log(logs, start_time)

    def _measured(self) -> dict[str, float]:
        """The means per token, and the share of pairs that is seen per sequence."""
        sums = self._sums
        means = {name: sums[name] / sums["tokens"] for name in ("kl", "ce")}
        return {**means, "retention": sums["retention"] / sums["sequences"]}

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """KL to the teacher and cross-entropy per token, on the held-out rows, under the evictions of the engine."""
        before, self._sums = self._sums, defaultdict(float)
        model = cast(Any, self.model)
        training = model.training
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            rows = cast(Any, self.eval_dataset)
            loader = DataLoader(rows, batch_size=self.args.eval_batch_size, collate_fn=list)
            ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
            batches = list(loader)
            for i in range(-(-len(batches) // ranks)):  # a process without a batch repeats one, and does not count it
                self._weight = float(i * ranks + rank < len(batches))
                rollouts = self._rollouts(batches[min(i * ranks + rank, len(batches) - 1)])
                self._count(rollouts)
                self.compute_loss(self.model_wrapped, rollouts)
        model.train(training)
        self._weight = 1.0
        metrics = {f"eval_{name}": value for name, value in self._measured().items()}
        self._sums = before
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # ---- resume ---------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "sums": dict(self._sums)}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._sums.update(state["sums"])
        self._synced = None
