"""Counts the entries that the caches of sampled sequences hold, and the entries that their queries read."""

from __future__ import annotations

from rollout.engine import Rollout
from sparse_rl.policies.base import Policy


class EntryCounts:
    """Numbers of cache entries of a kv head under one policy, collected over rollouts.

    If the policy keeps the same number in all kv heads, `peak` and `read` are computed from its schedule, else from the
    traces.

    policy : the policy; None for sequences that continue a compacted context, whose counts all come from the traces
    peak, read : maximum number of entries in decoding that a kv head held, and that a query read
    peaks : for each rollout, the maximum number of entries in decoding, averaged over heads and layers
    longest_prompt : maximum number of entries held in prefill
    """

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        self.peak, self.read, self.longest_prompt = 0, 0, 0
        self.peaks: list[float] = []

    def add(self, rollout: Rollout) -> None:
        prompt, fed = len(rollout.prompt_ids), len(rollout.trace) - 1
        peaks = rollout.trace.peak_counts(prompt)
        self.peaks.append(float(peaks.float().mean()))
        peak = read = int(peaks.max())
        if self.policy is not None and not self.policy.schedule.counts_vary:
            peak, read = self.policy.schedule.most_decoding(prompt, fed), self.policy.most_read(prompt, fed)
        self.peak, self.read = max(self.peak, peak), max(self.read, read)
        self.longest_prompt = max(self.longest_prompt, prompt)

    @property
    def mean_peak(self) -> float:
        return sum(self.peaks) / len(self.peaks)
