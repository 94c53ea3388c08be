"""Counts the entries that the cache of a sampled sequence held, and the entries that its queries read."""

from __future__ import annotations

from rollout.engine import Rollout
from sparse_rl.policies.base import Policy


def entry_counts(rollout: Rollout, policy: Policy | None) -> dict[str, float]:
    """Count the cache entries of one rollout in decoding. Returns three numbers:

    peak_entries : maximum number of entries that a kv head held
    read_entries : maximum number of entries of a kv head that a query read
    mean_peak_entries : maximum number of entries that a kv head held, averaged over heads and layers

    The first two come from the policy's schedule if all kv heads hold equal numbers, else from the trace. Layers with a
    sliding window are not counted.

    policy : the policy; None for a sequence that continues a compacted context, whose counts all come from the trace
    """
    prompt, fed = len(rollout.prompt_ids), len(rollout.trace) - 1
    peaks = rollout.trace.policy_part().peak_counts(prompt)
    peak = read = int(peaks.max())
    if policy is not None and not policy.schedule.counts_vary:
        peak, read = policy.schedule.most_decoding(prompt, fed), policy.most_read(prompt, fed)
    return {"peak_entries": peak, "read_entries": read, "mean_peak_entries": float(peaks.float().mean())}
