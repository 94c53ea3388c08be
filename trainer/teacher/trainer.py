"""Training on what a dense teacher says of a text: what distillation and KVpop's retrofit share.

The teacher attends to everything. It is a model in memory, or what cache.py has written. Per update, over the N
completion tokens of all processes,

    loss = 1/N sum of  kl_weight tau^2 KL(teacher || student) + ce_weight CE  (losses/distillation.py)

Subclasses say what the student sees, in `_losses`, and what is trained on, in `_prepared`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments
from trl.models.utils import _ForwardRedirection, prepare_deepspeed

from sparse_rl.attention.interface import adopt, refuse_reentrant_checkpointing
from sparse_rl.models.base import base_of
from trainer.arguments import ReplayedArguments, check_adapters
from trainer.batches import Batch
from trainer.examples import Example
from trainer.losses.config import DistillationLossConfig
from trainer.losses.distillation import DistillationLoss, TopK
from trainer.resumable import Resumable
from trainer.teacher.cache import TeacherCache
from trainer.weights import partitioned


@dataclass
class TaughtArguments(ReplayedArguments, TrainingArguments):
    """What every TaughtTrainer has. loss : what is minimised"""

    loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)

    def __post_init__(self) -> None:
        self.remove_unused_columns = False
        super().__post_init__()


class TaughtTrainer(Resumable):
    """A student, `model`, that learns from a teacher.

    teacher : a model with the student's vocabulary, or what one has written down; never trained
    examples, validation : the dataset, and the held-out one
    """

    args: TaughtArguments
    summed: tuple[str, ...] = ("kl", "ce")  # what `_losses` returns between the loss and the count

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel | TeacherCache,
        args: TaughtArguments,
        examples: Sequence[Example],
        validation: Sequence[Example] | None = None,
        **kwargs: Any,
    ) -> None:
        check_adapters(model)
        data = {"train_dataset": list(examples), "eval_dataset": None if validation is None else list(validation)}
        super().__init__(model=model, args=args, data_collator=list, **data, **kwargs)
        self.model_accepts_loss_kwargs = True  # our loss is already divided by all that one update counts
        adopt(base_of(self.model))
        refuse_reentrant_checkpointing(cast(Any, self.model))
        self.teacher = teacher if isinstance(teacher, TeacherCache) else self._prepare_teacher(adopt(teacher))
        self.loss = DistillationLoss(args.loss)
        self._redirect = _ForwardRedirection()
        self._sums: dict[str, float] = defaultdict(float)  # over all processes, since the last log
        self._weight = 1.0  # of a batch in the sums; 0 where a process repeats one because the others have one more

    def _prepare_teacher(self, teacher: Any) -> Any:
        teacher.requires_grad_(False).eval()
        ours = self.accelerator
        return prepare_deepspeed(teacher, ours) if partitioned(ours) else teacher.to(ours.device)

    def models(self) -> dict[str, Any]:
        return super().models() | ({} if isinstance(self.teacher, TeacherCache) else {"the teacher": self.teacher})

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one update, lists of examples, and the completion tokens of all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return [], None
        examples = self._prepared([example for batch in batches for example in batch])
        following = iter(examples)
        return [[next(following) for _ in batch] for batch in batches], self._count(examples)

    def _prepared(self, examples: Sequence[Example]) -> list[Example]:
        """What is trained on for these of the dataset."""
        return list(examples)

    def _count(self, examples: Sequence[Example]) -> Tensor:
        """The completion tokens of all processes."""
        local = torch.tensor([sum(len(one.completion) for one in examples)], device=self.accelerator.device)
        return self.accelerator.gather(local * int(self._weight)).sum()

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # transformers' estimate wants a dict of tensors

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        """The whole of it runs inside the wrapper's forward, where DeepSpeed and DDP expect the parameters' use."""
        student = self.accelerator.unwrap_model(model)
        loss, *others = self._redirect(model, student, self._losses, student, inputs)
        sums = self.accelerator.gather(torch.stack(others)[None].detach() * self._weight).sum(0)
        for name, value in zip((*self.summed, "tokens"), sums.tolist(), strict=True):
            self._sums[name] += value
        total = sums[-1] if num_items_in_batch is None else num_items_in_batch
        return loss / total * self.accelerator.num_processes  # whose gradients are averaged

    def _losses(self, student: Any, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        """Sums over the completion tokens: the loss, what is `summed`, count."""
        raise NotImplementedError

    def _distilled(self, student: Any, batch: Batch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Sums over the completion tokens, under autocast if in use: loss, divergence, cross-entropy, count."""
        said = self._taught(batch)
        sums = self.loss(hidden, base_of(student).get_output_embeddings(), said, batch.targets)
        return *sums, torch.tensor(float(len(batch.targets)), device=hidden.device)

    @torch.no_grad()
    def _taught(self, batch: Batch) -> Callable[[slice], Tensor | TopK]:
        """What the teacher says of a slice of the completion tokens."""
        if isinstance(self.teacher, TeacherCache):
            return self.teacher.read(batch.examples, self.accelerator.device).__getitem__
        whole, config = cast(Any, self.accelerator.unwrap_model(self.teacher)), self.loss.config
        head = whole.get_output_embeddings()
        # through DeepSpeed's own forward, where it wraps the teacher
        hidden = self._redirect(self.teacher, whole, lambda: batch.hidden(whole, replayed=False))
        if config.top_k is None:
            return lambda part: head(hidden[part])
        return TopK.of_hidden(hidden, head, config.top_k, config.temperature, config.chunk).__getitem__

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self._sums["tokens"] and "loss" in logs:
            logs |= {**self._measured(), "tokens": self._sums["tokens"]}
            self._sums.clear()
        super().log(logs, start_time)

    def _measured(self) -> dict[str, float]:
        """The means per token; and per sequence the share of the tokens that is held at its end."""
        sums = self._sums
        means = {name: sums[name] / sums["tokens"] for name in ("kl", "ce")}
        return {**means, "cache/retention": sums["retention"] / sums["sequences"]}

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """KL to the teacher and cross-entropy per token, on the held-out examples, as the student is trained."""
        before, self._sums = self._sums, defaultdict(float)
        model, rows = cast(Any, self.model), cast(Any, self.eval_dataset)
        training = model.training
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            batches = list(DataLoader(rows, batch_size=self.args.eval_batch_size, collate_fn=list))
            ranks = self.accelerator.num_processes
            for mine in range(self.accelerator.process_index, -(-len(batches) // ranks) * ranks, ranks):
                self._weight = float(
                    mine < len(batches)
                )  # a process without a batch repeats one, and does not count it
                examples = self._prepared(batches[min(mine, len(batches) - 1)])
                self._count(examples)
                self.compute_loss(self.model_wrapped, examples)
        model.train(training)
        self._weight = 1.0
        metrics = {f"eval_{name}": value for name, value in self._measured().items()}
        self._sums = before
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def extra_state(self) -> dict[str, Any]:
        return {**super().extra_state(), "sums": dict(self._sums)}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._sums.update(state["sums"])
