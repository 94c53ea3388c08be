"""Gives the trainer's weights to an engine, verifies them with a probe, and sets the limit of the replay guard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollout.engine import Rollout, SamplingConfig
from rollout.recorded import RecordedRollouts
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.models.load import base_of
from trainer.grpo.metrics import TOLERANCES, Tolerance, check_gap
from trainer.weights import give_weights, live_weights

PROBE_PROMPTS, PROBE_TOKENS = 8, 32  # number of prompts from the data; maximum number of tokens sampled per prompt
SHORTEST = 8  # a small cache shortens the prompts, but not below this number of tokens
DROPPED = 2  # sleep level at which an engine discards its weights instead of moving them to host memory


class WeightSync:
    """An engine that samples with the trainer's weights, from the live module or from a copy updated after each step.

    sleep : True frees the engine's memory while it does not sample, if the engine supports this
    limit : limit on the mean |log p_trainer - log p_sampler| of a batch and of a probe, which the first probe sets
    synced, probed : step whose weights the engine's copy has, and step at which the weights were last probed
    """

    def __init__(self, engine: Any, trainer: Any, sleep: bool) -> None:
        self.engine: Any = engine
        self.trainer = trainer
        self.guard = trainer.args.sparse.replay_guard
        self.sleeper = cast(Any, engine) if sleep and hasattr(engine, "sleep") else None
        self.limit: float | None = None
        self.synced: int | None = None
        self.probed: int | None = None
        if isinstance(engine, RecordedRollouts) and engine.same_weights:
            floors = [TOLERANCES[getattr(torch, dtype)].floor for dtype in engine.dtypes]
            self.limit = self.guard.floor or max(self._defaults().floor, *floors)
        if self.sleeper is not None:
            self.sleeper.sleep(DROPPED)

    def _defaults(self) -> Tolerance:
        args = self.trainer.args
        return TOLERANCES[torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32]

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let the engine sample with the trainer's current weights in this block. A stale copy is updated first."""
        trainer, step = self.trainer, self.trainer.state.global_step
        with ExitStack() as stack:
            with trainer.clock.timed("sync"):
                if self.engine.shares_weights:
                    stack.enter_context(live_weights(trainer, gather=trainer.args.ds3_gather_for_generation))
                    due = self.limit is None
                else:
                    due = self.synced != step
                    if self.sleeper is not None:  # the cache needs more memory than the weights, so it comes after them
                        self.sleeper.wake_up(["weights"])
                    if due or self.sleeper is not None:
                        give_weights(self.engine, trainer.model, trainer.accelerator)
                    if self.sleeper is not None:
                        self.sleeper.wake_up(["kv_cache"])
                    self.synced = step
                if due:
                    self._probe()
            yield
        if self.sleeper is not None:
            self.sleeper.sleep(DROPPED)

    def _probe(self) -> None:
        """Compare the log-probs of engine and trainer on texts that the engine samples without any eviction."""
        trainer, args = self.trainer, self.trainer.args
        defaults = self._defaults()
        tolerance = Tolerance(self.guard.floor or defaults.floor, self.guard.factor or defaults.factor)
        prompts, count = self._probe_prompts()
        sampling = SamplingConfig(count, temperature=trainer.temperature, seed=args.seed, ignore_eos=True)
        local = self.gap(self.engine.generate(prompts, sampling)).abs().mean()
        gap = float(trainer.accelerator.gather(local.to(trainer.accelerator.device)).max())
        if self.probed != trainer.state.global_step:  # else a run resumed after a validation would log the gap twice
            trainer._metrics["train"]["sync/probe_gap"].append(gap)  # logged with the next step
        self.probed = trainer.state.global_step
        if self.guard.enabled:
            first = max(defaults.factor * defaults.floor, tolerance.floor)
            check_gap("weight sync", gap, first if self.limit is None else self.limit)
        if self.limit is None:
            self.limit = tolerance.limit(gap)

    def gap(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Return log p_trainer - log p_engine of the tokens of rollouts, under the present weights, float [tokens]."""
        trainer, pad = self.trainer, partial(pad_sequence, batch_first=True)
        texts = [torch.tensor(r.prompt_ids) for r in rollouts], [torch.tensor(r.completion_ids) for r in rollouts]
        (prompts, real), (completions, sampled) = (
            [pad(rows, padding_side=side) for rows in (part, [torch.ones_like(row) for row in part])]
            for part, side in zip(texts, ("left", "right"), strict=True)
        )
        model, device = base_of(trainer.accelerator.unwrap_model(trainer.model)), trainer.accelerator.device
        ids, mask = torch.cat([prompts, completions], 1).to(device), torch.cat([real, sampled], 1).to(device)
        with torch.no_grad():
            out, _ = trainer.replay(model, ids, mask, sampled.shape[1], [r.trace for r in rollouts])
        whole = out.log_probs if getattr(out, "whole", None) is None else out.whole  # before truncation
        theirs = pad([torch.tensor(r.model_logprobs) for r in rollouts])
        return (whole[:, -sampled.shape[1] :].float().cpu() - theirs)[sampled.bool()]

    def _probe_prompts(self) -> tuple[list[list[int]], int]:
        """Return the probe's prompts, and the number of tokens that can be sampled per prompt without an eviction.

        Of a long prompt only the end is used, so that the sampled tokens are similar to the tokens of training.
        """
        trainer, first = self.trainer, self.engine.policy.schedule.first
        rows = islice(trainer.train_dataset, PROBE_PROMPTS)
        prompts = [prompt_ids(row["prompt"], trainer.processing_class, trainer.thinking) for row in rows]
        prompts = [prompt[-max(SHORTEST, first(SHORTEST) - PROBE_TOKENS) :] for prompt in prompts]
        room = min(first(len(prompt)) - len(prompt) for prompt in prompts)
        return prompts, max(1, min(PROBE_TOKENS, trainer.max_completion_length, room))

    def check(self, gap: Tensor) -> None:
        """Raise ReplayGapError if the guard is enabled and the mean |gap| of a batch, float [N], is above the limit.

        Recorded rollouts are only checked before the first update, and only if the sampler had the model's weights;
        rollouts of older weights are not checked.
        """
        updated = isinstance(self.engine, RecordedRollouts) and self.trainer.state.global_step > 0
        updated |= self.trainer.ahead is not None and self.trainer.mode == "train" and self.trainer.ahead.behind > 0
        if self.guard.enabled and self.limit is not None and not updated:
            check_gap("replay gap", float(gap.abs().mean()) if gap.numel() else 0.0, self.limit)
