"""KVpop: sinks, the window, and the k entries that a learned scorer ranks highest.

A token t = q - w leaves the window as query q arrives and competes, before q attends; what is dropped then gets
evict_at = q. All decay at one rate per kv head, so their order never changes and a dropped token never returns:

    r_t(q) = r_t + (floor(q / n) - floor(t / n)) log gamma        (n = 1 in the papers' main runs)

For n > 1 the papers write floor((q - t) / n), under which a dropped token could come back: a stated departure.
Training decides with `sparse_rl.kernels.running_topk`, all queries at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparse_rl.policies.base import Policy
from sparse_rl.policies.schedule import EvictsBeforeAttending, Schedule


class KVpop(Policy):
    """Decides before the query attends, so that a kv head decodes with exactly `budget` entries.

    Parameters
    ----------
    budget : B = sinks + window + k (+ state_entries)
    scorer : {"name": a scorer of `sparse_rl.scorers`, its parameters}, or the name alone
    decay_every : n
    state_entries : so many entries of the budget give way to the scorer's state, which takes their memory
    """

    name = "kvpop"

    def __init__(
        self,
        budget: int,
        *,
        sinks: int = 4,
        window: int = 256,
        scorer: str | Mapping[str, Any] = "mlp",
        decay_every: int = 1,
        state_entries: int = 0,
    ) -> None:
        super().__init__(budget, sinks=sinks, window=window)
        from sparse_rl.scorers import check_scorer

        for key, value, least in (
            ("window", window, 1),
            ("decay_every", decay_every, 1),
            ("state_entries", state_entries, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"kvpop: {key} must be a whole number >= {least}, got {value!r}")
        self.scorer, self.decay_every, self.state_entries = check_scorer(scorer), decay_every, state_entries
        if self.k < 1:
            raise ValueError(f"kvpop: budget {budget} leaves no entry beside sinks, window and state_entries; raise it")

    @property
    def k(self) -> int:
        """Long-range entries per kv head."""
        return self.budget - self.sinks - self.window - self.state_entries

    @property
    def schedule(self) -> Schedule:
        return EvictsBeforeAttending(self.budget - self.state_entries)
