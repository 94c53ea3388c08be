"""The mismatch panel: how far the trainer's log-probs are from the sampler's, before anything is clipped.

With d = log p_trainer - log p_sampler of a sampled token:

    replay/gap_mean, replay/gap_max    |d|; under the replay invariant only floating-point noise
    replay/k3                          E[exp(d) - 1 - d], an unbiased estimate of KL(sampler || trainer) (Schulman's k3)
    ratio/mean, p5, p95, max           exp(d), the importance ratio; a mean alone would hide heavy tails
    ratio/clipped                      share of tokens above the importance clip

sync/probe_gap, the mean |d| of a probe without evictions, distinguishes stale weights from a wrong trace. It is
measured whenever an engine with its own weights gets new ones.

This module works on tensors and rollouts, not on trainers; measures.py gathers them over processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.engine import Rollout
from sparse_rl.errors import NotFiniteError, StoppedError
from sparse_rl.methods.am.policy import AM
from sparse_rl.methods.am.view import MatchedView
from sparse_rl.methods.kvpop.policy import KVpop
from sparse_rl.policies.base import Policy
from sparse_rl.trace import batch_traces
from trainer.batches import Batch
from trainer.examples import Example
from trainer.scored.loss import decisions_agree


class Tolerance(NamedTuple):
    """Defaults of the guard's limit on the mean |d| of a correct run.

    floor : minimum of the limit; in bfloat16 vLLM and a trainer differ by a standard deviation of 0.05 (TRL issue 6789)
    factor : multiple of the probe's mean |d|, which is the same noise measured on other text
    """

    floor: float
    factor: float

    def limit(self, probe: float) -> float:
        """Return the limit on the mean |d| of a batch. probe : mean |d| of the probe"""
        return max(self.factor * probe, self.floor)


TOLERANCES = {
    torch.float32: Tolerance(1e-4, 10.0),
    torch.bfloat16: Tolerance(1e-1, 3.0),
    torch.float16: Tolerance(2e-2, 3.0),
}


class ReplayGapError(StoppedError):
    """The trainer's log-probs differ from the sampler's by more than rounding explains."""


def replay_panel(gap: Tensor, ratio: Tensor, clip: float) -> dict[str, float]:
    """Return the mismatch panel of N tokens.

    gap : d before top-p and top-k, float [N]
    ratio : d under the distribution that was sampled from, float [N]
    clip : importance clip
    """
    if not gap.numel():
        return {}
    gap, weights = gap.double(), ratio.double().exp()
    ordered = weights.sort().values  # torch.quantile does not take more than 2**24 values
    panel = {
        "replay/gap_mean": gap.abs().mean(),
        "replay/gap_max": gap.abs().max(),
        "replay/k3": (gap.expm1() - gap).mean(),
        "ratio/mean": weights.mean(),
        "ratio/p5": ordered[round(0.05 * (len(ordered) - 1))],
        "ratio/p95": ordered[round(0.95 * (len(ordered) - 1))],
        "ratio/max": weights.max(),
        "ratio/clipped": (weights > clip).double().mean(),
    }
    return {name: float(value) for name, value in panel.items()}


def policy_panel(model: PreTrainedModel, policy: Policy, rollout: Rollout) -> dict[str, float]:
    """Return diagnostic metrics of one sequence that only some policies have, else {}.

    kvpop : cache/decisions_agree, the share of evictions on which engine and trainer agree. In half precision they
        differ by rounding, and the recorded evictions are replayed; trainer.weights.give_weights checks bit by bit
        that the scorers are equal
    am : see `match_panel`
    """
    if isinstance(policy, KVpop):
        share = decisions_agree(model, policy.config, [rollout])
        return {} if share is None else {"cache/decisions_agree": share}
    return match_panel(model, rollout) if isinstance(policy, AM) else {}


@torch.no_grad()
def match_panel(model: PreTrainedModel, rollout: Rollout) -> dict[str, float]:
    """Return the quality of Attention Matching's fits in one sequence, or {} without a compaction.

    match/mass, match/output : residuals of the fits (`sparse_rl.matching.residuals`), means over compactions
    match/bias_max : largest |bias|
    match/ridge : ridge of the fits
    """
    device = next(model.parameters()).device
    view = MatchedView(batch_traces([rollout.trace], [0], len(rollout.trace)), device)
    view.residuals = []
    Batch.make([Example.from_rollout(rollout)], device).hidden_under(model, view)
    if not view.residuals:
        return {}
    mass, output, bias = zip(*view.residuals, strict=True)
    means = {"match/mass": sum(mass) / len(mass), "match/output": sum(output) / len(output)}
    return {**means, "match/bias_max": max(bias), "match/ridge": view.record.ridge}


def over_processes(panels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the panels of all processes as one panel.

    A metric is the mean over the panels that have it, or the maximum if its name ends in `_max`; NaN if any value is.
    """
    names = dict.fromkeys(name for panel in panels for name in panel)
    gathered = {name: [panel[name] for panel in panels if name in panel] for name in names}
    largest = {name for name in gathered if name.endswith("_max") and not any(map(math.isnan, gathered[name]))}
    return {name: max(values) if name in largest else sum(values) / len(values) for name, values in gathered.items()}


def held_entries(rollouts: Sequence[Rollout], policy: Policy) -> list[int]:
    """Return the maximum number of entries that each sequence has held, per layer and kv head.

    A prompt is held whole during prefill. If kv heads hold different numbers, this is the mean over them.
    """
    if policy.schedule.counts_vary:
        peaks = [float(r.trace.peak_counts(len(r.prompt_ids)).float().mean()) for r in rollouts]
        return [max(len(r.prompt_ids), math.ceil(peak)) for r, peak in zip(rollouts, peaks, strict=True)]
    return [policy.schedule.most_held(len(r.prompt_ids), len(r.trace) - 1) for r in rollouts]


def cache_sums(rollouts: Sequence[Rollout], policy: Policy) -> list[float]:
    """Return sums over sequences: final retention, peak number of entries, tokens fed, 1, and tokens sampled."""
    fed = sum(len(r.trace) - 1 for r in rollouts)
    sampled = sum(len(r.completion_ids) for r in rollouts)
    retention = sum(r.trace.retention() for r in rollouts)
    return [retention, sum(held_entries(rollouts, policy)), fed, len(rollouts), sampled]


def _check_finite(what: str, mean: float) -> None:
    if not math.isfinite(mean):
        raise NotFiniteError(
            f"{what}: a log-probability is not a finite number (the mean difference is {mean}): weights or activations "
            "of the trainer or the engine are NaN or infinite. Nothing was trained on this batch; start again, or "
            "resume from a much earlier checkpoint, with a lower learning_rate"
        )


def check_gap(gap: Tensor, limit: float) -> None:
    """Raise ReplayGapError, with likely causes, if mean |d| is above `limit`, and NotFiniteError if it is not finite.

    gap : d, float [N]
    """
    mean = float(gap.abs().mean()) if gap.numel() else 0.0
    _check_finite("replay gap", mean)
    if mean > limit:
        raise ReplayGapError(
            f"replay gap: mean |log p_trainer - log p_sampler| is {mean:.2e}, beyond the limit {limit:.2e}. "
            "Likely causes: the engine samples with stale weights; the trace belongs to other sequences; dropout or "
            "another dtype in the trainer; under the policy am, fewer reference queries than fitted entries, in half "
            "precision. Nothing was trained on this batch; the last checkpoint is untouched"
        )


def check_sync(gap: float, limit: float) -> None:
    """Raise ReplayGapError if the probe after a weight sync has a mean |d| above `limit`. gap : the mean |d|"""
    _check_finite("weight sync", gap)
    if gap > limit:
        raise ReplayGapError(
            f"weight sync: mean |log p_trainer - log p_engine| of a probe without evictions is {gap:.2e}, beyond the "
            f"limit {limit:.2e}. The engine has stale or wrongly loaded weights, or computes in another dtype. "
            "Nothing was trained on its samples; the last checkpoint is untouched"
        )
