"""The engine with the trainer's weights, and the probe that says so; with it the limit of the replay guard.

It knows an engine and a trainer; the panel (panel.py) says what a gap means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from trl.models import unwrap_model_for_generation

from rollout.engine import Engine, SamplingConfig
from sparse_rl.models.base import base_of
from trainer.grpo.panel import CEILING, FLOORS, check_gap, check_sync
from trainer.weights import named_weights

PROBE_PROMPT, PROBE_TOKENS = 8, 32


class ProbedEngine:
    """An engine that samples with the trainer's weights: the live module's, or a copy that follows every update.

    sleep : give the memory of an engine that can back while it does not sample

    Attributes
    ----------
    limit : on the mean |d| of a batch and of a probe, set by the first probe; None before
    synced : the step whose weights the engine has, where they are its own
    probed : the step at which they were last probed
    """

    def __init__(self, engine: Engine, trainer: Any, sleep: bool) -> None:
        self.engine, self.trainer = engine, trainer
        self.guard = trainer.args.sparse.replay_guard
        self.sleeper = cast(Any, engine) if sleep and hasattr(engine, "sleep") else None
        self.limit: float | None = None
        self.synced: int | None = None
        self.probed: int | None = None
        if self.sleeper is not None:
            self.sleeper.sleep()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The engine has the trainer's weights: the live ones, gathered under ZeRO-3, in the precision of training; or
        its own, brought up to date where an update has been made since, and probed."""
        trainer, step = self.trainer, self.trainer.state.global_step
        with ExitStack() as stack:
            with trainer.clock.timed("sync"):
                if self.engine.shares_weights:
                    live = unwrap_model_for_generation(
                        trainer.model_wrapped,
                        trainer.accelerator,
                        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
                        gradient_checkpointing_kwargs=cast(dict | None, trainer.args.gradient_checkpointing_kwargs),
                    )
                    stack.enter_context(live)
                    stack.enter_context(trainer.accelerator.autocast())
                    due = self.limit is None
                else:
                    if self.sleeper is not None:
                        self.sleeper.wake_up()
                    due = self.synced != step
                    if due:
                        self.engine.load_weights(named_weights(trainer.model, trainer.accelerator))
                        self.synced = step
                if due:
                    self._probe()
            yield
        if self.sleeper is not None:
            self.sleeper.sleep()

    def _probe(self) -> None:
        """Engine and trainer score one text, too short for an eviction. The first probe fixes the limit on mean |d|,
        which every later one must keep."""
        trainer, args = self.trainer, self.trainer.args
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        floor = FLOORS[dtype] if self.guard.floor is None else self.guard.floor
        model = base_of(trainer.accelerator.unwrap_model(trainer.model))
        prompt = list(range(min(PROBE_PROMPT, model.config.vocab_size)))
        count = max(1, min(PROBE_TOKENS, self.engine.policy.schedule.first(len(prompt)) - len(prompt)))
        sampling = SamplingConfig(count, temperature=trainer.temperature, seed=args.seed, ignore_eos=True)
        rollout = self.engine.generate([prompt], sampling)[0]
        ids = torch.tensor([[*prompt, *rollout.completion_ids]], device=trainer.accelerator.device)
        with torch.no_grad():
            out = trainer.forward_under(model, ids, torch.ones_like(ids), count, [rollout.trace])
        local = out.log_probs[0, -count:].float().cpu() - torch.tensor(rollout.model_logprobs)
        gap = float(trainer.accelerator.gather(local.abs().mean().to(trainer.accelerator.device)).max())
        if self.probed != trainer.state.global_step:  # a resumed run probes again what a validation had probed
            trainer._metrics["train"]["sync/probe_gap"].append(gap)  # that of a validation is the next step's
        self.probed = trainer.state.global_step
        if self.guard.enabled:
            check_sync(gap, max(CEILING * FLOORS[dtype], floor) if self.limit is None else self.limit)
        if self.limit is None:
            self.limit = max(self.guard.factor * gap, floor)

    def check(self, gap: torch.Tensor) -> None:
        """The guard: raise ReplayGapError where mean |d| of a batch, float [N], is beyond the limit."""
        if self.guard.enabled and self.limit is not None:
            check_gap(gap, self.limit)

    # ---- resume ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"gap_limit": self.limit, "probed": self.probed}

    def load_state(self, state: dict[str, Any]) -> None:
        """The engine starts anew, so it must be given the weights again."""
        self.limit, self.probed, self.synced = state["gap_limit"], state["probed"], None
