"""Training with a dense teacher: the base of every such training, and distillation under recorded evictions.

The teacher attends to all tokens. It is either a model in memory or a teacher cache (teacher.py). The loss of an update
is a sum over the N completion tokens of all processes, where tau is the temperature of the distillation and CE the
cross-entropy (losses.py):

    loss = 1/N sum of  kl_weight tau^2 KL(teacher || student) + ce_weight CE

In distillation (G-KV appendix C) the student has a small cache, and runs under a recorded trace. Completions of a
dataset (the teacher's outputs, filtered by a reward) are decoded by an engine with the starting model under the policy,
which records the trace; or the student samples completions under eviction.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments, set_seed
from trl.models.utils import _ForwardRedirection, prepare_deepspeed

from rollout.config import RolloutConfig
from rollout.context.config import PromptCacheConfig
from rollout.context.reader import ContextPrompts
from rollout.engine import Engine, SamplingConfig
from rollout.recorded import TOKENS, RecordedRollouts, check_rows
from sparse_rl.attention.interface import adopt, refuse_reentrant_checkpointing
from sparse_rl.errors import UserError
from sparse_rl.models.directory import model_directory
from sparse_rl.models.load import base_of, head_of, load_plain_model
from trainer.arguments import ReplayedArguments, check_adapters, refusals, weights_dtype, with_settings
from trainer.base import Resumable
from trainer.batch import Batch, Example, completed_examples, prompt_examples, recorded_examples, trace_of
from trainer.config import DistillationLossConfig, DistillConfig, ScorersConfig, TrainingConfig
from trainer.losses import DistillationLoss, TopK
from trainer.sampler import SamplerSettings
from trainer.teacher import TeacherCache
from trainer.weights import carry_scorers, give_weights, live_weights, partitioned


@dataclass
class TaughtArguments(ReplayedArguments, TrainingArguments):
    library: ClassVar[Any] = TrainingArguments

    @property
    def loss(self) -> DistillationLossConfig:
        """The settings of the loss per token."""
        return self.settings(DistillationLossConfig)

    def __post_init__(self) -> None:
        self.remove_unused_columns = False
        super().__post_init__()


class TaughtTrainer(Resumable):
    """Trains a student, `model`, to match a teacher: a model with its vocabulary, or a teacher cache. Without a teacher
    (None) only the cross-entropy is trained; kl_weight must then be 0."""

    args: TaughtArguments
    loss_is_scaled_for_ga = True  # our loss is already divided by the tokens of the whole update
    summed: tuple[str, ...] = ("kl", "ce", "right")  # names of the sums that `_losses` returns between loss and count

    def __init__(
        self,
        model: PreTrainedModel,
        teacher: PreTrainedModel | TeacherCache | None,
        args: TaughtArguments,
        examples: Sequence[Example],
        validation: Sequence[Example] | None = None,
        **kwargs: Any,
    ) -> None:
        check_adapters(model)
        args.settle_kernel(base_of(model).config)
        data = {"train_dataset": list(examples), "eval_dataset": None if validation is None else list(validation)}
        super().__init__(model=model, args=args, data_collator=list, **data, **kwargs)
        adopt(base_of(self.model))
        refuse_reentrant_checkpointing(cast(Any, self.model))
        self.teacher: Any = teacher
        if teacher is not None and not isinstance(teacher, TeacherCache):
            whole, ours = adopt(teacher).requires_grad_(False).eval(), self.accelerator
            self.teacher = prepare_deepspeed(whole, ours) if partitioned(ours) else whole.to(ours.device)
        self.loss = DistillationLoss(args.loss)
        self._redirect = _ForwardRedirection()
        self._sums: dict[str, float] = defaultdict(float)  # over all processes, since the last log
        self._weight = 1.0  # weight of a batch in the sums; 0 if a process only repeats a batch, as in `evaluate`

    def models(self) -> dict[str, Any]:
        no_model = self.teacher is None or isinstance(self.teacher, TeacherCache)
        return super().models() | ({} if no_model else {"the teacher": self.teacher})

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Return an update's micro-batches as lists of examples, and the number of completion tokens of all processes
        as an int64 scalar."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return [], None
        examples = self._with_traces([example for batch in batches for example in batch])
        following = iter(examples)
        return [[next(following) for _ in batch] for batch in batches], self._count(examples)

    def _with_traces(self, examples: Sequence[Example]) -> list[Example]:
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
        """Return the loss, computed inside the forward of the DeepSpeed or DDP wrapper, as these wrappers require.

        num_items_in_batch : completion tokens of the update, int64 []; None means those of `inputs`
        """
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
        """Return the sums of DistillationLoss, and the token count. Call this under autocast, if training uses it."""
        sums = self.loss(hidden, head_of(base_of(student)), self._teacher_outputs(batch), batch.targets)
        return *sums, torch.tensor(float(len(batch.targets)), device=hidden.device)

    @torch.no_grad()
    def _teacher_outputs(self, batch: Batch) -> Callable[[slice], Tensor | TopK] | None:
        """Return a function from a slice of the completion tokens to the teacher's logits, or to its top k as TopK."""
        if self.teacher is None:
            return None
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
        """Return the metrics since the last log."""
        sums = self._sums
        named = {"kl": "kl", "ce": "ce", "token_accuracy": "right"}
        if self.teacher is None:
            del named["kl"]
        means = {name: sums[key] / sums["tokens"] for name, key in named.items()}
        return {**means, "cache/retention": sums["retention"] / sums["sequences"]}

    def evaluate(self, eval_dataset: Any = None, *_: Any, **__: Any) -> dict[str, float]:
        """Measure KL, cross-entropy and token accuracy on the validation examples, with the attention of training.

        Raises UserError for other examples, and if the trainer has none.
        """
        if eval_dataset is not None or self.eval_dataset is None:
            raise UserError("only the eval_dataset of the constructor is evaluated; give it there", "eval_dataset")
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
                examples = self._with_traces(batches[min(index, len(batches) - 1)])
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


@with_settings(TrainingConfig, DistillationLossConfig, DistillConfig)
class DistillArguments(TaughtArguments):
    """transformers' TrainingArguments with the further keys of a distillation recipe, and with a recipe's defaults.

    It takes every option of TrainingArguments, and as keyword arguments of the same level the keys of `sparse-rl keys
    distill` that set the loss and the completions (`temperature`, `top_k`, `completions`, `max_length`, ...).

    bf16 : compute in bfloat16; None means true, unless fp16 is set
    scorers : settings for training the scorers of a learned policy further; None leaves them unchanged

    Raises UserError for an option that this project or transformers refuses.
    """

    kind: ClassVar[str] = "distill"
    bf16: Any = None
    scorers: ScorersConfig | None = None

    @property
    def distill(self) -> DistillConfig:
        """The settings of the completions."""
        return self.settings(DistillConfig)

    def __post_init__(self) -> None:
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16
        assert self.distill and self.loss  # checks the settings
        super().__post_init__()


def make_examples(
    rows: Any,
    tokenizer: Any,
    thinking: bool | None,
    config: DistillConfig,
    longest: Iterable[int | None],
    where: str,
    contexts: bool = False,
) -> list[Example]:
    """Return the rows of a dataset as examples, without completions if the student samples them.

    longest : further limits of the tokens in prompt and completion; None limits nothing
    where : name of the dataset in messages
    contexts : True if each prompt begins with the row's context, which an engine compacts
    """
    if config.completions == "student":
        return prompt_examples(rows, tokenizer, thinking, contexts)
    limits: dict[str, Any] = {
        "max_length": min(length for length in (config.max_length, *longest) if length),
        "max_completion_length": config.max_completion_length,
        "truncate": config.overlong == "truncate",
        "where": where,
    }
    if TOKENS.keys() <= {*getattr(rows, "column_names", ())}:
        return recorded_examples(rows, **limits)
    return completed_examples(rows, tokenizer, thinking, **limits, contexts=contexts)


class DistillTrainer(TaughtTrainer):
    """Distils a teacher into a model under the evictions that an engine records.

    model : the student: a directory, a hub name, or a module
    args : a DistillArguments or TrainingArguments; None means the defaults
    train_dataset, eval_dataset : rows with the columns prompt and completion (only prompt, if the student samples the
        completions), or a list of `trainer.batch.Example`
    teacher : directory, hub name, module, or teacher cache; None means the starting model itself
    cache, prompt_cache, rollout, engine, max_prompt_tokens, thinking : as for SparseGRPOTrainer
    about : prompts about contexts (ContextPrompts), which prompt_cache needs if train_dataset is a list of Examples
    processing_class : tokenizer; None means that of the model
    peft_config : LoRA adapters to train; None trains the whole model
    kwargs : further parameters of transformers' Trainer, such as callbacks
    """

    args: DistillArguments

    def __init__(
        self,
        model: Any,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        teacher: Any = None,
        cache: Any = None,
        prompt_cache: PromptCacheConfig | Mapping[str, Any] | None = None,
        about: ContextPrompts | None = None,
        rollout: RolloutConfig | Mapping[str, Any] | None = None,
        engine: Engine | RecordedRollouts | None = None,
        processing_class: Any = None,
        peft_config: Any = None,
        max_prompt_tokens: int | None = None,
        thinking: bool | None = None,
        **kwargs: Any,
    ) -> None:
        args, lora = DistillArguments.of(args), peft_config is not None or hasattr(model, "peft_config")
        check_adapters(model, peft_config)
        self.sampler = sampler = SamplerSettings.of(model, cache, rollout, engine, args, lora, prompt_cache)
        policy, named = sampler.policy, isinstance(model, (str, Path))
        cached = isinstance(teacher, TeacherCache)
        args.distill.check(
            policy.config,
            scorers=args.scorers is not None,
            save_steps=args.save_steps,
            cached_teacher=cached,
            prompt_cache=sampler.prompt_cache,
        )
        student: Any = model
        if named:
            student = load_plain_model(sampler.place, weights_dtype(args.dtype, args.zero_stage, lora))
        config = base_of(student).config

        def examples_of(rows: Any, where: str) -> list[Example] | None:
            recorded = isinstance(engine, RecordedRollouts)
            if rows is None or all(isinstance(row, Example) for row in rows):
                if any((row.place is not None) != recorded for row in rows or ()):
                    raise UserError("recorded examples need RecordedRollouts as the engine", where)
                return rows
            if not hasattr(rows, "column_names"):
                raise UserError("must be a datasets.Dataset, or a list of Examples", where)
            contexts = sampler.prompt_cache is not None
            check_rows(rows, recorded, 1, contexts)
            if args.distill.keep is not None:
                raise UserError("names a reward, which only a recipe can use; filter the rows instead", "keep")
            nonlocal processing_class, about
            processing_class = sampler.tokenizer() if processing_class is None else processing_class
            longest = sampler.rollout.max_model_len, config.max_position_embeddings
            if contexts and about is None:
                about = ContextPrompts.of_row(next(iter(rows)), processing_class)
            return make_examples(rows, processing_class, thinking, args.distill, longest, where, contexts)

        data: Any = examples_of(train_dataset, "train_dataset"), examples_of(eval_dataset, "eval_dataset")
        carry_scorers(student, policy, sampler.place)
        own, taught = teacher is None, not isinstance(engine, RecordedRollouts) or args.loss.kl_weight > 0
        if own and taught:
            teacher = sampler.place if named else base_of(copy.deepcopy(model))
        if isinstance(teacher, (str, Path)):
            teacher = load_plain_model(model_directory(str(teacher)), args.dtype, "model" if own else "teacher")
        if teacher is not None and not cached and teacher.config.vocab_size != config.vocab_size:
            wrong = f"has a vocabulary of {teacher.config.vocab_size} tokens, but the student's has {config.vocab_size}"
            raise UserError(wrong, "teacher")
        if peft_config is not None:
            from peft import get_peft_model

            set_seed(args.seed)
            with refusals():
                student = get_peft_model(student, peft_config)
        copied = sampler.place if named or args.distill.completions == "student" else model
        if args.distill.completions == "student":
            live = base_of(student)
        elif own and not policy.layered_parameters and not args.distill.refresh_every and args.zero_stage < 3:
            live = teacher  # it is the starting model and never changes, so it also serves as the sampled model
        else:
            live = sampler.place if named or engine is not None else base_of(copy.deepcopy(model))
        lengths = max_prompt_tokens, args.distill.max_completion_length
        self.engine = engine = sampler.open(live, copied, base_of(student), args, *lengths, about)
        super().__init__(student, teacher, args, *data, processing_class=processing_class, **kwargs)
        sleeps = sampler.rollout.sleep and hasattr(engine, "sleep")
        self._sleeper = cast(Any, engine) if sleeps else None
        self.carry_scorers_of(engine.policy, args.scorers)
        if self.scorer_loss is not None:
            self.summed = (*self.summed, "boundary")
        self._sampling = None
        if args.distill.completions == "student":
            self._sampling = SamplingConfig(args.distill.max_completion_length, args.loss.temperature)
        self._live = getattr(engine, "model", None) is base_of(self.model)  # the engine uses the live student
        self._synced: int | None = None

    def _with_traces(self, examples: Sequence[Example]) -> list[Example]:
        if isinstance(self.engine, RecordedRollouts):
            return [replace(e, trace=self.engine.trace(cast(Any, e.place), e.length)) for e in examples]
        prompts, splits = [example.prompt for example in examples], [example.split for example in examples]
        with self.refused_at_this_step(), self._engine_weights() as engine:
            compacting: Any = engine if hasattr(engine, "prompt_cache") else None
            if self._sampling is None and compacting:
                traces = compacting.traces(splits, [example.length for example in examples])
                return [replace(e, trace=trace) for e, trace in zip(examples, traces, strict=True)]
            if self._sampling is None:
                completions = [example.completion for example in examples]
                rollouts = engine.simulate(prompts, completions, self.args.loss.temperature)
            else:
                seed = self.sampling_seed(self.state.global_step)
                sampling = replace(self._sampling, seed=seed)
                rollouts = compacting.continued(splits, sampling) if compacting else engine.generate(prompts, sampling)
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
        """Yield the engine with the weights that are due: the student's, if the engine shares its module or samples
        completions; otherwise the starting model's, and after a refresh those of the student at the last refresh."""
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
            row = student, *batch.sizes(), batch.ids.shape[1]
            view = self.scorer_loss.view(*row, kernel=args.attention_kernel, traces=traces)
            loss, *others, count = self._distilled(student, batch, batch.hidden_under(student, view))
            boundary = torch.stack(list(view.of_policy.losses.values())).mean() * count
        return loss + args.scorers.weight * boundary, *others, boundary.detach(), count

    def _measured(self) -> dict[str, float]:
        learnt = {} if self.scorer_loss is None else {"boundary_loss": self._sums["boundary"] / self._sums["tokens"]}
        return {**super()._measured(), **learnt}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._synced = None
