"""How many entries the caches of sampled sequences hold, and how many of them a query reads."""

from __future__ import annotations

from rollout.engine import Rollout
from sparse_rl.policies.base import Policy


class EntryCounts:
    """Entries of a kv head under one policy, gathered over rollouts. Where no count is recorded, bounds stand for them.

    policy : None: behind a compacted context, where the trace tells everything
    peak : the most that a kv head held while decoding
    read : the most that a query of decoding read
    peaks : of each rollout, what its kv heads held at most while decoding, averaged over heads and layers
    longest_prompt : the most held while prefilling
    """

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        self.peak, self.read, self.longest_prompt = 0, 0, 0
        self.peaks: list[float] = []

    def add(self, rollout: Rollout) -> None:
        """Count one more rollout."""
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
        """The mean of `peaks`."""
        return sum(self.peaks) / len(self.peaks)
