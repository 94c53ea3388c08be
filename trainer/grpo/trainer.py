"""RL-Sparse: GRPO that samples with eviction active and trains under exactly the attention that the sampler had.

A subclass of TRL's GRPOTrainer; where it departs from it:

- rollouts come from our engine, with an eviction trace per sequence; it samples from the live module, or has its own
  weights, which are brought up to date after each update and then probed (probe.py);
- every forward of the policy and the reference model replays that trace (`train_attention: replay`), or not (`full`:
  the mismatched control, G-KV's "RL on mismatched masks"; RL-Full is the policy `full`);
- loss_type `grpo` by default: the token-level clipped ratio averaged per response (G-KV eq. 6);
- advantage 0 for truncated outputs (G-KV), whose reward still counts in the group's baseline (advantages.py);
- importance correction between sampler and trainer is ours to choose (`none`: old log-probs are the trainer's own);
- the gap between sampler and trainer is measured on every rollout, logged, and guarded (panel.py);
- a resumed run continues as if nothing had happened: the rollout buffer and the sampler's epoch are checkpointed.

All else that TRL offers (loss types, epsilon_high, GSPO, beta, ...) is unchanged. It knows no recipe: engine, rewards
and data are handed in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.models.utils import _ForwardRedirection

from rollout.engine import Engine, Rollout, SamplingConfig
from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.interface import NO_MASK, adopt, refuse_reentrant_checkpointing
from sparse_rl.attention.views.factory import make_view
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.policy import KVpop
from sparse_rl.methods.kvpop.view import LearnedView
from sparse_rl.models.base import base_of
from sparse_rl.policies.base import Policy
from sparse_rl.trace import EvictionTrace, batch_traces
from trainer.grpo.advantages import over_varied_groups, varied_groups, without_truncated
from trainer.grpo.arguments import SparseGRPOArguments
from trainer.grpo.clock import StepClock
from trainer.grpo.given import check_given, check_made
from trainer.grpo.panel import cache_sums, over_processes, policy_panel, replay_panel
from trainer.grpo.probe import ProbedEngine
from trainer.grpo.reference import load_reference, reference_state
from trainer.grpo.table import load_table, plain_values, show_advantages, table_state
from trainer.resumable import EpochRepeatSampler, Resumable
from trainer.scored.loss import ScorerLoss


class RewardError(UserError):
    """A reward function that raised: which one, and what."""


class SparseGRPOTrainer(Resumable, GRPOTrainer):
    """GRPO under a sparse cache.

    Parameters: GRPOTrainer's, with `args` made by `grpo_arguments`; and

    make_engine : the live transformers model -> the engine that samples, which may sample from it; called once, before
        training takes its memory
    sleep : give the memory of an engine that can back while the weights are updated
    thinking : given to the chat template
    """

    args: SparseGRPOArguments

    def __init__(
        self,
        *args: Any,
        make_engine: Callable[[Any], Engine],
        sleep: bool = False,
        thinking: bool | None = None,
        **kwargs: Any,
    ) -> None:
        check_given(inspect.signature(GRPOTrainer).bind(*args, **kwargs).arguments)
        self.thinking = thinking
        super().__init__(*args, **kwargs)
        check_made(self)
        for model in filter(None, (self.model, self.ref_model)):
            adopt(base_of(self.accelerator.unwrap_model(model)))  # the reference may be in a wrapper of DeepSpeed's
            refuse_reentrant_checkpointing(model)
        self._correct_importance()
        self.clock = StepClock()
        self.engine = make_engine(base_of(self.accelerator.unwrap_model(self.model)))
        if self.args.sync_ref_model and self.learned_policy() is not None:
            raise UserError("the reference model lacks the scorers that the policy has; remove it", "sync_ref_model")
        self.probed_engine = ProbedEngine(self.engine, self, sleep)
        self._generations = 0  # how many times this run has generated, for the sampling seed
        self._rollouts: list[Rollout] = []  # of the last generation
        self._rewards = torch.empty(0)  # of the last generation, all ranks, [rows, functions]
        self._traces: list[EvictionTrace] = []  # of the rows that are being scored
        self._scored = torch.empty(0)  # the trainer's log-probs of the rows last scored
        self.scorer_loss: ScorerLoss | None = None
        if (learn := self.args.scorers) is not None:
            policy = cast(KVpop, self.engine.policy).config
            self.scorer_loss = ScorerLoss(policy, learn.target, learn.boundary)
            base_of(self.model).cache_scorers.requires_grad_(True)
        self._redirect = _ForwardRedirection()
        self._scorer_views: list[tuple[LearnedView, torch.Tensor]] = []  # of the forwards of one loss, and their losses
        self._gaps: dict[str, list[torch.Tensor]] = {"train": [], "eval": []}  # [2, N] each, since the last log

    def _correct_importance(self) -> None:
        """Switch TRL's importance correction on where it is asked for.

        TRL 1.16 asks `self.use_vllm` whether to correct, in its scoring and in its loss, and has no other switch. True
        in the arguments it would start a vLLM of its own; set after, when everything is built, it switches the
        correction alone: what else of its vLLM path is left is in `_generate_single_turn`, which is ours, and in
        `rollout_func` and tools, which are not used.
        """
        self.use_vllm = self.args.sparse.importance_correction != "none"

    @property
    def _mode(self) -> str:
        return "train" if cast(Any, self.model).training else "eval"

    def models(self) -> dict[str, Any]:
        return super().models() | ({} if self.ref_model is None else {"the reference model": self.ref_model})

    def scorer_learning_rate(self) -> float | None:
        return None if self.args.scorers is None else self.args.scorers.learning_rate

    def learned_policy(self) -> Policy | None:
        return self.engine.policy if self.engine.policy.layered_parameters else None

    # ---- sampling ---------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        """TRL's, with an order that a resumed run finds again: each prompt for its group, each batch for its reuses."""
        args = cast(Any, self.args)
        return EpochRepeatSampler(
            data_source=cast(Any, self.train_dataset if dataset is None else dataset),
            mini_repeat_count=cast(int, self.num_generations),
            batch_size=args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * args.steps_per_generation,
            shuffle=cast(bool, self.shuffle_dataset),
            seed=args.seed,
        )

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        return [prompt_ids(p, self.processing_class, self.thinking) for p in prompts], None, {}

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], list[list[float]]]:
        """One completion per given prompt (TRL repeats them), with its trace kept for the training forwards."""
        sampling = SamplingConfig(
            max_tokens=cast(int, self.max_completion_length),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or None,
            seed=self._sampling_seed(),
            stop_token_ids=self.eos_token_ids,
        )
        with self.refused_at_this_step(), self.probed_engine.ready(), self.clock.timed("generate"):
            rollouts = self.engine.generate(prompt_ids, sampling)
        self._rollouts = rollouts
        replayed = self.args.sparse.train_attention == "replay"
        self._traces = [r.trace if replayed else r.trace.dense_like() for r in rollouts]
        self._log_cache(rollouts)
        self._log_policy(max(rollouts, key=lambda r: len(r.trace)))
        return [r.completion_ids for r in rollouts], [r.logprobs for r in rollouts]

    def _sampling_seed(self) -> int:
        """Another one for each generation, and for each rank (two ranks may hold samples of one prompt)."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        if self._mode == "eval":
            return self.args.seed * ranks + rank
        self._generations += 1
        return ((self.args.seed + 1) * 1_000_003 + self._generations) * ranks + rank

    # ---- rewards and advantages ---------------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.clock.timed("rewards"):
            try:
                self._rewards = super()._calculate_rewards(*args, **kwargs)
                return self._rewards
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a function of the user's, which may call sys.exit
                names = ", ".join(self.reward_func_names)
                what = " ".join(f"{type(error).__name__}: {error}".split())
                raise RewardError(f"a reward function raised (of: {names}): {what}") from error

    def _log_completion_extra(self, column: str, values: list) -> None:
        super()._log_completion_extra(column, plain_values(column, values))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        rollouts, width, sparse = self._rollouts, out["completion_ids"].shape[1], self.args.sparse
        if self.multi_objective_aggregation == "sum_then_normalize":
            size = cast(int, self.num_generations if self._mode == "train" else self.num_generations_eval)
            varied = varied_groups(self._rewards, self.reward_weights, size)
            self._metrics[self._mode]["frac_reward_zero_std"][-1] = 1.0 - float(varied.float().mean())
            rank, drop = self.accelerator.process_index, sparse.uniform_groups == "drop"
            out["advantages"] = over_varied_groups(out["advantages"], varied, size, rank, drop)
        if sparse.zero_truncated_advantages:
            out["advantages"] = without_truncated(out["advantages"], [r.finish_reason for r in rollouts])
        show_advantages(cast(Any, self._logs), self.accelerator.gather(out["advantages"]).tolist())
        logps = [r.model_logprobs + [0.0] * (width - len(r.model_logprobs)) for r in rollouts]
        out["model_per_token_logps"] = torch.tensor(logps, device=self.accelerator.device)
        out["traces"] = self._traces
        if "old_per_token_logps" in out:
            self._measure(out, out["old_per_token_logps"])
        return out

    # ---- scoring under the trace --------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._traces = inputs["traces"]
        self._scorer_views.clear()
        # off_policy_mask_threshold is about the sampler's policy, not about what top_p or top_k left of it
        loss = super()._compute_loss(model, {**inputs, "sampling_per_token_logps": inputs["model_per_token_logps"]})
        if self._scorer_views:
            loss = loss + self._scorers_learn()
        if "old_per_token_logps" not in inputs:  # then no update has been made since the rollout
            self._measure(inputs, self._scored)
        return loss

    def _scorers_learn(self) -> torch.Tensor:
        """The boundary loss of the forwards of this loss, weighted as TRL weighs its own; and what is said of it."""
        assert self.args.scorers is not None
        views, metrics = self._scorer_views, self._metrics[self._mode]
        losses = torch.cat([each for _, each in views])
        held, of = (sum(float(pair[i]) for view, _ in views for pair in view.recalls.values()) for i in (0, 1))
        local = torch.tensor([[float(losses.detach().mean()), held, of]], device=self.accelerator.device)
        mean, held, of = self.accelerator.gather(local).mean(0).tolist()
        metrics["boundary_loss"].append(mean)
        if of:  # else no process had anything to recall
            metrics["cache/recall"].append(held / of)
        return self.args.scorers.weight * losses.mean() / self.current_gradient_accumulation_steps

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """TRL's, for text: each row is scored under its trace, which travels as a forward keyword."""
        if any(value is not None for value in multimodal.values()):
            raise UserError("images are not supported")
        size = batch_size or len(input_ids)
        logps, entropies = [], []
        with nullcontext() if torch.is_grad_enabled() else self.clock.timed("logprobs"):
            for start in range(0, len(input_ids), size):
                part = slice(start, start + size)
                out = self.forward_under(
                    model, input_ids[part], attention_mask[part], logits_to_keep, self._traces[part]
                )
                logps.append(out.log_probs[:, -logits_to_keep:])
                if compute_entropy:
                    entropies.append(out.entropy[:, -logits_to_keep:])
        scored = torch.cat(logps)
        self._scored = scored.detach()
        return scored, torch.cat(entropies) if compute_entropy else None, None

    def forward_under(self, model: Any, ids: torch.Tensor, mask: torch.Tensor, keep: int, traces: list) -> Any:
        """TRL's fused head over rows padded on both sides: log-probs and entropies [B, S - 1] of the last `keep`."""
        starts = mask.long().argmax(-1)
        positions = (torch.arange(ids.shape[1], device=ids.device) - starts[:, None]).clamp(min=0)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-keep] = -100
        if self.scorer_loss is not None and torch.is_grad_enabled():
            return self._forward_of_scorers(model, ids, labels, mask, keep, traces)
        kernel, through = self.args.attention_kernel, self.args.match_gradient == "through"
        view = make_view(traces, starts.tolist(), ids.shape[1], ids.device, kernel, through)
        return self._forward(model, ids, positions, labels, view)

    def _forward(self, model: Any, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, view: Any) -> Any:
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": NO_MASK.to(ids.device)}
        with self.accelerator.autocast():
            return model(**inputs, kv_view=view, labels=labels, fused_lm_head=True)

    def _forward_of_scorers(
        self, model: Any, ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, keep: int, traces: list
    ) -> Any:
        """The same, in which scorers learn: rows begin at column 0, for what stands before would enter a memory."""
        assert self.scorer_loss is not None
        width, device = ids.shape[1], ids.device
        starts, columns = mask.long().argmax(-1)[:, None], torch.arange(width, device=device)
        order, student = (columns + starts) % width, self.accelerator.unwrap_model(model)
        view = self.scorer_loss.view(
            base_of(student).cache_scorers,
            mask.long().sum(1),
            mask[:, :-keep].long().sum(1),
            width,
            kernel=self.args.attention_kernel,
            recorded=batch_traces(traces, [0] * len(traces), width)["evict_at"],
        )

        def with_losses(*inputs: Any) -> tuple[Any, torch.Tensor]:
            out = self._forward(student.forward, *inputs)
            return out, torch.stack(list(view.losses.values()))

        # DDP and DeepSpeed follow what their forward returns: a loss that did not come out of it would have no part
        inputs = ids.gather(1, order), columns.expand_as(ids), labels.gather(1, order), view
        out, losses = self._redirect(model, student, with_losses, *inputs)
        self._scorer_views.append((view, losses))
        back = (columns[:-1] - starts).clamp(min=0)
        out.log_probs, out.entropy = out.log_probs.gather(1, back), out.entropy.gather(1, back)
        return out

    # ---- what is logged -----------------------------------------------------------------------------------------

    def _measure(self, inputs: dict[str, Any], scored: torch.Tensor) -> None:
        """Add a batch to the mismatch panel, over all ranks, and stop the run where the guard says so."""
        real = inputs["completion_mask"].bool()
        gap = (scored - inputs["model_per_token_logps"])[real]
        ratio = (scored - inputs["sampling_per_token_logps"])[real]
        local = torch.stack([gap, ratio, torch.ones_like(gap)]).float()
        gathered = self.accelerator.gather(self.accelerator.pad_across_processes(local, dim=1)[None])
        gathered = gathered.transpose(0, 1).reshape(3, -1).cpu()
        pair = gathered[:2, gathered[2] > 0]
        self._gaps[self._mode].append(pair)
        if self.args.sparse.train_attention == "replay":
            self.probed_engine.check(pair[0])

    def _log_cache(self, rollouts: list[Rollout]) -> None:
        """The cache panel: retention at the end, and the bytes that the sequences hold at their peak, against full."""
        layers, kv_heads, head_dim = cache_shape(base_of(self.accelerator.unwrap_model(self.model)).config)
        per_entry = 2 * layers * kv_heads * head_dim * (2 if self.args.bf16 or self.args.fp16 else 4)
        local = torch.tensor([cache_sums(rollouts, self.engine.policy)], device=self.accelerator.device)
        retention, held, fed, count, tokens = self.accelerator.gather(local).double().sum(0).tolist()
        metrics = self._metrics[self._mode]
        metrics["cache/retention"].append(retention / count)
        metrics["cache/bytes_held"].append(held * per_entry)
        metrics["cache/bytes_full"].append(fed * per_entry)
        if self._mode == "train":
            self.clock.tokens += int(tokens)

    def _log_policy(self, rollout: Rollout) -> None:
        """What is to be known of some policies, of one sequence of each process (panel.policy_panel)."""
        with self.accelerator.autocast():
            model = base_of(self.accelerator.unwrap_model(self.model))
            panel = policy_panel(model, self.engine.policy, rollout)
        for name, value in over_processes(gather_object([panel])).items():
            self._metrics[self._mode][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        prefix = "" if self._mode == "train" else "eval_"
        if self._gaps[self._mode]:
            gap, ratio = torch.cat(self._gaps[self._mode], dim=1)
            panel = replay_panel(gap, ratio, self.args.sparse.importance_clip)
            logs.update({prefix + name: value for name, value in panel.items()})
            self._gaps[self._mode].clear()
        if self._mode == "train":
            logs.update(self.clock.read(self.state.global_step))
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's, leaving the random state alone: a data loader draws from it, and the next buffer is shuffled by it."""
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        before = self.clock.logged_step
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.clock.logged_step != before:  # the clock of a step leaves out evaluation and checkpoints
            self.clock.restart()

    # ---- resume ---------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """The counters, the buffer of scored rollouts with its traces, and what is logged of the last generation."""
        used_up = self._step % (cast(int, self.args.steps_per_generation) * self.num_iterations) == 0
        buffer = [] if used_up else cast(list, self._buffered_inputs)
        return {
            **super().extra_state(),
            "step": self._step,
            "generations": self._generations,
            **self.probed_engine.state(),
            "gaps": self._gaps,
            "buffer": [{**batch, "traces": [t.to_state() for t in batch["traces"]]} for batch in buffer],
            "logs": table_state(cast(Any, self._logs)),
            "reference": reference_state(self.ref_model, self.accelerator) if self.args.sync_ref_model else {},
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._step, self._generations, self._gaps = state["step"], state["generations"], state["gaps"]
        self.probed_engine.load_state(state)
        self._buffered_inputs = cast(Any, [self._unpacked(batch) for batch in state["buffer"]] or None)
        load_table(cast(Any, self._logs), state["logs"])
        if self.args.sync_ref_model:
            load_reference(self.ref_model, self.accelerator, state["reference"])
        self.clock.resume(self.state.global_step)

    def _unpacked(self, batch: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: value.to(self.accelerator.device) for name, value in batch.items() if name != "traces"}
        return {**tensors, "traces": [EvictionTrace.from_state(t) for t in batch["traces"]]}
