"""The engine with the trainer's weights, and the probe that says so; with it the limit of the replay guard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollout.engine import Engine, SamplingConfig
from sparse_rl.models.base import base_of
from trainer.grpo.panel import TOLERANCES, Tolerance, check_gap, check_sync
from trainer.weights import give_weights, live_weights

PROBE_PROMPTS, PROBE_TOKENS = 8, 32  # prompts of the data, and the tokens that are sampled after each
SHORTEST = 8  # tokens of a prompt that are left where the cache holds few
DROPPED = 2  # the level of a sleep in which an engine's weights are let go, and not kept in host memory


class ProbedEngine:
    """An engine that samples with the trainer's weights: the live module's, or a copy that follows every update.

    sleep : give the memory of an engine that can back while it does not sample
    limit : on the mean |d| of a batch and of a probe, set by the first probe; None before
    synced, probed : the steps whose weights the engine has, where they are its own, and at which they were last probed
    """

    def __init__(self, engine: Engine, trainer: Any, sleep: bool) -> None:
        self.engine, self.trainer = engine, trainer
        self.guard = trainer.args.sparse.replay_guard
        self.sleeper = cast(Any, engine) if sleep and hasattr(engine, "sleep") else None
        self.limit: float | None = None
        self.synced: int | None = None
        self.probed: int | None = None
        if self.sleeper is not None:
            self.sleeper.sleep(DROPPED)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The engine has the trainer's weights: live, or its own, brought up to date where an update has been made."""
        trainer, step = self.trainer, self.trainer.state.global_step
        with ExitStack() as stack:
            with trainer.clock.timed("sync"):
                if self.engine.shares_weights:
                    stack.enter_context(live_weights(trainer, gather=trainer.args.ds3_gather_for_generation))
                    due = self.limit is None
                else:
                    due = self.synced != step
                    self._wake_with_weights(due)
                    self.synced = step
                if due:
                    self._probe()
            yield
        if self.sleeper is not None:
            self.sleeper.sleep(DROPPED)

    def _wake_with_weights(self, due: bool) -> None:
        """The weights, where they are `due` or the engine has slept; then the memory of its cache, which is larger."""
        if self.sleeper is not None:
            self.sleeper.wake_up(["weights"])
        if due or self.sleeper is not None:
            give_weights(self.engine, self.trainer.model, self.trainer.accelerator)
        if self.sleeper is not None:
            self.sleeper.wake_up(["kv_cache"])

    def _probe(self) -> None:
        """Engine and trainer score what the engine writes after some prompts of the data, too short for an eviction.
        The first probe fixes the limit on mean |d|, which every later one must keep.
        """
        trainer, args = self.trainer, self.trainer.args
        usual = TOLERANCES[torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32]
        told = Tolerance(self.guard.floor or usual.floor, self.guard.factor or usual.factor)
        model = base_of(trainer.accelerator.unwrap_model(trainer.model))
        prompts, count = self._text()
        sampling = SamplingConfig(count, temperature=trainer.temperature, seed=args.seed, ignore_eos=True)
        rollouts = self.engine.generate(prompts, sampling)
        rows = [torch.tensor([*r.prompt_ids, *r.completion_ids]) for r in rollouts]
        ids, mask = (
            pad_sequence(padded, batch_first=True, padding_side="left").to(trainer.accelerator.device)
            for padded in (rows, [torch.ones_like(row) for row in rows])
        )
        with torch.no_grad():
            out, _ = trainer.replayed(model, ids, mask, count, [r.trace for r in rollouts])
        local = out.log_probs[:, -count:].float().cpu() - torch.tensor([r.model_logprobs for r in rollouts])
        gap = float(trainer.accelerator.gather(local.abs().mean().to(trainer.accelerator.device)).max())
        if self.probed != trainer.state.global_step:  # a resumed run probes again what a validation had probed
            trainer._metrics["train"]["sync/probe_gap"].append(gap)  # that of a validation is the next step's
        self.probed = trainer.state.global_step
        if self.guard.enabled:
            check_sync(gap, max(usual.factor * usual.floor, told.floor) if self.limit is None else self.limit)
        if self.limit is None:
            self.limit = told.limit(gap)

    def _text(self) -> tuple[list[list[int]], int]:
        """The probe's prompts, and how many tokens can be sampled after each before anything is evicted.

        A prompt that leaves no room for that is cut at its front: what follows it is what follows it in training.
        """
        trainer, first = self.trainer, self.engine.policy.schedule.first
        rows = islice(trainer.train_dataset, PROBE_PROMPTS)
        prompts, *_ = trainer._tokenize_prompts([row["prompt"] for row in rows])
        prompts = [prompt[-max(SHORTEST, first(SHORTEST) - PROBE_TOKENS) :] for prompt in prompts]
        room = min(first(len(prompt)) - len(prompt) for prompt in prompts)
        return prompts, max(1, min(PROBE_TOKENS, trainer.max_completion_length, room))

    def check(self, gap: Tensor) -> None:
        """The guard: raise ReplayGapError where mean |d| of a batch, float [N], is beyond the limit."""
        if self.guard.enabled and self.limit is not None:
            check_gap(gap, self.limit)
