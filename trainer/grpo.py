"""RL-Sparse: GRPO that samples with eviction active and trains under exactly the attention that the sampler had.

A subclass of TRL's GRPOTrainer; where it departs from it:

- rollouts come from our engine, under `policy`, with an eviction trace per sequence; it samples from the live module,
  or has its own weights, which are brought up to date after each update and then probed;
- every forward of the policy and the reference model replays that trace (`train_attention: replay`), or not (`full`:
  the mismatched control, G-KV's "RL on mismatched masks"; RL-Full is `policy: full`);
- loss_type `grpo` by default: the token-level clipped ratio averaged per response (G-KV eq. 6);
- advantage 0 for truncated outputs (G-KV), whose reward still counts in the group's baseline;
- importance correction between sampler and trainer is ours to choose (`none`: old log-probs are the trainer's own);
- the gap between sampler and trainer is measured on every rollout, logged, and guarded;
- a resumed run continues as if nothing had happened: the rollout buffer and the sampler's epoch are checkpointed.

All else that TRL offers (loss types, epsilon_high, GSPO, beta, ...) is unchanged.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import Sampler
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

from rollout import Engine, Rollout, SamplingConfig, make_engine
from sparse_rl.attention import (
    ATTENTION,
    NO_MASK,
    PATHS,
    ReplayView,
    adopt,
    cache_shape,
    refuse_reentrant_checkpointing,
)
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.policies import make_policy
from sparse_rl.trace import EvictionTrace
from trainer.mismatch import CEILING, FLOORS, check_gap, check_sync, replay_panel
from trainer.resumable import EpochRepeatSampler, Resumable
from trainer.weights import named_weights

CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
PROBE_PROMPT, PROBE_TOKENS = 8, 32


class RewardError(ValueError):
    """A reward function that raised: which one, and what."""


@dataclass
class SparseGRPOConfig(GRPOConfig):
    """TRL's GRPOConfig and what sparse training adds. See the recipe keys of the same names.

    rollout_model : the directory from which the engine loads weights of its own; None: it samples from the live module
    rollout_options : what `make_engine` takes besides model and policy
    """

    loss_type: str = "grpo"
    policy: dict[str, Any] = field(default_factory=lambda: {"policy": "full"})
    train_attention: str = "replay"
    attention: str = "sdpa"
    importance_correction: str = "token_truncate"
    importance_clip: float = 2.0
    zero_truncated_advantages: bool = True
    uniform_groups: str = "keep"
    guard: bool = True
    guard_factor: float = 10.0
    guard_floor: float | None = None
    rollout_engine: str = "hf"
    rollout_model: str | None = None
    rollout_options: dict[str, Any] = field(default_factory=dict)
    rollout_sleep: bool = False
    thinking: bool | None = None

    def __post_init__(self) -> None:
        if self.train_attention not in ("replay", "full"):
            raise ValueError(f"train_attention must be replay or full, got {self.train_attention!r}")
        if self.attention not in PATHS:
            raise ValueError(f"attention must be one of {PATHS}, got {self.attention!r}")
        if self.importance_correction not in CORRECTIONS:
            raise ValueError(f"importance_correction must be one of {CORRECTIONS}, got {self.importance_correction!r}")
        if self.uniform_groups not in ("keep", "drop"):
            raise ValueError(f"uniform_groups must be keep or drop, got {self.uniform_groups!r}")
        if self.uniform_groups == "drop" and (self.beta or self.loss_type not in ("grpo", "sapo")):
            raise ValueError(
                "uniform_groups: drop needs beta 0 and a loss that averages responses (loss_type grpo, sapo)"
            )
        checkpointing = self.gradient_checkpointing_kwargs
        if isinstance(checkpointing, dict) and checkpointing.get("use_reentrant"):
            raise ValueError("reentrant gradient checkpointing is not supported; leave use_reentrant out")
        if self.importance_correction != "none":
            self.vllm_importance_sampling_mode = self.importance_correction
            self.vllm_importance_sampling_clip_max = self.importance_clip
        self.model_init_kwargs = {**cast(dict, self.model_init_kwargs or {}), "attn_implementation": ATTENTION}
        super().__post_init__()


class SparseGRPOTrainer(Resumable, GRPOTrainer):
    """GRPO under a sparse cache. The arguments are GRPOTrainer's, with `args` a SparseGRPOConfig."""

    args: SparseGRPOConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if (cast(dict | None, self.args.gradient_checkpointing_kwargs) or {}).get("use_reentrant"):
            raise ValueError("TRL has made gradient checkpointing reentrant, which cannot be replayed; see zero_stage")
        for model in filter(None, (self.model, self.ref_model)):
            adopt(_base(model))
            refuse_reentrant_checkpointing(model)
        self.policy = make_policy(self.args.policy)
        self.engine = self._make_engine()
        self._synced: int | None = None  # the step whose weights the engine has, where they are its own
        self._probed: int | None = None  # the step at which they were last probed
        # TRL's own switch for the correction; generation is ours, so nothing else of its vLLM path is reached.
        self.use_vllm = self.args.importance_correction != "none"
        self._last_loaded_step = -1
        self._generations = 0  # how many times this run has generated, for the sampling seed
        self._rollouts: list[Rollout] = []  # of the last generation
        self._rewards = torch.empty(0)  # of the last generation, all ranks, [rows, functions]
        self._traces: list[EvictionTrace] = []  # of the rows that are being scored
        self._scored = torch.empty(0)  # the trainer's log-probs of the rows last scored
        self._gap_limit: float | None = None
        self._gaps: dict[str, list[torch.Tensor]] = {"train": [], "eval": []}  # [2, N] each, since the last log
        self._seconds: dict[str, float] = defaultdict(float)  # since the last log
        self._clock, self._logged_step, self._sampled_tokens = time.perf_counter(), 0, 0

    def _make_engine(self) -> Engine:
        """The one engine of this trainer; made before training takes its memory."""
        options = dict(self.args.rollout_options)
        if "progress" in options:
            options["progress"] = options["progress"] and self.accelerator.is_main_process
        model = self.args.rollout_model or _base(self.accelerator.unwrap_model(self.model))
        engine = make_engine(self.args.rollout_engine, model=model, policy=self.policy, **options)
        if self.args.rollout_sleep and hasattr(engine, "sleep"):
            engine.sleep()
        return engine

    @property
    def _mode(self) -> str:
        return "train" if cast(Any, self.model).training else "eval"

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = _now()
        try:
            yield
        finally:
            self._seconds[part] += _now() - start

    # ---- sampling ---------------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        sampler = super()._get_train_sampler(dataset)
        sampler.__class__ = EpochRepeatSampler
        return sampler

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        return [prompt_ids(p, self.processing_class, self.args.thinking) for p in prompts], None, {}

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
        with self._sampling_weights(), self._timed("generate"):
            rollouts = self.engine.generate(prompt_ids, sampling)
        self._rollouts = rollouts
        replayed = self.args.train_attention == "replay"
        self._traces = [r.trace if replayed else EvictionTrace.dense(*r.trace.evict_at.shape) for r in rollouts]
        self._log_cache(rollouts)
        return [r.completion_ids for r in rollouts], [r.logprobs for r in rollouts]

    def _sampling_seed(self) -> int:
        """Another one for each generation, and for each rank (two ranks may hold samples of one prompt)."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        if self._mode == "eval":
            return self.args.seed * ranks + rank
        self._generations += 1
        return ((self.args.seed + 1) * 1_000_003 + self._generations) * ranks + rank

    @contextmanager
    def _sampling_weights(self) -> Iterator[None]:
        """The engine has the trainer's weights: the live ones, gathered under ZeRO-3, in the precision of training; or
        its own, brought up to date where an update has been made since, and probed."""
        sleeper = cast(Any, self.engine) if self.args.rollout_sleep and hasattr(self.engine, "sleep") else None
        with ExitStack() as stack:
            with self._timed("sync"):
                if self.engine.shares_weights:
                    live = unwrap_model_for_generation(
                        self.model_wrapped,
                        self.accelerator,
                        gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                        gradient_checkpointing_kwargs=cast(dict | None, self.args.gradient_checkpointing_kwargs),
                    )
                    stack.enter_context(live)
                    stack.enter_context(self.accelerator.autocast())
                    due = self._gap_limit is None
                else:
                    if sleeper is not None:
                        sleeper.wake_up()
                    due = self._synced != self.state.global_step
                    if due:
                        self.engine.load_weights(named_weights(self.model, self.accelerator))
                        self._synced = self.state.global_step
                if due:
                    self._probe()
            yield
        if sleeper is not None:
            sleeper.sleep()

    def _probe(self) -> None:
        """Engine and trainer score one text, too short for an eviction. The first probe fixes the guard's limit on mean
        |d|, which every later one must keep."""
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        floor = FLOORS[dtype] if self.args.guard_floor is None else self.args.guard_floor
        model = _base(self.accelerator.unwrap_model(self.model))
        prompt = list(range(min(PROBE_PROMPT, model.config.vocab_size)))
        count = max(1, min(PROBE_TOKENS, self.policy.schedule.first(len(prompt)) - len(prompt)))
        sampling = SamplingConfig(count, temperature=self.temperature, seed=self.args.seed, ignore_eos=True)
        rollout = self.engine.generate([prompt], sampling)[0]
        ids = torch.tensor([[*prompt, *rollout.completion_ids]], device=self.accelerator.device)
        with torch.no_grad():
            out = self._forward(model, ids, torch.ones_like(ids), count, [rollout.trace])
        local = out.log_probs[0, -count:].float().cpu() - torch.tensor(rollout.model_logprobs)
        gap = float(self.accelerator.gather(local.abs().mean().to(self.accelerator.device)).max())
        if self._probed != self.state.global_step:  # a resumed run probes again what a validation had probed
            self._metrics["train"]["sync/probe_gap"].append(gap)  # that of a validation is the next step's
        self._probed = self.state.global_step
        if self.args.guard:
            check_sync(gap, max(CEILING * FLOORS[dtype], floor) if self._gap_limit is None else self._gap_limit)
        if self._gap_limit is None:
            self._gap_limit = max(self.args.guard_factor * gap, floor)

    # ---- rewards and advantages ---------------------------------------------------------------------------------

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._timed("rewards"):
            try:
                self._rewards = super()._calculate_rewards(*args, **kwargs)
                return self._rewards
            except Exception as error:
                names = ", ".join(self.reward_func_names)
                what = " ".join(f"{type(error).__name__}: {error}".split())
                raise RewardError(f"a reward function raised (of: {names}): {what}") from error

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        rollouts, width = self._rollouts, out["completion_ids"].shape[1]
        if self.multi_objective_aggregation == "sum_then_normalize":
            out["advantages"] = self._over_varied_groups(out["advantages"])
        if self.args.zero_truncated_advantages:
            truncated = [r.finish_reason == "length" for r in rollouts]
            out["advantages"] = out["advantages"].masked_fill(torch.tensor(truncated).to(out["advantages"].device), 0.0)
        logps = [r.model_logprobs + [0.0] * (width - len(r.model_logprobs)) for r in rollouts]
        out["model_per_token_logps"] = torch.tensor(logps, device=self.accelerator.device)
        out["traces"] = self._traces
        if "old_per_token_logps" in out:
            self._measure(out, out["old_per_token_logps"])
        return out

    def _over_varied_groups(self, advantages: torch.Tensor) -> torch.Tensor:
        """Exactly 0 in groups without reward variance; `drop` leaves them out of the loss's mean as well.

        Told from the rewards, not from the advantages: the mean of equal rewards may round to another number.
        """
        size = cast(int, self.num_generations if self._mode == "train" else self.num_generations_eval)
        rewards = (self._rewards * self.reward_weights.to(self._rewards.device)).nansum(1)  # of all ranks
        scored = ~self._rewards.isnan().all(1)
        low = rewards.masked_fill(~scored, float("inf")).view(-1, size).amin(1)
        high = rewards.masked_fill(~scored, float("-inf")).view(-1, size).amax(1)
        varied = high > low
        share = float(varied.float().mean())
        self._metrics[self._mode]["frac_reward_zero_std"][-1] = 1.0 - share
        start = self.accelerator.process_index * len(advantages)
        advantages = advantages.masked_fill(~varied.repeat_interleave(size)[start : start + len(advantages)], 0.0)
        return advantages / share if self.args.uniform_groups == "drop" and share > 0 else advantages

    # ---- scoring under the trace --------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._traces = inputs["traces"]
        loss = super()._compute_loss(model, inputs)
        if "old_per_token_logps" not in inputs:  # then no update has been made since the rollout
            self._measure(inputs, self._scored)
        return loss

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
        if compute_aux_loss or any(value is not None for value in multimodal.values()):
            raise ValueError("images and mixture-of-experts auxiliary losses are not supported")
        size = batch_size or len(input_ids)
        logps, entropies = [], []
        with nullcontext() if torch.is_grad_enabled() else self._timed("logprobs"):
            for start in range(0, len(input_ids), size):
                part = slice(start, start + size)
                out = self._forward(model, input_ids[part], attention_mask[part], logits_to_keep, self._traces[part])
                logps.append(out.log_probs[:, -logits_to_keep:])
                if compute_entropy:
                    entropies.append(out.entropy[:, -logits_to_keep:])
        scored = torch.cat(logps)
        self._scored = scored.detach()
        return scored, torch.cat(entropies) if compute_entropy else None, None

    def _forward(self, model: Any, ids: torch.Tensor, mask: torch.Tensor, keep: int, traces: list) -> Any:
        """TRL's fused head over rows padded on both sides: log-probs and entropies [B, S - 1] of the last `keep`."""
        starts = mask.long().argmax(-1)
        positions = (torch.arange(ids.shape[1], device=ids.device) - starts[:, None]).clamp(min=0)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-keep] = -100
        view = ReplayView.of(traces, starts.tolist(), ids.shape[1], ids.device, self.args.attention)
        with self.accelerator.autocast():
            return model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=NO_MASK.to(ids.device),
                kv_view=view,
                labels=labels,
                fused_lm_head=True,
            )

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
        if self.args.guard and self.args.train_attention == "replay" and self._gap_limit is not None:
            check_gap(pair[0], self._gap_limit)

    def _log_cache(self, rollouts: list[Rollout]) -> None:
        """The cache panel: retention at the end, and the bytes that the sequences hold at their peak, against full."""
        layers, kv_heads, head_dim = cache_shape(_base(self.accelerator.unwrap_model(self.model)).config)
        size = 2 if self.args.bf16 or self.args.fp16 else 4
        per_entry = 2 * layers * kv_heads * head_dim * size
        fed = [len(r.trace) - 1 for r in rollouts]
        most = self.policy.schedule.most_held
        held = [most(len(r.prompt_ids), n) for n, r in zip(fed, rollouts, strict=True)]
        sampled = sum(len(r.completion_ids) for r in rollouts)
        local = [sum(r.trace.retention() for r in rollouts), len(rollouts), sum(held), sum(fed), sampled]
        gathered = self.accelerator.gather(torch.tensor([local], device=self.accelerator.device))
        retention, count, held_all, fed_all, tokens = gathered.double().sum(0).tolist()
        metrics = self._metrics[self._mode]
        metrics["cache/retention"].append(retention / count)
        metrics["cache/bytes_held"].append(held_all * per_entry)
        metrics["cache/bytes_full"].append(fed_all * per_entry)
        if self._mode == "train":
            self._sampled_tokens += int(tokens)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        prefix = "" if self._mode == "train" else "eval_"
        if self._gaps[self._mode]:
            gap, ratio = torch.cat(self._gaps[self._mode], dim=1)
            panel = replay_panel(gap, ratio, self.args.importance_clip)
            logs.update({prefix + name: value for name, value in panel.items()})
            self._gaps[self._mode].clear()
        steps = self.state.global_step - self._logged_step
        if self._mode == "train" and steps > 0:
            elapsed = _now() - self._clock
            parts = {part: self._seconds.get(part, 0.0) for part in ("sync", "generate", "rewards", "logprobs")}
            parts["update"] = elapsed - sum(parts.values())
            logs.update({f"time/{part}": seconds / steps for part, seconds in parts.items()})
            logs.update({"time/step": elapsed / steps, "time/tokens_per_second": self._sampled_tokens / elapsed})
            self._logged_step = self.state.global_step
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's, leaving the random state alone: a data loader draws from it, and the next buffer is shuffled by it."""
        with torch.random.fork_rng(devices=[]):
            return super().evaluate(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        before = self._logged_step
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._logged_step != before:  # the clock of a step leaves out evaluation and checkpoints
            self._seconds.clear()
            self._clock, self._sampled_tokens = _now(), 0

    # ---- resume ---------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """The counters, the buffer of scored rollouts with its traces, and what is logged of the last generation."""
        used_up = self._step % (cast(int, self.args.steps_per_generation) * self.num_iterations) == 0
        buffer = [] if used_up else cast(list, self._buffered_inputs)
        logs = cast(dict[str, Any], self._logs)
        logged = {name: list(logs[name]) for name in ("prompt", "completion", "advantages")}
        return {
            **super().extra_state(),
            "step": self._step,
            "generations": self._generations,
            "gap_limit": self._gap_limit,
            "probed": self._probed,
            "gaps": self._gaps,
            "buffer": [{**batch, "traces": [t.evict_at for t in batch["traces"]]} for batch in buffer],
            "logs": {**logged, "rewards": {name: list(values) for name, values in logs["rewards"].items()}},
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        super().load_extra_state(state)
        self._step, self._generations, self._gap_limit = state["step"], state["generations"], state["gap_limit"]
        self._synced, self._probed, self._gaps = None, state["probed"], state["gaps"]
        self._buffered_inputs = cast(Any, [self._unpacked(batch) for batch in state["buffer"]] or None)
        logs = cast(dict[str, Any], self._logs)
        for name, values in state["logs"].pop("rewards").items():
            logs["rewards"][name].extend(values)
        for name, values in state["logs"].items():
            logs[name].extend(values)
        self._logged_step, self._clock = self.state.global_step, _now()

    def _unpacked(self, batch: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: value.to(self.accelerator.device) for name, value in batch.items() if name != "traces"}
        return {**tensors, "traces": [EvictionTrace(t) for t in batch["traces"]]}


def _base(model: Any) -> Any:
    """The transformers model, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
