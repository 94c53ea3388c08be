"""GRPO on servers of rollouts, which have a copy of the weights each: the run that an engine in process gives."""

from __future__ import annotations

import pytest
from standin import StandIn, serving
from trainer_runs import GKV

from sparse_rl.errors import StoppedError

COMPARED = ("loss", "reward", "grad_norm", "replay/gap_max", "cache/retention")


def test_servers_give_the_run_of_an_engine_in_process(tiny, metrics_of):
    """With some faults, and with weights that an earlier run has left. Control: a server that withholds an update."""
    settings = {"max_steps": 3, "count": 12}
    wanted = metrics_of("here", **settings)
    one, other = StandIn(tiny(), GKV, faults=["", "reset", "version"]), StandIn(tiny(), GKV, faults=["500"])
    one.about["version"] = 6
    with serving(one, other) as servers:
        lines = metrics_of("served", servers=servers, **settings)
        assert [[line[name] for name in COMPARED] for line in lines] == [[w[name] for name in COMPARED] for w in wanted]
        assert (one.pushes, other.pushes) == (3, 3)
        assert one.about["version"] == other.about["version"] > 6
        load = other.engine.load_weights
        other.engine.load_weights = lambda weights: None if other.pushes == 4 else load(weights)
        with pytest.raises(StoppedError, match="weight sync"):
            metrics_of("stale", servers=servers[1:], **settings)
