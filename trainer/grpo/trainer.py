"""RL-Sparse: GRPO that samples with eviction active and trains under exactly the attention that the sampler had.

The trainer is a subclass of TRL's GRPOTrainer, with these differences:

- rollouts come from our engine, with an eviction trace per sequence; the engine samples from the live module, or has
  its own copy of the weights, which is synced after each update and then probed (probe.py);
- a trace stays with its row from sampling to the loss, and in checkpoints (rows.py);
- with `train_attention: replay`, every forward pass of the trained and the reference model replays the trace
  (forward.py); with `train_attention: full`, the traces are ignored, which is the mismatched control. RL-Full is
  another setting: the cache policy `full`;
- loss_type is `grpo` by default: the token-level clipped ratio averaged per response (G-KV eq. 6);
- truncated outputs have advantage 0 (G-KV), and their reward still counts in the group's baseline (advantages.py);
- our setting importance_correction selects TRL's importance correction (with `none`, the old log-probs are the
  trainer's own);
- the gap between sampler and trainer is measured on every rollout, logged, and guarded (measures.py).

All other features of TRL (loss types, epsilon_high, GSPO, beta, ...) are unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Sampler
from trl import GRPOTrainer

from rollout.engine import Engine, SamplingConfig
from sparse_rl.attention.interface import adopt, refuse_reentrant_checkpointing
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.errors import UserError
from sparse_rl.models.base import base_of
from trainer.grpo.advantages import over_varied_groups, varied_groups, without_truncated
from trainer.grpo.arguments import SparseGRPOArguments, check_given, check_made
from trainer.grpo.clock import StepClock
from trainer.grpo.forward import ReplayedForward
from trainer.grpo.measures import Measures
from trainer.grpo.probe import ProbedEngine
from trainer.grpo.rows import Learned, Rows, Sampled, packed, unpacked
from trainer.grpo.table import load_table, plain_values, show_advantages, table_state
from trainer.loading import text_parts
from trainer.resumable import EpochSampler, Resumable
from trainer.weights import load_reference, reference_state


class RewardError(UserError):
    """Raised if a reward function raised an exception. The message names the reward functions and the exception."""


class SparseGRPOTrainer(Resumable, GRPOTrainer):
    """GRPO under a sparse cache.

    It takes the parameters of GRPOTrainer, with `args` from `grpo_arguments`, and:

    make_engine : function that takes the live transformers model and returns the engine, which may sample from that
        model; called once, before training allocates memory
    sleep : True frees the engine's memory while the weights are updated, if the engine supports this
    thinking : value that is passed to the chat template, to turn thinking on or off
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
        with text_parts():
            super().__init__(*args, **kwargs)
        check_made(self)
        for model in filter(None, (self.model, self.ref_model)):
            adopt(base_of(self.accelerator.unwrap_model(model)))  # DeepSpeed may wrap the reference model
            refuse_reentrant_checkpointing(model)
        # use_vllm is TRL's only switch for its importance correction. In the arguments, True would start a vLLM engine.
        # Here, after construction, it has no other effect: TRL's other code that reads use_vllm is overridden by this
        # class, or runs only with rollout_func or tools.
        self.use_vllm = self.args.sparse.importance_correction != "none"
        self.clock = StepClock()
        self.engine = make_engine(base_of(self.accelerator.unwrap_model(self.model)))
        self.carry_scorers_of(self.engine.policy, self.args.scorers)
        if self.args.sync_ref_model and self.learned_policy is not None:
            raise UserError("the reference model lacks the scorers of the model; remove this key", "sync_ref_model")
        self.probed_engine = ProbedEngine(self.engine, self, sleep)
        self.replayed = ReplayedForward(self.accelerator, self.args, self.scorer_loss)
        self.measures, self.rows = Measures(self), Rows([])
        self.last_sampled: Sampled | None = None  # the newest generation in training
        self._generations = 0  # number of generations so far, for the sampling seed

    @property
    def mode(self) -> str:
        """TRL's name of the current mode: train or eval."""
        return "train" if cast(Any, self.model).training else "eval"

    def models(self) -> dict[str, Any]:
        return super().models() | ({} if self.ref_model is None else {"the reference model": self.ref_model})

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return EpochSampler(cast(Any, super()._get_train_sampler(dataset)))

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        return [prompt_ids(p, self.processing_class, self.thinking) for p in prompts], None, {}

    def _generate_single_turn(
        self, prompt_ids: list, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sample one completion per prompt, and return token ids and log-probs. TRL repeats each prompt as needed."""
        self._generations += self.mode == "train"
        sampling = SamplingConfig(
            max_tokens=cast(int, self.max_completion_length),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or None,
            seed=self.sampling_seed(None if self.mode == "eval" else self._generations),
            stop_token_ids=self.eos_token_ids,
        )
        with self.refused_at_this_step(), self.probed_engine.ready(), self.clock.timed("generate"):
            rollouts = self.engine.generate(prompt_ids, sampling)
        replayed = self.args.sparse.train_attention == "replay"
        self.rows = Rows([r.trace if replayed else r.trace.dense_like() for r in rollouts], rollouts)
        self.measures.rollouts(rollouts)
        return [r.completion_ids for r in rollouts], [r.logprobs for r in rollouts]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.clock.timed("rewards"):
            try:
                self.rows.rewards = super()._calculate_rewards(*args, **kwargs)
                return self.rows.rewards
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a user's function may even call sys.exit
                names = ", ".join(self.reward_func_names)
                what = " ".join(f"{type(error).__name__}: {error}".split())
                raise RewardError(f"a reward function (one of: {names}) raised {what}") from error

    def _log_completion_extra(self, column: str, values: list) -> None:
        super()._log_completion_extra(column, plain_values(column, values))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        rows, sparse, metrics = self.rows, self.args.sparse, self._metrics[self.mode]
        if self.multi_objective_aggregation == "sum_then_normalize":
            size = cast(int, self.num_generations if self.mode == "train" else self.num_generations_eval)
            varied = varied_groups(rows.rewards, self.reward_weights, size)
            metrics["frac_reward_zero_std"][-1] = 1.0 - float(varied.float().mean())
            rank, drop = self.accelerator.process_index, sparse.uniform_groups == "drop"
            out["advantages"] = over_varied_groups(out["advantages"], varied, size, rank, drop)
        if sparse.zero_truncated_advantages:
            out["advantages"] = without_truncated(out["advantages"], [r.finish_reason for r in rows.rollouts])
        show_advantages(cast(Any, self._logs), self.accelerator.gather(out["advantages"]).tolist())
        width = out["completion_ids"].shape[1]
        out["model_per_token_logps"] = rows.model_logprobs(width).to(self.accelerator.device)
        out["traces"] = rows.traces
        if self.mode == "train":
            first = self.accelerator.process_index * len(rows.rollouts)  # rewards are of all processes
            rewards = rows.rewards[first : first + len(rows.rollouts)]
            self.last_sampled = Sampled(rows.rollouts, rewards.tolist(), out["advantages"].tolist())
        if "old_per_token_logps" in out:
            self.measures.batch(out, out["old_per_token_logps"])
        return out

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        rows = self.rows = Rows(inputs["traces"])
        # off_policy_mask_threshold needs the sampler's log-probs before top_p and top_k
        loss = super()._compute_loss(model, {**inputs, "sampling_per_token_logps": inputs["model_per_token_logps"]})
        if rows.learned is not None:
            loss = loss + self._own_loss(rows.learned)
        if "old_per_token_logps" not in inputs:  # then no update has followed the rollout yet
            self.measures.batch(inputs, rows.logprobs)
        return loss

    def _own_loss(self, learned: Learned) -> Tensor:
        """Return the scorers' boundary loss (or the loss of another method), scaled in the same way as TRL's loss."""
        self.measures.learned(learned)
        weight = 1.0 if self.args.scorers is None else self.args.scorers.weight
        return weight * learned.losses.mean() / self.current_gradient_accumulation_steps

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
        """Return log-probs, entropies and the load-balancing loss of experts in TRL's format; takes text only.

        They are computed with each row under its trace.
        """
        if any(value is not None for value in multimodal.values()):
            raise UserError("images are not supported")
        size, logps, entropies, balancing = batch_size or len(input_ids), [], [], []
        with nullcontext() if torch.is_grad_enabled() else self.clock.timed("logprobs"):
            for start in range(0, len(input_ids), size):
                part = slice(start, start + size)
                ids, mask, traces = input_ids[part], attention_mask[part], self.rows.traces[part]
                out, self.rows.learned = self.replayed(model, ids, mask, logits_to_keep, traces, compute_aux_loss)
                logps.append(out.log_probs[:, -logits_to_keep:])
                if compute_entropy:
                    entropies.append(out.entropy[:, -logits_to_keep:])
                if compute_aux_loss:
                    balancing.append(out.aux_loss)
        scored = torch.cat(logps)
        self.rows.logprobs = scored.detach()
        aux_loss = torch.stack(balancing).mean() if compute_aux_loss else None
        return scored, torch.cat(entropies) if compute_entropy else None, aux_loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs.update(self.measures.read())
        if self.mode == "train":
            logs.update(self.clock.read(self.state.global_step))
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, and restore the random state afterwards.

        The data loader of the evaluation draws from this state, and TRL shuffles the next training buffer with it.
        """
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        before = self.clock.logged_step
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self.clock.logged_step != before:  # a step's time excludes evaluation and checkpoints
            self.clock.restart()

    def extra_state(self) -> dict[str, Any]:
        """Return the counters, the buffer of scored rollouts with traces, and the table of the last completions."""
        used_up = self._step % (cast(int, self.args.steps_per_generation) * self.num_iterations) == 0
        buffer = [] if used_up else cast(list, self._buffered_inputs)
        return {
            **super().extra_state(),
            "step": self._step,
            "generations": self._generations,
            "gap_limit": self.probed_engine.limit,
            "probed": self.probed_engine.probed,
            "gaps": self.measures.gaps,
            "buffer": [packed(batch) for batch in buffer],
            "logs": table_state(cast(Any, self._logs)),
            "reference": reference_state(self.ref_model, self.accelerator) if self.args.sync_ref_model else {},
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._step, self._generations, self.measures.gaps = state["step"], state["generations"], state["gaps"]
        probed = self.probed_engine  # its engine is new, and has no weights of this run
        probed.limit, probed.probed, probed.synced = state["gap_limit"], state["probed"], None
        buffer = [unpacked(batch, self.accelerator.device) for batch in state["buffer"]]
        self._buffered_inputs = cast(Any, buffer or None)
        load_table(cast(Any, self._logs), state["logs"])
        if self.args.sync_ref_model:
            load_reference(self.ref_model, self.accelerator, state["reference"])
        self.clock.logged_step = self.state.global_step
        self.clock.restart()
