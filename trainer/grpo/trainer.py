"""RL-Sparse: GRPO that samples with eviction active and trains under exactly the attention that the sampler had.

The trainer is a subclass of TRL's GRPOTrainer, with these differences:

- rollouts come from our engine, with an eviction trace per sequence (sync.py gives it the weights);
- a trace stays with its row from sampling to the loss, and in checkpoints (TracedBatch);
- with `train_attention: replay`, every forward pass of the trained and the reference model replays the trace; with
  `full`, the traces are ignored, which is the mismatched control (RL-Full is the cache policy `full`);
- loss_type is `grpo` by default: the token-level clipped ratio averaged per response (G-KV eq. 6);
- truncated outputs have advantage 0 (G-KV), and so have those that `rejection` rejects; their reward still counts in
  the group's baseline;
- our setting importance_correction selects TRL's importance correction;
- where top-p, top-k or min-p truncate the sampler's distribution, all models score a token among the tokens that its
  draw kept, and the loss is that of the truncated policy;
- the gap between sampler and trainer is measured on every rollout, logged, and guarded (metrics.py);
- the next generation may be sampled, by servers, while the present one trains (ahead.py);
- tools are called side by side and within a time limit, between turns that our engine samples (turns.py).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import trl
from torch import Tensor
from torch.utils.data import Sampler
from trl.models.utils import _ForwardRedirection
from trl.trainer.utils import FusedCausalLMOutput, RepeatSampler, maybe_gather_lm_head_ctx

from rollout.config import RolloutConfig
from rollout.context.config import PromptCacheConfig
from rollout.context.reader import ContextPrompts
from rollout.engine import Engine, Rollout, SamplingConfig
from rollout.recorded import RecordedRollouts, check_rows
from rollout.turns import Conversation, RowTrace, check_beginnings
from sparse_rl.attention.families import context_length
from sparse_rl.attention.interface import ATTENTION, NO_MASK, adopt, refuse_reentrant_checkpointing
from sparse_rl.attention.support import score_draws
from sparse_rl.attention.views import make_view
from sparse_rl.data.tokens import SplitPrompt, prompt_ends, prompt_ids, split_prompt
from sparse_rl.errors import UserError, reason
from sparse_rl.experts import RouterReplay, balancing_loss, has_experts
from sparse_rl.models.load import base_of
from sparse_rl.trace import EvictionTrace, Supports
from sparse_rl.trace.sections import SUPPORT
from trainer.arguments import (
    ReplayedArguments,
    check_adapters,
    model_options,
    weights_dtype,
    with_settings,
    without_vllm,
)
from trainer.base import Resumable, text_parts
from trainer.config import ScorersConfig, SparseGRPOConfig, TrainingConfig, check_ahead, check_turns
from trainer.grpo.ahead import Ahead
from trainer.grpo.metrics import AuxiliaryLosses, GRPOMetrics, StepClock, show_panels
from trainer.grpo.sync import WeightSync
from trainer.grpo.turns import ToolSampling, check_tools, replay_turns, trace_of_state, trace_state
from trainer.sampler import SamplerSettings
from trainer.weights import carry_scorers, load_reference, reference_state

with without_vllm():
    from trl import GRPOTrainer
    from trl.trainer import grpo_trainer


@with_settings(TrainingConfig, SparseGRPOConfig)
class SparseGRPOArguments(ReplayedArguments, trl.GRPOConfig):
    """TRL's GRPOConfig with the further keys of a GRPO recipe, and with a recipe's defaults.

    It takes every option of GRPOConfig, and as keyword arguments of the same level the keys of `sparse-rl keys grpo`
    that set the algorithm (`train_attention`, `importance_correction`, `replay_guard`, ...).

    scorers : settings for training the scorers of a learned policy further; None leaves them unchanged

    Raises UserError for an option that this project, TRL or transformers refuses.
    """

    kind: ClassVar[str] = "grpo"
    library: ClassVar[Any] = trl.GRPOConfig
    scorers: ScorersConfig | None = None

    @property
    def sparse(self) -> SparseGRPOConfig:
        """The settings of RL under a sparse cache."""
        return self.settings(SparseGRPOConfig, top_k=self.top_k or None, min_p=self.min_p or 0.0)

    def __post_init__(self) -> None:
        sparse, self.top_k = self.sparse, self.top_k or 0
        super().__post_init__()
        sparse.check_options(vars(self))
        if sparse.weighs:
            self.vllm_importance_sampling_mode = sparse.importance_correction
            self.vllm_importance_sampling_clip_max = sparse.importance_clip


def _check_given(given: Mapping[str, Any]) -> None:
    """Raise UserError if SparseGRPOTrainer does not support one of the parameters `given` to GRPOTrainer."""
    if given.get("rollout_func"):
        raise UserError("a trace is recorded by our engine alone; remove rollout_func, or use tools", "rollout_func")
    check_adapters(given["model"], given.get("peft_config"))


def check_made(trainer: Any) -> None:
    """Raise UserError if TRL or PEFT has enabled an unsupported feature because of the model or the launch.

    The balancing loss of experts is switched off in a dense model, whose config.json may have the keys of experts.
    """
    check_adapters(trainer.model)
    if (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        wrong = "LoRA under ZeRO-3 makes gradient checkpointing reentrant, which cannot be replayed; lower zero_stage"
        raise UserError(wrong)
    trainer.aux_loss_enabled = trainer.aux_loss_enabled and has_experts(base_of(trainer.model))


class EpochSampler(Sampler):
    """TRL's sampler with an order that depends only on the seed and the epoch, as a resumed run needs it."""

    def __init__(self, sampler: RepeatSampler) -> None:
        self.sampler, self.epoch = sampler, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed((self.sampler.seed or 0) + self.epoch)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


@dataclass
class TracedBatch:
    """The rows that TRL works on, with their traces and all else that TRL's methods do not pass to one another.

    A generation and a loss begin with a TracedBatch each. At the end of a generation the engine's traces become the
    column `traces` of TRL's batch, which is a dict: TRL shuffles and splits the list like its tensors, and a checkpoint
    keeps it. The loss of a part of that dict takes the part's traces into its own TracedBatch, and replays them.

    prompts : prompts, split after their contexts, if the engine compacts these; empty while a loss is computed
    begun : True from the first turn on, when the environments of conversations have been reset
    conversations : conversations with tools that are being sampled
    rollouts : rollouts that were just sampled; empty while a loss is computed
    rewards : rewards of all ranks, float [rows, reward functions]
    advantages : of each rollout, float [rows]
    logprobs : log-probs of the first forward pass, which is the trained model's unless only the reference model
        scores, float [2, rows, completion width], detached: after truncation, and before
    auxiliary : auxiliary losses from the last forward pass, which covers all rows while a loss is computed
    """

    traces: Sequence[RowTrace] = ()
    prompts: Sequence[SplitPrompt] = ()
    begun: bool = False
    conversations: Sequence[Conversation] = ()
    rollouts: Sequence[Rollout] = ()
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    auxiliary: AuxiliaryLosses | None = None


@dataclass
class TruncatedOutput(FusedCausalLMOutput):
    """A model's output under supports. DDP may rebuild it, with its fields alone.

    whole : log-probs before truncation, float [rows, width - 1]; log_probs and entropy are those after it
    """

    whole: Tensor | None = None


class SparseGRPOTrainer(Resumable, GRPOTrainer):
    """GRPO under a sparse cache.

    It takes the parameters of GRPOTrainer, `tools` and `environment_factory` among them, with `args` a
    SparseGRPOArguments or a GRPOConfig (or None), and:

    cache : cache policy under which it samples and trains: a name, a mapping {"policy": name, its parameters}, or an
        object; None means the policy saved with the model, or a full cache
    prompt_cache : settings for compacting the context of each row (column `context`) once, keys of the block
        `prompt_cache` of a recipe; None means that the context is part of each prompt
    rollout : settings of the engine, keys of the block `rollout` of a recipe; {"engine": "hf"} is the default
    engine : an engine of the caller, or RecordedRollouts whose rows the datasets hold, in the place of `cache` and
        `rollout`
    max_prompt_tokens : length of the longest prompt, for which vllm plans its cache; None means unknown
    thinking : value that is passed to the chat template, to turn thinking on or off
    """

    args: SparseGRPOArguments

    def __init__(
        self,
        *positional: Any,
        cache: Any = None,
        prompt_cache: PromptCacheConfig | Mapping[str, Any] | None = None,
        rollout: RolloutConfig | Mapping[str, Any] | None = None,
        engine: Engine | RecordedRollouts | None = None,
        max_prompt_tokens: int | None = None,
        thinking: bool | None = None,
        **named: Any,
    ) -> None:
        given = inspect.signature(GRPOTrainer).bind(*positional, **named).arguments
        given["args"] = args = SparseGRPOArguments.of(given.get("args"))
        _check_given(given)
        model, adapted = given["model"], given.get("peft_config") is not None or hasattr(given["model"], "peft_config")
        self.sampler = SamplerSettings.of(model, cache, rollout, engine, args, adapted, prompt_cache)
        if isinstance(model, (str, Path)):
            given["model"] = self.sampler.place
            options, own = model_options(weights_dtype(args.dtype, args.zero_stage, adapted)), args.model_init_kwargs
            args.model_init_kwargs = {**options, **cast(dict, own or {}), "attn_implementation": ATTENTION}
        if given.get("processing_class") is None:
            given["processing_class"] = self.sampler.tokenizer()
        if turns := bool(given.get("tools") or given.get("environment_factory")):
            self._check_turns(given)
        self.thinking = thinking
        if not hasattr(given.get("train_dataset"), "__len__"):
            raise UserError("must be a datasets.Dataset, which has a length", "train_dataset")
        with text_parts(grpo_trainer):
            super().__init__(**given)
        check_made(self)
        self.chat_template_kwargs = {} if thinking is None else {"enable_thinking": thinking}
        self.tool_sampling = ToolSampling(self, self.sampler.policy.config.turns)
        count = len(cast(Any, self.train_dataset))
        need = cast(int, args.generation_batch_size) // args.sparse.num_generations
        if count < need:
            wrong = f"holds {count} prompts, but one generation takes {need}; lower the batch, or add data"
            raise UserError(wrong, "train_dataset")
        show_panels(self.callback_handler.callbacks)
        for model in filter(None, (self.model, self.ref_model)):
            adopt(base_of(self.accelerator.unwrap_model(model)))  # DeepSpeed may wrap the reference model
            refuse_reentrant_checkpointing(model)
        # TRL's only switch for its importance correction. Here, after construction, it has no other effect: TRL's other
        # code that reads use_vllm is overridden by this class, or runs only with rollout_func.
        self.use_vllm = self.args.sparse.weighs
        self.sampling = SamplingConfig(
            max_tokens=cast(int, self.max_completion_length),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or None,
            min_p=self.args.sparse.min_p,
            record_support=True,
            stop_token_ids=self.eos_token_ids,
        )
        self.clock = StepClock()
        live = base_of(self.accelerator.unwrap_model(self.model))
        args.settle_kernel(live.config)
        carry_scorers(live, self.sampler.policy, self.sampler.place)
        lengths = max_prompt_tokens, self.sampling.max_tokens
        if turns and max_prompt_tokens is not None:
            lengths = self.tool_sampling.lengths(max_prompt_tokens)
        recorded = isinstance(self.sampler.engine, RecordedRollouts)
        contexts, held_out = self.sampler.prompt_cache is not None, cast(Any, self.eval_dataset)
        check_rows(self.train_dataset, recorded, args.sparse.num_generations, contexts)
        check = partial(check_beginnings, given.get("environment_factory")) if turns else lambda *_: None
        check(self.train_dataset, "train_dataset")
        for rows in filter(None, held_out.values() if isinstance(held_out, dict) else [held_out]):
            check_rows(rows, recorded, cast(int, self.num_generations_eval), contexts)
            check(rows, "eval_dataset")
        about = ContextPrompts.of_row(cast(Any, self.train_dataset)[0], self.processing_class) if contexts else None
        self.engine = self.sampler.open(live, self.sampler.place or live, live, args, *lengths, about)
        steps = args.gradient_accumulation_steps, cast(int, args.steps_per_generation)
        check_ahead(self.sampler.rollout, args.sparse, *steps, served=hasattr(self.engine, "begin"), tools=turns)
        if turns:
            self.tool_sampling.check_engine()
        if recorded:
            self.engine.check_sampling(self.sampling)
        self.carry_scorers_of(self.engine.policy, self.args.scorers)
        if self.args.sync_ref_model and self.learned_policy is not None:
            raise UserError("the reference model lacks the scorers of the model; remove this key", "sync_ref_model")
        self.weight_sync = WeightSync(self.engine, self, self.sampler.rollout.sleep)
        self.own_metrics = GRPOMetrics(self)
        self._redirect = _ForwardRedirection()
        self.ahead = Ahead(self) if getattr(self.sampler.rollout, "ahead", 0) else None
        self.batch = TracedBatch()
        self.generations = 0  # number of generations so far, for the sampling seed

    def _check_turns(self, given: Mapping[str, Any]) -> None:
        """Raise UserError if conversations with the given tools cannot be sampled and trained."""
        args, functions, sampler = cast(SparseGRPOArguments, given["args"]), given.get("reward_funcs"), self.sampler
        assert sampler is not None
        compacts, recorded = sampler.prompt_cache is not None, isinstance(sampler.engine, RecordedRollouts)
        check_turns(sampler.policy.config, args.sparse, args.scorers, compacts=compacts, recorded=recorded)
        tools, count = given.get("tools") or [], len(functions) if isinstance(functions, list) else bool(functions)
        keys = "tools", "environment_factory"
        check_tools(tools, given.get("environment_factory"), given["processing_class"], count, keys)

    @property
    def mode(self) -> str:
        """The word "train", or "eval" in a validation."""
        return "train" if cast(Any, self.model).training else "eval"

    def models(self) -> dict[str, Any]:
        return super().models() | ({} if self.ref_model is None else {"the reference model": self.ref_model})

    # ---- a generation: from prompts to TRL's batch ----------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochSampler(cast(Any, super()._get_train_sampler(dataset)))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch with our advantages and two more columns: `traces`, and in `model_per_token_logps` the
        sampler's log-probs before top-p, top-k and min-p, float [rows, completion width]."""
        batch = self.batch = TracedBatch(prompts=self.split_prompts(inputs))
        if isinstance(self.engine, RecordedRollouts):
            inputs, batch.rollouts = self.engine.hand_out(inputs, self.accelerator.process_index)
        try:
            out = super()._generate_and_score_completions(inputs)  # calls the overridden methods below
        except (Exception, SystemExit) as error:
            if self.environment_factories is None or batch.begun:
                raise
            factories: Any = self.environment_factories  # a mapping by name, made by TRL
            names = [str(name or getattr(made, "__name__", made)) for name, made in factories.items()]
            raise UserError(f"{' or '.join(names)} cannot be reset: {reason(error)}", "environment") from error
        out["traces"] = batch.traces
        width = out["completion_ids"].shape[1]
        logprobs = [r.model_logprobs + [0.0] * (width - len(r.model_logprobs)) for r in batch.rollouts]
        out["model_per_token_logps"] = torch.tensor(logprobs, device=self.accelerator.device)
        out["advantages"] = batch.advantages = self._own_advantages(out["advantages"])
        if (rejection := self.args.sparse.rejection) is not None:
            kept = self.own_metrics.record_kept(out, batch, rejection.below)
            out["advantages"] = batch.advantages = batch.advantages.masked_fill(~kept, 0.0)
        shown, column = self.accelerator.gather(out["advantages"]).tolist(), cast(Any, self._logs["advantages"])
        before = list(column)[: -len(shown)]  # without those that TRL has written for these rows
        column.clear()
        column.extend([*before, *shown])
        if self.mode == "train":
            self.own_metrics.warn_if_nothing_is_learnt()
        if "old_per_token_logps" in out:
            self.own_metrics.record_gap(out, batch.logprobs)
        return out

    def split_prompts(self, rows: Sequence[dict[str, Any]]) -> list[SplitPrompt]:
        """Return the prompts of rows, split after the contexts that the engine compacts; [] if it compacts none."""
        if not hasattr(self.engine, "prompt_cache"):
            return []
        split = partial(split_prompt, tokenizer=self.processing_class, thinking=self.thinking)
        return [split(row["prompt"], row["context"]) for row in rows]

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        if self.batch.rollouts:  # recorded
            return [rollout.prompt_ids for rollout in self.batch.rollouts], None, {}
        if self.batch.prompts:
            ids = [[*prompt.context, *prompt.rest] for prompt in self.batch.prompts]
        elif self.tools:  # whose schemas are part of the prompt
            ids = super()._tokenize_prompts(prompts)[0]
        else:
            ids = [prompt_ids(p, self.processing_class, self.thinking) for p in prompts]
        longest, window = max(map(len, ids)), context_length(base_of(self.model).config)
        if window is not None and longest + self.sampling.max_tokens > window:
            wrong = f"after a prompt of {longest:,} tokens, exceeds the model's context length of {window:,} tokens"
            raise UserError(f"{self.sampling.max_tokens:,} tokens, {wrong}; lower this value", "max_completion_length")
        return ids, None, {}

    def _generate(self, prompts: list) -> Any:
        self.batch.begun = True
        # Processes differ in the number of turns, so what all of them do together is done once: ZeRO-3 gathers weights.
        with self.weight_sync.ready() if self.tools else nullcontext():
            return super()._generate(prompts)

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sample one completion per prompt, or the first turn of a conversation, unless it is recorded, and return
        token ids and log-probs. TRL repeats each prompt as needed."""
        self.generations += self.mode == "train"
        if self.tools:
            self.batch.conversations = self.tool_sampling.begin(prompt_ids)
            turns = [conversation.rollouts[-1] for conversation in self.batch.conversations]
            return [turn.completion_ids for turn in turns], [turn.logprobs for turn in turns]
        rollouts = self.batch.rollouts or self._sample(prompt_ids)
        self._look_ahead()
        self._keep(rollouts, [r.trace for r in rollouts])
        return [r.completion_ids for r in rollouts], [r.logprobs for r in rollouts]

    def _tool_call_loop(self, *_: Any) -> Any:
        """Continue the conversations in TRL's place. Returns mask, messages, token ids and log-probs of each, the
        numbers of calls and of failures, and no images."""
        conversations = self.batch.conversations
        counts = self.tool_sampling.go_on(conversations)
        rollouts = [conversation.whole() for conversation in conversations]
        self._keep(rollouts, [conversation.traces() for conversation in conversations])
        ids, logprobs = [r.completion_ids for r in rollouts], [r.logprobs for r in rollouts]
        masks, messages = [[*map(int, r.sampled)] for r in rollouts], [one.messages for one in conversations]
        return masks, messages, ids, logprobs, *counts, [[] for _ in rollouts]

    def _keep(self, rollouts: Sequence[Rollout], traces: Sequence[RowTrace]) -> None:
        replayed = self.args.sparse.train_attention == "replay"
        self.batch.traces = traces if replayed else [r.trace.dense_like() for r in rollouts]
        self.batch.rollouts = rollouts
        self.own_metrics.record_rollouts(rollouts)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if self.ahead is not None and self._step % self.ahead.micro_batches:  # else once this generation is sampled
            self._look_ahead()
        return super()._prepare_inputs(generation_batch)

    def _look_ahead(self) -> None:
        """Before the last update that precedes the next generation, give the engine the weights and ask for it."""
        if self.ahead is not None and self.mode == "train" and (rows := self.ahead.rows_due(self._step)):
            with self.refused_at_this_step(), self.weight_sync.ready():
                self.ahead.begin(rows)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Train on a micro-batch, and return its loss, float32 []. With `rollout.ahead: 1`, rows that came early are
        checked before the update.
        """
        loss = super().training_step(*args, **kwargs)
        if not self.is_deepspeed_enabled:
            self._check_early()
        return loss

    def _check_early(self) -> None:
        if self.ahead is not None and self.mode == "train" and self.accelerator.sync_gradients:
            self.ahead.check_early()

    def _sample(self, prompt_ids: list[list[int]]) -> Sequence[Rollout]:
        if self.ahead is not None:
            with self.refused_at_this_step(), self.clock.timed("generate"):
                if self.mode == "eval":
                    self.ahead.settle()
                elif rollouts := self.ahead.take(prompt_ids):
                    return rollouts
        seed = self.sampling_seed(None if self.mode == "eval" else self.generations)
        sampling = dataclasses.replace(self.sampling, seed=seed)
        with self.refused_at_this_step(), self.weight_sync.ready(), self.clock.timed("generate"):
            if self.batch.prompts:
                rollouts = cast(Any, self.engine).continued(self.batch.prompts, sampling)
            else:
                rollouts = self.engine.generate(prompt_ids, sampling)
            if sampling.truncated_support and any(SUPPORT[0] not in r.trace.further for r in rollouts):
                raise UserError("the engine records no supports (docs/extending.md), which top_p, top_k and min_p need")
        return rollouts

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Tensor:
        ends = prompt_ends([rollout.prompt_ids for rollout in self.batch.rollouts], self.processing_class)
        inputs = [{**row, "prompt_ends": end} for row, end in zip(inputs, ends, strict=True)]
        with self.clock.timed("rewards"):
            try:
                self.batch.rewards = super()._calculate_rewards(inputs, *args, **kwargs)
                return self.batch.rewards
            except (KeyboardInterrupt, UserError):  # a recipe's reward raises UserError
                raise
            except BaseException as error:  # a user's function may even call sys.exit
                names = ", ".join(self.reward_func_names)
                what = " ".join(f"{type(error).__name__}: {error}".split())
                raise UserError(f"a reward function (one of: {names}) raised {what}") from error

    def _log_completion_extra(self, column: str, values: list) -> None:
        super()._log_completion_extra(column, plain_values(column, values))

    def _own_advantages(self, advantages: Tensor) -> Tensor:
        """Return the advantages, float [rows], set to exactly 0 in groups without reward variance (`uniform_groups:
        drop` also excludes these from the loss's mean over rows) and for truncated outputs (G-KV)."""
        batch, sparse = self.batch, self.args.sparse
        if self.multi_objective_aggregation == "sum_then_normalize":
            size = cast(int, self.num_generations if self.mode == "train" else self.num_generations_eval)
            varied = varied_groups(batch.rewards, self.reward_weights, size)
            share = float(varied.float().mean())
            self._metrics[self.mode]["frac_reward_zero_std"][-1] = 1.0 - share
            start = self.accelerator.process_index * len(advantages)
            own = varied.repeat_interleave(size)[start : start + len(advantages)]
            advantages = advantages.masked_fill(~own, 0.0)
            if sparse.uniform_groups == "drop" and share > 0:
                advantages = advantages / share
        if sparse.zero_truncated_advantages:
            truncated = torch.tensor([rollout.finish_reason == "length" for rollout in batch.rollouts])
            advantages = advantages.masked_fill(truncated.to(advantages.device), 0.0)
        return advantages

    # ---- forward passes under traces ------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return log-probs, entropies and the load-balancing loss of experts in TRL's format, with each row under its
        trace in `batch`."""
        if any(value is not None for value in multimodal.values()):
            raise UserError("images are not supported")
        size, logps, whole, entropies, balancing, auxiliary = batch_size or len(input_ids), [], [], [], [], []
        with nullcontext() if torch.is_grad_enabled() else self.clock.timed("logprobs"):
            for start in range(0, len(input_ids), size):
                part = slice(start, start + size)
                ids, mask, traces = input_ids[part], attention_mask[part], self.batch.traces[part]
                out, losses = self.replay(model, ids, mask, logits_to_keep, traces, compute_aux_loss)
                auxiliary += [] if losses is None else [losses]
                logps.append(out.log_probs[:, -logits_to_keep:])
                untruncated: Any = out.whole if isinstance(out, TruncatedOutput) else out.log_probs
                whole.append(untruncated[:, -logits_to_keep:].detach())
                if compute_entropy:
                    entropies.append(out.entropy[:, -logits_to_keep:])
                if compute_aux_loss:
                    balancing.append(out.aux_loss)
        scored = torch.cat(logps)
        if not len(self.batch.logprobs):  # else this is the reference model's pass, which follows
            self.batch.logprobs = torch.stack([scored.detach(), torch.cat(whole)])
        self.batch.auxiliary = AuxiliaryLosses.of_chunks(auxiliary, list(map(len, logps))) if auxiliary else None
        aux_loss = torch.stack(balancing).mean() if compute_aux_loss else None
        return scored, torch.cat(entropies) if compute_entropy else None, aux_loss

    def replay(
        self, model: Any, ids: Tensor, mask: Tensor, keep: int, traces: Sequence[RowTrace], balance: bool = False
    ) -> tuple[Any, AuxiliaryLosses | None]:
        """Run a model under traces on rows that TRL has padded: prompts on the left, completions on the right.

        Returns the model's output and the auxiliary losses, which are None if nothing besides GRPO learns. The output
        holds log_probs and entropy, float [rows, width - 1], valid for the last `keep` tokens; aux_loss, the
        load-balancing loss of experts, if `balance` is True; and `whole` if the traces record supports: the log-probs
        before truncation, as log_probs and entropy are then those of the truncated distributions.

        ids, mask : token ids, and 1 for tokens and 0 for padding, int64 [rows, width]
        keep : width of the completions, the last columns of `ids`
        """
        width, args, device = ids.shape[1], self.args, ids.device
        starts, columns = mask.long().argmax(-1)[:, None], torch.arange(width, device=device)
        if not isinstance(traces[0], EvictionTrace):
            return replay_turns(self, model, ids, starts, traces), None
        traces = cast(Sequence[EvictionTrace], traces)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-keep] = -100
        learns, positions, real = torch.is_grad_enabled(), (columns - starts).clamp(min=0), mask
        student: Any = self.accelerator.unwrap_model(model)
        supports, first = Supports.of(traces, base_of(student).config.vocab_size, device), starts
        if scorers_learn := learns and self.scorer_loss is not None:
            # Rotate rows to begin at column 0: padding in front of them would enter the scorers' state.
            order, lengths, prompts = (columns + starts) % width, mask.long().sum(1), mask[:, :-keep].long().sum(1)
            row = student, lengths, prompts, width
            view = self.scorer_loss.view(*row, kernel=args.attention_kernel, traces=traces)
            ids, positions, labels = ids.gather(1, order), columns.expand_as(ids), labels.gather(1, order)
            real, first = mask.gather(1, order), torch.zeros_like(starts)
        else:
            through = args.match_gradient == "through"
            view = make_view(traces, starts.flatten().tolist(), width, device, args.attention_kernel, through)
        if balance and view.routers is None:  # full attention in training replays no experts
            view.routers = RouterReplay.unrecorded(base_of(student).config, ids)
        others = learns and view.of_policy.losses is not None
        if not others and not balance and supports is None:
            return self._forward(model, ids, positions, labels, view), None

        def with_losses(*inputs: Any) -> tuple[Any, Tensor | None]:
            if supports is None:
                out = self._forward(student.forward, *inputs)
            else:
                out = self._among_kept(base_of(student), supports, first, *inputs)
            if balance:
                out.aux_loss = balancing_loss(view.routers.choices, real)
            return out, torch.stack(list(view.of_policy.losses.values())) if others else None

        # DDP and DeepSpeed track the outputs of their forward: a loss outside these outputs would get no gradient.
        out, losses = self._redirect(model, student, with_losses, ids, positions, labels, view)
        if losses is None:
            return out, None
        if scorers_learn:
            back = (columns[:-1] - starts).clamp(min=0)
            for name in ("log_probs", "entropy", *(["whole"] if supports is not None else [])):
                setattr(out, name, getattr(out, name).gather(1, back))
        return out, AuxiliaryLosses(losses, view.of_policy.recalls if scorers_learn else {})

    def _forward(self, model: Any, ids: Tensor, positions: Tensor, labels: Tensor, view: Any) -> Any:
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": NO_MASK.to(ids.device)}
        with self.accelerator.autocast():
            return model(**inputs, kv_view=view, labels=labels, fused_lm_head=True)

    def _among_kept(
        self, model: Any, supports: Supports, first: Tensor, ids: Tensor, positions: Tensor, labels: Tensor, view: Any
    ) -> Any:
        """Run a base model as `_forward` does, and score each token among those that its draw kept.

        first : column of each row's first token, int64 [rows, 1]
        """
        head, rows, columns = model.get_output_embeddings(), supports.rows, first[supports.rows, 0] + supports.tokens
        by_token = torch.zeros_like(ids).index_put_((rows, columns), supports.sizes)
        scored = (labels != -100) & (by_token > 0)  # tokens of tools were not drawn
        kept = supports.ids[scored[rows, columns][supports.draws]]  # mask_truncated_completions leaves draws out
        scale = getattr(model.config, "lm_head_multiplier", 1.0) / getattr(model.config, "logits_scaling", 1.0)
        gathered = partial(maybe_gather_lm_head_ctx, head.weight, head.bias)
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": NO_MASK.to(ids.device)}
        before = scored[:, 1:]  # True at the position before each scored token
        with self.accelerator.autocast():
            hidden = model.get_decoder()(**inputs, kv_view=view, use_cache=False).last_hidden_state[:, :-1]
            drawn, scale = by_token[scored], scale / self.temperature
            scores = score_draws(hidden[before], head, labels[scored], drawn, kept, scale, gathered)
        kept, whole, entropy = (score.new_zeros(before.shape).masked_scatter(before, score) for score in scores)
        return TruncatedOutput(log_probs=kept, entropy=entropy, whole=whole)

    # ---- the loss of a part of TRL's batch ------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.is_deepspeed_enabled:  # whose backward pass contains the update
            self._check_early()
        batch, first = TracedBatch(inputs["traces"]), "old_per_token_logps" not in inputs
        self.batch = batch
        if self.args.sparse.importance_correction == "ppo":
            inputs = {**inputs, "old_per_token_logps": inputs["sampling_per_token_logps"]}
        loss = super()._compute_loss(model, inputs)
        if batch.auxiliary is not None:
            self.own_metrics.record_auxiliary(batch.auxiliary)
            weight = 1.0 if self.args.scorers is None else self.args.scorers.weight
            loss = loss + weight * batch.auxiliary.losses.mean() / self.current_gradient_accumulation_steps
        if first:  # no update has followed the rollout yet
            self.own_metrics.record_gap(inputs, batch.logprobs)
        return loss

    # ---- logs and checkpoints -------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs.update(self.own_metrics.read())
        if self.mode == "train":
            logs.update(self.clock.read(self.state.global_step))
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Sample the validation prompts, score the completions, and return the metrics, as TRL does."""
        # The evaluation's data loader draws from the random state, and TRL shuffles the next training buffer with it.
        with torch.random.fork_rng(devices=[]), self.clock.paused():
            return super().evaluate(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        before = self.clock.logged_step
        with self.clock.paused():  # a step's time excludes evaluation and checkpoints
            super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.clock.logged_step != before:
            self.clock.restart()

    def extra_state(self) -> dict[str, Any]:
        used_up = self._step % (cast(int, self.args.steps_per_generation) * self.num_iterations) == 0
        buffer = [] if used_up else cast(list, self._buffered_inputs)
        return {
            **super().extra_state(),
            "step": self._step,
            "generations": self.generations,
            "gap_limit": self.weight_sync.limit,
            "probed": self.weight_sync.probed,
            "gaps": self.own_metrics.gaps,
            "ahead": {} if self.ahead is None else self.ahead.state(),
            "buffer": [{**part, "traces": [trace_state(trace) for trace in part["traces"]]} for part in buffer],
            "logs": log_state(cast(Any, self._logs)),
            "reference": reference_state(self.ref_model, self.accelerator) if self.args.sync_ref_model else {},
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._step, self.generations, self.own_metrics.gaps = state["step"], state["generations"], state["gaps"]
        if self.ahead is not None:
            self.ahead.load(state["ahead"])
        synced = self.weight_sync  # its engine is new, and has no weights of this run
        synced.limit, synced.probed, synced.synced = state["gap_limit"], state["probed"], None
        buffer = []
        for part in state["buffer"]:
            tensors = {name: value.to(self.accelerator.device) for name, value in part.items() if name != "traces"}
            buffer.append({**tensors, "traces": [trace_of_state(trace) for trace in part["traces"]]})
        self._buffered_inputs = cast(Any, buffer or None)
        load_log(cast(Any, self._logs), state["logs"])
        if self.args.sync_ref_model:
            load_reference(self.ref_model, self.accelerator, state["reference"])
        self.clock.logged_step = self.state.global_step

    def _at_start(self) -> None:
        super()._at_start()
        self.clock.restart()


def varied_groups(rewards: Tensor, weights: Tensor, size: int) -> Tensor:
    """Return a mask that is True for each group of `size` rows that differ in reward, bool [groups].

    It is not computed from the advantages: the mean of equal rewards may be rounded, and then no advantage is 0.

    rewards : rewards of all ranks, float [rows, functions]; NaN if a reward function returned None
    weights : weight of each reward function, float [functions]
    """
    total = (rewards * weights.to(rewards.device)).nansum(1)
    scored = ~rewards.isnan().all(1)
    low = total.masked_fill(~scored, float("inf")).view(-1, size).amin(1)
    high = total.masked_fill(~scored, float("-inf")).view(-1, size).amax(1)
    return high > low


# TRL's log of the last completions, `_logs`, has columns of values, and dicts of columns as `rewards` and `extra`.
LOGGED_COLUMNS = ("prompt", "completion", "advantages", "rewards", "extra")


def plain_values(column: str, values: Sequence[Any]) -> list[Any]:
    """Return the values that a reward function logs in `column` as plain data, which checkpoints can store."""
    try:
        return list(json.loads(json.dumps(values, default=lambda value: value.item())))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        wrong = "log_extra takes numbers, strings, None, and lists and mappings of them"
        raise UserError(f"{wrong}, not what is in the column {column!r}: {error}") from error


def log_state(logs: dict[str, Any]) -> dict[str, Any]:
    def lists(columns: Any) -> Any:
        return {name: list(rows) for name, rows in columns.items()} if isinstance(columns, dict) else list(columns)

    return {name: lists(logs[name]) for name in LOGGED_COLUMNS}


def load_log(logs: dict[str, Any], state: dict[str, Any]) -> None:
    for name, kept in state.items():
        for inner, rows in kept.items() if isinstance(kept, dict) else [(None, kept)]:
            (logs[name] if inner is None else logs[name][inner]).extend(rows)
