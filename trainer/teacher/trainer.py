"""Training on the token distributions of a dense teacher: the base of distillation and KVpop's retrofit.

The teacher attends to all tokens. It is either a model in memory or a teacher cache (cache.py). The loss of an update
is a sum over the N completion tokens of all processes, where tau is the temperature of the distillation and CE the
cross-entropy (losses/distillation.py):

    loss = 1/N sum of  kl_weight tau^2 KL(teacher || student) + ce_weight CE

Subclasses define the student's attention in `_losses`, and the training examples in `_prepared`.
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
from sparse_rl.models.head import head_of
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
    """Arguments that every TaughtTrainer takes. loss : settings of the loss"""

    loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)

    def __post_init__(self) -> None:
        self.remove_unused_columns = False
        super().__post_init__()


class TaughtTrainer(Resumable):
    """Trains a student, `model`, to match a teacher.

    teacher : model with the student's vocabulary, or a teacher cache; the teacher is never trained
    """

    args: TaughtArguments
    summed: tuple[str, ...] = ("kl", "ce", "right")  # names of the sums that `_losses` returns between loss and count

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
        self.model_accepts_loss_kwargs = True  # our loss is already divided by the tokens of the whole update
        adopt(base_of(self.model))
        refuse_reentrant_checkpointing(cast(Any, self.model))
        self.teacher = teacher if isinstance(teacher, TeacherCache) else self._prepare_teacher(adopt(teacher))
        self.loss = DistillationLoss(args.loss)
        self._redirect = _ForwardRedirection()
        self._sums: dict[str, float] = defaultdict(float)  # over all processes, since the last log
        self._weight = 1.0  # weight of a batch in the sums; 0 if a process only repeats a batch, as in `evaluate`

    def _prepare_teacher(self, teacher: Any) -> Any:
        teacher.requires_grad_(False).eval()
        ours = self.accelerator
        return prepare_deepspeed(teacher, ours) if partitioned(ours) else teacher.to(ours.device)

    def models(self) -> dict[str, Any]:
        return super().models() | ({} if isinstance(self.teacher, TeacherCache) else {"the teacher": self.teacher})

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Return an update's micro-batches as lists of examples, and the count of all processes' completion tokens."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return [], None
        examples = self._prepared([example for batch in batches for example in batch])
        following = iter(examples)
        return [[next(following) for _ in batch] for batch in batches], self._count(examples)

    def _prepared(self, examples: Sequence[Example]) -> list[Example]:
        """Return the examples to train on, made from `examples` of the dataset. Subclasses may add traces."""
        return list(examples)

    def _count(self, examples: Sequence[Example]) -> Tensor:
        local = torch.tensor([sum(len(example.completion) for example in examples)], device=self.accelerator.device)
        return self.accelerator.gather(local * int(self._weight)).sum()

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # transformers' estimate needs a dict of tensors

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        """Return the loss, computed inside the forward of the DeepSpeed or DDP wrapper, as these wrappers require."""
        student = self.accelerator.unwrap_model(model)
        loss, *others = self._redirect(model, student, self._losses, student, inputs)
        sums = self.accelerator.gather(torch.stack(others)[None].detach() * self._weight).sum(0)
        for name, value in zip((*self.summed, "tokens"), sums.tolist(), strict=True):
            self._sums[name] += value
        total = sums[-1] if num_items_in_batch is None else num_items_in_batch
        return loss / total * self.accelerator.num_processes  # the gradients of the processes are averaged

    def _losses(self, student: Any, examples: Sequence[Example]) -> tuple[Tensor, ...]:
        """Return the loss and the values named in `summed`, summed over the completion tokens, and the token count."""
        raise NotImplementedError

    def _distilled(self, student: Any, batch: Batch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the sums of loss, divergence and cross-entropy over the completion tokens, the number of tokens that
        the student predicts right, and the token count.

        Call this under autocast, if the training uses autocast. hidden : as in DistillationLoss
        """
        teacher_outputs = self._teacher_outputs(batch)
        sums = self.loss(hidden, head_of(base_of(student)), teacher_outputs, batch.targets)
        return *sums, torch.tensor(float(len(batch.targets)), device=hidden.device)

    @torch.no_grad()
    def _teacher_outputs(self, batch: Batch) -> Callable[[slice], Tensor | TopK]:
        """Return a function from a slice of the completion tokens to the teacher's logits, or to its top k as TopK."""
        if isinstance(self.teacher, TeacherCache):
            return self.teacher.read(batch.examples, self.accelerator.device).__getitem__
        whole, config = cast(Any, self.accelerator.unwrap_model(self.teacher)), self.loss.config
        head = head_of(whole)
        # _redirect calls DeepSpeed's forward if DeepSpeed wraps the teacher.
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
        """Return the metrics since the last log: KL and cross-entropy per token, the share of tokens that the student
        predicts right, and mean retention per sequence.
        """
        sums = self._sums
        named = {"kl": "kl", "ce": "ce", "token_accuracy": "right"}
        means = {name: sums[key] / sums["tokens"] for name, key in named.items()}
        return {**means, "cache/retention": sums["retention"] / sums["sequences"]}

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure KL, cross-entropy and token accuracy on the validation examples, with the attention of training."""
        before, self._sums = self._sums, defaultdict(float)
        model, rows = cast(Any, self.model), cast(Any, self.eval_dataset)
        training = model.training
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            batches = list(DataLoader(rows, batch_size=self.args.eval_batch_size, collate_fn=list))
            ranks = self.accelerator.num_processes
            for index in range(self.accelerator.process_index, -(-len(batches) // ranks) * ranks, ranks):
                # A process without a batch repeats the last batch with weight 0.
                self._weight = float(index < len(batches))
                examples = self._prepared(batches[min(index, len(batches) - 1)])
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
