"""With `rollout.ahead: 1` the next generation is sampled while the present one trains: the same run, wherever and
whenever it is sampled.

An hf engine with weights of its own stands for the servers. The reference is an engine that gets each update late.
"""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from late import LateEngine
from test_grpo_guard import later, with_trace
from trainer_runs import GKV, KillAt, Killed, timeless, trained

from rollout import make_engine
from sparse_rl.errors import StoppedError, UserError
from trainer.config import GuardConfig
from trainer.grpo.metrics import ReplayGapError

HALVES = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
UNGUARDED = GuardConfig(enabled=False)


@pytest.fixture
def ahead(grpo, tiny):
    """ahead(name, late=0, **settings) returns a trainer that samples one step ahead, or in process `late` updates late.

    The early rows of each generation are always back before the update, unless `early` is False.
    """

    def make(name: str = "run", late: int = 0, early: bool = True, **settings: Any) -> Any:
        engine: Any = make_engine("hf", model=tiny(), policy=GKV)
        settings = {"importance_correction": "token_truncate", "max_steps": 4, **settings}
        if late:
            return grpo(name, engine=LateEngine(engine, late), **settings, replay_guard=UNGUARDED)
        trainer = grpo(name, engine=engine, ahead=1, **settings)
        check = trainer.ahead.check_early

        def once_they_are_back() -> None:
            if early and trainer.ahead.coming is not None:
                wait([trainer.ahead.coming.parts[0][1]])
            check()

        trainer.ahead.check_early = once_they_are_back
        return trainer

    return make


def lines_of(trainer: Any, resume: str | None = None) -> list[dict[str, Any]]:
    lines = timeless(trained(trainer, resume))
    return [{name: value for name, value in line.items() if not name.startswith("sync/")} for line in lines]


def weights(trainer: Any) -> list[torch.Tensor]:
    return [weight.clone() for weight in trainer.model.state_dict().values()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize(
    "settings",
    [
        {"count": 4, "max_steps": 5},  # two generations in an epoch
        pytest.param({"importance_correction": "ppo"}, marks=pytest.mark.slow),
        pytest.param({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8}, marks=pytest.mark.slow),
    ],
    ids=["over epochs", "ppo", "accumulated", "truncated"],
)
def test_it_is_the_run_of_an_engine_that_is_one_update_late(settings, ahead):
    """Control: an engine that is two updates late."""
    one, again, late, later = (
        (lines_of(trainer), weights(trainer))
        for trainer in (
            ahead("one", **settings),
            ahead("again", early=False, **settings),
            ahead("late", 1, **settings),
            ahead("later", 2, **settings),
        )
    )
    assert one[0] == again[0] == late[0]
    assert equal(one[1], again[1]) and equal(one[1], late[1])
    assert one[0][:2] == later[0][:2]  # both have sampled with the first weights
    assert not equal(one[1], later[1])


def test_debug(ahead):
    runs = {}
    for name, late in (("one", 0), ("again", 0), ("late", 1)):
        t = ahead(name, late, count=4, max_steps=3)
        runs[name] = lines_of(t), weights(t)
    out = []
    for i in range(3):
        for other in ("again", "late"):
            a, b = runs["one"][0][i], runs[other][0][i]
            out.append((i, other, {k: (a.get(k), b.get(k)) for k in {*a, *b} if a.get(k) != b.get(k)}))
    Path("/tmp/ahead/debug").write_text("\n".join(map(str, out)) + str([equal(runs["one"][1], runs[n][1]) for n in runs]))
