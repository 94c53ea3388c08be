"""The metrics of GRPO besides those of TRL: the gap between sampler and trainer, the cache, and the times of a step.

The gap is d = log p_trainer - log p_sampler of the sampled tokens, before any clipping (docs/metrics.md).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from rollout.engine import Rollout
from rollout.measure.mismatch import percentile
from rollout.measure.timing import now
from rollout.recorded import RecordedRollouts
from sparse_rl.attention.families import policy_shape
from sparse_rl.errors import NotFiniteError, StoppedError
from sparse_rl.metrics import no_lesson
from sparse_rl.models.load import base_of
from sparse_rl.policies.base import Policy

logger = logging.getLogger("sparse_rl")
PARTS = ("sync", "generate", "rewards", "logprobs")
# Trackers sort by name, so the metrics that one opens first are logged there under these names, too.
PANELS = {
    "reward": "1_reward",
    "replay/gap_mean": "2_replay_gap",
    "cache/retention": "3_cache_retention",
    "completions/mean_length": "4_completion_length",
    "entropy": "5_entropy",
    "time/tokens_per_second": "6_tokens_per_second",
}


class StepClock:
    """Counts the sampled tokens and the seconds of each part of a step since the last log; the rest is the update."""

    def __init__(self) -> None:
        self.logged_step = 0
        self.restart()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self.seconds[part] += now() - start

    def read(self, step: int) -> dict[str, float]:
        """Return the timing metrics per step since the last call, or {} if there was no step since then."""
        steps = step - self.logged_step
        if steps <= 0:
            return {}
        elapsed = now() - self.start
        parts = {part: self.seconds[part] for part in PARTS}
        parts["update"] = elapsed - sum(parts.values())
        self.logged_step = step
        return {
            **{f"time/{part}": seconds / steps for part, seconds in parts.items()},
            "time/step": elapsed / steps,
            "time/tokens_per_second": self.tokens / elapsed,
        }

    def restart(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.start, self.tokens = now(), 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of the times. It may be nested."""
        start, seconds, before = self.start, self.seconds.copy(), now()
        yield
        self.start, self.seconds = start + now() - before, seconds


class Tolerance(NamedTuple):
    """The replay guard's limit on the mean |d| of a batch: `factor` times that of the probe, but at least `floor`."""

    floor: float  # in bfloat16 vLLM and a trainer differ by a standard deviation of 0.05 (TRL issue 6789)
    factor: float

    def limit(self, probe: float) -> float:
        return max(self.factor * probe, self.floor)


TOLERANCES = {
    torch.float32: Tolerance(1e-4, 10.0),
    torch.bfloat16: Tolerance(1e-1, 3.0),
    torch.float16: Tolerance(2e-2, 3.0),
}


class ReplayGapError(StoppedError):
    """Raised if the trainer's log-probs differ from the sampler's by more than rounding can explain."""


def gap_metrics(gap: Tensor, ratio: Tensor, clip: float, truncated: bool = False) -> dict[str, float]:
    """Return the metrics replay/* and ratio/* of N sampled tokens, and support/gap_max if top-p, top-k or min-p
    truncated the distributions.

    gap : d of each token, with both distributions before top-p, top-k and min-p, float [N]
    ratio : d of each token, with both distributions after them, float [N]
    clip : importance ratio above which tokens count in ratio/clipped
    """
    if not gap.numel():
        return {}
    gap, ratio = gap.double(), ratio.double()
    weights = ratio.exp()
    ordered = weights.sort().values
    values = {
        "replay/gap_mean": gap.abs().mean(),
        "replay/gap_max": gap.abs().max(),
        "replay/k3": (gap.expm1() - gap).mean(),  # Schulman's unbiased estimate of KL(sampler || trainer)
        "ratio/mean": weights.mean(),
        "ratio/min": ordered[0],
        "ratio/p5": percentile(ordered, 0.05),
        "ratio/p95": percentile(ordered, 0.95),
        "ratio/max": weights.max(),
        "ratio/clipped": (weights > clip).double().mean(),
    }
    if truncated:
        values["support/gap_max"] = ratio.abs().max()
    return {name: float(value) for name, value in values.items()}


class AuxiliaryLosses(NamedTuple):
    """The losses besides GRPO's in a forward pass: the scorers' boundary loss, or the loss of another method.

    losses : loss of each layer, float [layers]
    recalls : layer -> number of kept tokens among those that the scorers' training target would keep, and number of
        the latter, over all queries; empty if there is no such target
    """

    losses: Tensor
    recalls: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    def of_chunks(cls, chunks: Sequence[AuxiliaryLosses], rows: Sequence[int]) -> AuxiliaryLosses:
        """Join the chunks of a batch: mean losses, weighted by the numbers of `rows`, and the sums of the counts."""
        shares = [count / sum(rows) for count in rows]
        losses = torch.stack([share * chunk.losses for share, chunk in zip(shares, chunks, strict=True)]).sum(0)
        recalls = [chunk.recalls for chunk in chunks]
        held, total = ({k: torch.stack([r[k][i] for r in recalls]).sum(0) for k in recalls[0]} for i in (0, 1))
        return cls(losses, {k: (held[k], total[k]) for k in held})


def over_processes(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over the processes that have a metric, or the maximum if its name ends in `_max`.

    A NaN makes the result NaN.
    """
    names = dict.fromkeys(name for own in metrics for name in own)
    gathered = {name: [own[name] for own in metrics if name in own] for name in names}
    largest = {name for name in gathered if name.endswith("_max") and not any(map(math.isnan, gathered[name]))}
    return {name: max(values) if name in largest else sum(values) / len(values) for name, values in gathered.items()}


def held_entries(rollouts: Sequence[Rollout], policy: Policy, recorded: bool = False) -> list[int]:
    """Return the peak number of cache entries of each sequence, prefill included, as a mean over the layers without a
    sliding window and kv heads, rounded up. recorded : True if another policy than `policy` may have evicted"""
    of_trace = recorded or policy.schedule.counts_vary or not policy.schedule.evicts  # contexts may be compacted before
    if of_trace or any(rollout.spans for rollout in rollouts):
        peaks = [float(r.trace.policy_part().peak_counts(len(r.prompt_ids)).float().mean()) for r in rollouts]
        return [max(len(r.prompt_ids), math.ceil(peak)) for r, peak in zip(rollouts, peaks, strict=True)]
    return [policy.schedule.most_held(len(r.prompt_ids), len(r.trace) - 1) for r in rollouts]


def sampled_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mask of the completion tokens of TRL's batch that were sampled, not read: bool [rows, width]."""
    real = batch["completion_mask"].bool()
    return real & batch["tool_mask"].bool() if "tool_mask" in batch else real


CAUSES = {
    "replay gap": (
        "mean |log p_trainer - log p_sampler|",
        "Likely causes: the engine samples with stale weights; the trace belongs to other sequences; dropout or "
        "another dtype in the trainer; under the policy am, fewer reference queries than fitted entries, in half "
        "precision. Nothing was trained on this batch; the last checkpoint is untouched",
    ),
    "weight sync": (
        "mean |log p_trainer - log p_engine| of a probe without evictions",
        "The engine has stale or wrongly loaded weights, or computes in another dtype. Nothing was trained on its "
        "samples; the last checkpoint is untouched",
    ),
}


def check_gap(what: str, mean: float, limit: float) -> None:
    """Raise ReplayGapError if the mean |d| is above `limit`, and NotFiniteError if not finite. what : of CAUSES"""
    if not math.isfinite(mean):
        raise NotFiniteError(
            f"{what}: a log-probability is not a finite number (the mean difference is {mean}): weights or activations "
            "of the trainer or the engine are NaN or infinite. Nothing was trained on this batch; start again, or "
            "resume from a much earlier checkpoint, with a lower learning_rate"
        )
    if mean > limit:
        name, causes = CAUSES[what]
        raise ReplayGapError(f"{what}: {name} is {mean:.2e}, beyond the limit {limit:.2e}. {causes}")


def with_panels(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logs of training or validation, after the numbers of PANELS that they contain."""
    named = [(prefix + name, prefix + panel) for prefix in ("", "eval_") for name, panel in PANELS.items()]
    return {**{panel: logs[name] for name, panel in named if logs.get(name) is not None}, **logs}


def show_panels(callbacks: Iterable[Any]) -> None:
    """Make the callbacks of trackers (W&B, TensorBoard, trackio) log PANELS, but no other callback."""

    def log(on_log: Callable, *given: Any, logs: dict[str, Any], **more: Any) -> None:
        on_log(*given, logs=with_panels(logs), **more)

    for callback in callbacks:
        if type(callback) in INTEGRATION_TO_CALLBACK.values():
            callback.on_log = partial(log, callback.on_log)


class GRPOMetrics:
    """Records metrics for a trainer, in the trainer's current mode (train or eval), and applies the replay guard.

    gaps : mode -> the arguments `gap` and `ratio` of `gap_metrics` for each batch since the last log, float [2, tokens]
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.gaps: dict[str, list[Tensor]] = {"train": [], "eval": []}
        self.idle: tuple[Any, int] = None, 0  # why nothing can be learnt from the last batches, and their number
        self.warned: set[str] = set()

    def record_gap(self, batch: dict[str, Any], logprobs: Tensor) -> None:
        """Record the gap of TRL's batch, before the first update since it was sampled, and apply the replay guard.

        Under `train_attention: full` there is no guard, and the ratio's percentile is recorded by the token's place.

        logprobs : `TracedBatch.logprobs`
        """
        trainer, accelerator = self.trainer, self.trainer.accelerator
        real = sampled_tokens(batch)
        kept, whole = logprobs
        gap = (whole - batch["model_per_token_logps"])[real]
        ratio = (kept - batch["sampling_per_token_logps"])[real]
        place = torch.arange(real.shape[1], device=real.device).expand_as(real)[real]
        quarter = 1 + (4 * place // trainer.args.max_completion_length).clamp(max=3)
        local = torch.stack([gap, ratio, quarter.to(gap)]).float()
        gathered = accelerator.gather(accelerator.pad_across_processes(local, dim=1)[None])
        gathered = gathered.transpose(0, 1).reshape(3, -1).cpu()
        pair, quarters = gathered[:2, gathered[2] > 0], gathered[2][gathered[2] > 0]
        self.gaps[trainer.mode].append(pair)
        if trainer.args.sparse.train_attention == "replay":
            trainer.weight_sync.check(pair[0])
            return
        for quarter in quarters.unique().int().tolist():
            weights = pair[1, quarters == quarter].double().exp()
            self._note(f"ratio/p5_quarter{quarter}", float(percentile(weights.sort().values, 0.05)))

    def record_kept(self, batch: dict[str, Any], sampled: Any, below: float) -> Tensor:
        """Return the completions of which no token has p_trainer / p_sampler below `below`, bool [rows], and record
        their share of all completions, and their mean reward, without truncated ones if these have advantage 0.

        batch, sampled : TRL's batch and its TracedBatch, after the first forward pass
        """
        trainer = self.trainer
        ratio = sampled.logprobs[0] - batch["sampling_per_token_logps"]
        smallest = ratio.masked_fill(~sampled_tokens(batch), 0.0).amin(dim=1)
        kept = smallest >= math.log(below)
        silent = trainer.args.sparse.zero_truncated_advantages
        counted = torch.tensor([not silent or r.finish_reason != "length" for r in sampled.rollouts]).to(kept)
        everywhere, counted = trainer.accelerator.gather(torch.stack([kept, counted], dim=1)).bool().unbind(1)
        rewards = (sampled.rewards * trainer.reward_weights.to(sampled.rewards.device)).nansum(dim=1)
        if counted.any():
            self._note("rejection/kept", float(everywhere[counted].double().mean()))
        if (everywhere & counted).any():
            self._note("rejection/kept_reward", float(rewards[everywhere & counted].mean()))
        return kept

    def record_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Record retention, peak cache bytes and bytes of a full cache, for the layers without a sliding window; and
        how many tokens the draws kept, if top-p, top-k or min-p truncated the distributions."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        layers, kv_heads, head_dim = policy_shape(base_of(accelerator.unwrap_model(trainer.model)).config)
        per_entry = 2 * layers * kv_heads * head_dim * (2 if trainer.args.bf16 or trainer.args.fp16 else 4)
        retention = sum(r.trace.retention() for r in rollouts)
        recorded = isinstance(trainer.engine, RecordedRollouts)
        held, fed = (
            sum(held_entries(rollouts, trainer.engine.policy, recorded)),
            sum(len(r.trace) - 1 for r in rollouts),
        )
        sampled = sum(sum(r.sampled) for r in rollouts)
        support = 0, 0, 0.0
        if trainer.sampling.truncated_support:
            sizes = torch.cat([r.trace.further["support_sizes"] for r in rollouts])
            pairs = [pair for r in rollouts for pair in zip(r.model_logprobs, r.logprobs, r.sampled, strict=True)]
            mass = sum(math.exp(model - kept) for model, kept, of_model in pairs if of_model)
            support = int(sizes.sum()), int((sizes == 1).sum()), mass
        counts = [retention, held, fed, len(rollouts), sampled, *support]
        local = torch.tensor([counts], device=accelerator.device)
        retention, held, fed, count, tokens, *support = accelerator.gather(local).double().sum(0).tolist()
        self._note("cache/retention", retention / count)
        self._note("cache/bytes_held", held * per_entry)
        self._note("cache/bytes_full", fed * per_entry)
        if trainer.mode == "train":
            trainer.clock.tokens += int(tokens)
        if trainer.sampling.truncated_support:
            for name, total in zip(("size", "single", "mass"), support, strict=True):
                self._note(f"support/{name}", total / tokens)
        if not recorded or trainer.engine.same_policy:
            # the trace of a turn that was prefilled is that of a prompt of all tokens before it
            turns = [conversation.rollouts[-1] for conversation in trainer.batch.conversations]
            self.record_policy(max(turns or rollouts, key=lambda r: len(r.trace)))

    def warn_if_nothing_is_learnt(self) -> None:
        """Warn once for each reason why nothing can be learnt from the newest batches."""
        newest = {name: values[-1] for name, values in self.trainer._metrics["train"].items() if values}
        lesson = no_lesson(newest, self.trainer.args.sparse.zero_truncated_advantages)
        self.idle = lesson, self.idle[1] + 1 if lesson == self.idle[0] else 1
        if lesson is not None and self.idle[1] == lesson[1] and lesson[0] not in self.warned:
            self.warned.add(lesson[0])
            batches = "this batch" if lesson[1] == 1 else f"{lesson[1]} batches in a row"
            step = self.trainer.state.global_step + 1
            logger.warning("step %d: nothing can be learnt from %s: %s", step, batches, lesson[0])

    def record_policy(self, rollout: Rollout) -> None:
        """Record the metrics that only some policies have, for one sequence of each process."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        with accelerator.autocast():
            own = trainer.engine.policy.metrics(base_of(accelerator.unwrap_model(trainer.model)), rollout)
        for name, value in over_processes(gather_object([own])).items():
            self._note(name, value)

    def record_auxiliary(self, auxiliary: AuxiliaryLosses) -> None:
        held, total = (sum(float(pair[i]) for pair in auxiliary.recalls.values()) for i in (0, 1))
        accelerator = self.trainer.accelerator
        local = torch.tensor([[float(auxiliary.losses.detach().mean()), held, total]], device=accelerator.device)
        loss, held, total = accelerator.gather(local).mean(0).tolist()
        self._note("method_loss" if self.trainer.args.scorers is None else "boundary_loss", loss)
        if total:  # else the target keeps no token on any process
            self._note("cache/recall", held / total)

    def _note(self, name: str, value: float) -> None:
        self.trainer._metrics[self.trainer.mode][name].append(value)

    def read(self) -> dict[str, float]:
        """Return the metrics of the gap over the batches since the last log, for the trainer's current mode."""
        mode = self.trainer.mode
        if not (gaps := self.gaps[mode]):
            return {}
        gap, ratio = torch.cat(gaps, dim=1)
        gaps.clear()
        prefix = "" if mode == "train" else "eval_"
        clip, truncated = self.trainer.args.sparse.importance_clip, self.trainer.sampling.truncated_support
        metrics = gap_metrics(gap, ratio, clip, truncated)
        return {prefix + name: value for name, value in metrics.items()}
