"""The mismatch panel: metrics of d = log p_trainer - log p_sampler of the sampled tokens, before any clipping.

docs/metrics.md describes the metrics replay/*, ratio/* and sync/probe_gap. This module works on tensors and rollouts,
not on trainers; measures.py gathers the values over processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.engine import Rollout
from sparse_rl.attention.windows.view import WindowedView
from sparse_rl.errors import NotFiniteError, StoppedError
from sparse_rl.experts.view import RoutedView
from sparse_rl.methods.am.policy import AM
from sparse_rl.methods.am.view import MatchedView
from sparse_rl.methods.kvpop.policy import KVpop
from sparse_rl.policies.base import Policy
from sparse_rl.trace import batch_traces, policy_part
from trainer.batches import Batch
from trainer.examples import Example
from trainer.scored.loss import decisions_agree


class Tolerance(NamedTuple):
    """The numbers from which the replay guard computes its limit on the mean |d| of a batch (d as defined above).

    floor : minimum of the limit; in bfloat16 vLLM and a trainer differ by a standard deviation of 0.05 (TRL issue 6789)
    factor : multiple of the mean |d| of the probe, which measures floating-point noise
    """

    floor: float
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


def replay_panel(gap: Tensor, ratio: Tensor, clip: float) -> dict[str, float]:
    """Return the mismatch metrics replay/* and ratio/* of N sampled tokens.

    gap : d of each token, with the sampler's distribution before top-p and top-k, float [N]
    ratio : d of each token, with the sampler's distribution after top-p and top-k, float [N]
    clip : importance ratio above which tokens count in ratio/clipped
    """
    if not gap.numel():
        return {}
    gap, weights = gap.double(), ratio.double().exp()
    ordered = weights.sort().values  # torch.quantile does not take more than 2**24 values
    panel = {
        "replay/gap_mean": gap.abs().mean(),
        "replay/gap_max": gap.abs().max(),
        "replay/k3": (gap.expm1() - gap).mean(),  # Schulman's unbiased estimate of KL(sampler || trainer)
        "ratio/mean": weights.mean(),
        "ratio/p5": ordered[round(0.05 * (len(ordered) - 1))],
        "ratio/p95": ordered[round(0.95 * (len(ordered) - 1))],
        "ratio/max": weights.max(),
        "ratio/clipped": (weights > clip).double().mean(),
    }
    return {name: float(value) for name, value in panel.items()}


def policy_panel(model: PreTrainedModel, policy: Policy, rollout: Rollout) -> dict[str, float]:
    """Return diagnostic metrics of one sequence under the policies kvpop and am, or {} under other policies.

    kvpop : cache/decisions_agree, the share of evictions on which the scorers of engine and trainer agree. In half
        precision some decisions differ by rounding, which is harmless because training replays the recorded evictions
    am : the metrics of `match_panel`
    """
    if isinstance(policy, KVpop):
        share = decisions_agree(model, policy.config, [rollout])
        return {} if share is None else {"cache/decisions_agree": share}
    return match_panel(model, rollout) if isinstance(policy, AM) else {}


@torch.no_grad()
def match_panel(model: PreTrainedModel, rollout: Rollout) -> dict[str, float]:
    """Return metrics of the fits of Attention Matching in one sequence, or {} if the sequence was not compacted.

    match/mass, match/output : mean residuals of the fits over the compactions (see `sparse_rl.matching.residuals`)
    match/bias_max : largest absolute value of a fitted bias
    match/ridge : ridge parameter of the fits
    """
    device = next(model.parameters()).device
    recorded = batch_traces([rollout.trace], [0], len(rollout.trace))
    part = policy_part(recorded)
    view = MatchedView({name: part[name] for name in MatchedView.replays}, device)
    view.residuals = []
    beside = RoutedView.around(WindowedView.around(view, recorded, device, "gather"), recorded, device)
    Batch.make([Example.from_rollout(rollout)], device).hidden_under(model, beside)
    if not view.residuals:
        return {}
    mass, output, bias = zip(*view.residuals, strict=True)
    means = {"match/mass": sum(mass) / len(mass), "match/output": sum(output) / len(output)}
    return {**means, "match/bias_max": max(bias), "match/ridge": view.record.ridge}


def over_processes(panels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the panels of all processes into one panel.

    The result is the mean over processes, or the maximum if the name ends in `_max`. A NaN makes the result NaN.
    """
    names = dict.fromkeys(name for panel in panels for name in panel)
    gathered = {name: [panel[name] for panel in panels if name in panel] for name in names}
    largest = {name for name in gathered if name.endswith("_max") and not any(map(math.isnan, gathered[name]))}
    return {name: max(values) if name in largest else sum(values) / len(values) for name, values in gathered.items()}


def held_entries(rollouts: Sequence[Rollout], policy: Policy) -> list[int]:
    """Return the peak number of cache entries of each sequence, as a mean over layers and kv heads, rounded up.

    The peak is at least the length of the prompt, because the cache holds the whole prompt during prefill. Layers with
    a sliding window are not counted.
    """
    if policy.schedule.counts_vary:
        peaks = [float(r.trace.policy_part().peak_counts(len(r.prompt_ids)).float().mean()) for r in rollouts]
        return [max(len(r.prompt_ids), math.ceil(peak)) for r, peak in zip(rollouts, peaks, strict=True)]
    return [policy.schedule.most_held(len(r.prompt_ids), len(r.trace) - 1) for r in rollouts]


def cache_sums(rollouts: Sequence[Rollout], policy: Policy) -> list[float]:
    """Return sums over the rollouts, in this order: the final retention, the peak number of cache entries, the tokens
    fed to the model, 1 (the number of rollouts), and the sampled tokens.
    """
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
    """Raise ReplayGapError if the mean |gap| is above `limit`, and NotFiniteError if the mean is not finite.

    gap : log p_trainer - log p_sampler of each token, float [N]
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
    """Raise ReplayGapError if `gap` is above `limit` after a weight sync, and NotFiniteError if `gap` is not finite.

    gap : mean |log p_trainer - log p_engine| on the probe
    """
    _check_finite("weight sync", gap)
    if gap > limit:
        raise ReplayGapError(
            f"weight sync: mean |log p_trainer - log p_engine| of a probe without evictions is {gap:.2e}, beyond the "
            f"limit {limit:.2e}. The engine has stale or wrongly loaded weights, or computes in another dtype. "
            "Nothing was trained on its samples; the last checkpoint is untouched"
        )
