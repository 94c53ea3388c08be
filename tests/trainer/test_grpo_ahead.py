"""With `rollout.ahead: 1` the next generation is sampled while the present one trains: the same run, wherever and
whenever it is sampled.

In most tests, an hf engine that samples in a thread, with weights of its own, stands for the servers. The reference is
an engine that gets each update late.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late import LateEngine, ThreadedEngine
from standin import StandIn, serving
from test_grpo_guard import later, with_trace
from trainer_runs import GKV, KillAt, Killed, small, steps, timeless, trained

from rollout import make_engine
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.recipe import make_recipe
from trainer.config import GuardConfig
from trainer.grpo.ahead import Ahead
from trainer.grpo.metrics import ReplayGapError

HALVES = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
UNGUARDED = GuardConfig(enabled=False)


@pytest.fixture
def run_ahead(grpo, tiny):
    """run_ahead(name, late=0, **settings) returns a trainer that samples one step ahead; or, with `late`, in step with
    the training, by an engine that is this number of updates late.

    The generation is back before the update, unless `early` is False.
    """

    def make(name: str = "run", late: int = 0, early: bool = True, servers: Any = None, **settings: Any) -> Any:
        engine: Any = make_engine("hf", model=tiny(), policy=GKV)
        settings = {"importance_correction": "token_truncate", "max_steps": 3, **settings}
        if late:
            return grpo(name, engine=LateEngine(engine, late), **settings, replay_guard=UNGUARDED)
        place = {"servers": servers} if servers else {"engine": ThreadedEngine(engine)}
        trainer = grpo(name, ahead=1, **place, **settings)
        check = trainer.ahead.check_early

        def once_it_is_back() -> None:
            if early and trainer.ahead.coming is not None:
                trainer.ahead.settle()
            check()

        trainer.ahead.check_early = once_it_is_back
        return trainer

    return make


def lines_of(trainer: Any, resume: str | None = None) -> list[dict[str, Any]]:
    """Train, and return the lines of the log without timings and measurements of the weights' way."""
    lines = timeless(trained(trainer, resume))
    return [{name: value for name, value in line.items() if not name.startswith("sync/")} for line in lines]


def weights(trainer: Any) -> list[torch.Tensor]:
    return [weight.clone() for weight in trainer.model.state_dict().values()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize(
    "settings",
    [
        {"count": 4},  # two generations in an epoch
        pytest.param({"importance_correction": "ppo"}, marks=pytest.mark.slow, id="ppo"),
        pytest.param({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8}, marks=pytest.mark.slow, id="truncated"),
    ],
    ids=lambda settings: min(settings),
)
def test_it_is_the_run_of_an_engine_that_is_one_update_late(settings, run_ahead, tiny):
    """Also on servers, of which nothing need be back before the update. Control: an engine that is two updates late."""
    runs, ends = [], []

    def add(trainer: Any) -> None:
        runs.append(lines_of(trainer))
        ends.append(weights(trainer))

    add(first := run_ahead("thread", **settings))
    with serving(StandIn(tiny(), GKV), StandIn(tiny(), GKV, faults=["", "reset"])) as servers:
        add(run_ahead("servers", early=False, servers=servers, **settings))
    add(run_ahead("late", 1, **settings))
    add(run_ahead("later", 2, **settings))
    assert runs[0] == runs[1] == runs[2]
    assert equal(ends[0], ends[1]) and equal(ends[0], ends[2])
    assert runs[0][:2] == runs[3][:2]  # both have sampled with the first weights
    assert not equal(ends[0], ends[3])
    logged = steps(first.args.output_dir)
    assert [line.get("sync/behind") for line in logged] == [None, 1.0, 1.0]
    assert all(line["sync/early_gap"] <= 1e-5 for line in logged[:-1]) and "sync/early_gap" not in logged[-1]
    assert all(line["sync/probe_gap"] <= 1e-5 for line in logged[:-1]) and "sync/probe_gap" not in logged[-1]
    assert min(line["replay/gap_mean"] for line in logged[1:]) > 1e-3  # an update's, which stops no run


@pytest.mark.parametrize(
    ("settings", "given", "asked"),
    [
        ({"max_steps": 5, **HALVES}, [0, 1, 3], [1, 3]),
        pytest.param({"max_steps": 4, "num_iterations": 2}, [0, 1], [1], marks=pytest.mark.slow),
        pytest.param(
            {"held_out": 4, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2},
            *([0, 1, 2, 3], [0, 1]),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["buffered", "two iterations", "validated"],
)
def test_weights_are_given_and_rows_asked_for_before_the_last_update(settings, given, asked, run_ahead):
    """So a generation is one update behind, also if it is trained in several updates."""
    trainer = run_ahead(**settings)
    load, begin = trainer.engine.load_weights, trainer.engine.begin
    at_steps: dict[str, list[int]] = {"given": [], "asked": []}

    def spy(name: str, call: Any) -> Any:
        return lambda *arguments: (at_steps[name].append(trainer.state.global_step), call(*arguments))[1]

    trainer.engine.load_weights, trainer.engine.begin = spy("given", load), spy("asked", begin)
    lines = trained(trainer)
    assert at_steps == {"given": given, "asked": asked}
    assert {line["sync/behind"] for line in lines if "sync/behind" in line} == {1.0}


def late_trace(trainer: Any) -> None:
    """From the first row that is asked for on, record each eviction one position late."""
    begin = trainer.engine.begin

    def begin_with_fault(*given: Any) -> Any:
        if trainer.state.global_step == 0:
            with_trace(later)(SimpleNamespace(engine=trainer.engine.engine))
        return begin(*given)

    trainer.engine.begin = begin_with_fault


def stale_weights(trainer: Any) -> None:
    """After the probe, sample with the initial weights."""
    begin, initial = trainer.engine.begin, {n: w.clone() for n, w in trainer.model.named_parameters()}

    def begin_with_fault(*given: Any) -> Any:
        trainer.engine.load_weights(initial.items())
        return begin(*given)

    trainer.engine.begin = begin_with_fault


def withheld_push(trainer: Any) -> None:
    trainer.engine.engine.load_weights = lambda weights: None


FAULTS = {
    late_trace: (0, "replay gap: .* the trace belongs to other sequences"),
    stale_weights: (1, "replay gap: .* stale weights"),
    withheld_push: (1, "weight sync: .* stale or wrongly loaded weights"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_stops_the_run_before_its_update(fault, run_ahead):
    """Controls: the runs of the other tests; and the next test, without the guard."""
    trainer = run_ahead()
    fault(trainer)
    updates, message = FAULTS[fault]
    with pytest.raises(ReplayGapError, match=message):
        trainer.train()
    assert len(steps(trainer.args.output_dir)) == trainer.state.global_step == updates


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_control_without_the_guard_a_fault_stops_nothing(fault, run_ahead):
    trainer = run_ahead(replay_guard=UNGUARDED)
    fault(trainer)
    lines = trained(trainer)
    gap = "sync/probe_gap" if fault is withheld_push else "sync/early_gap"
    assert max(line.get(gap, 0.0) for line in lines) > 1e-4


def test_rollouts_of_other_rows_are_refused(run_ahead):
    """Others were asked for, or others came. Control: the runs of the other tests."""
    trainer = run_ahead()
    rows = trainer.ahead.rows_due
    trainer.ahead.rows_due = lambda micro_batch: rows(micro_batch)[::-1]
    with pytest.raises(StoppedError, match=r"rollout\.ahead: the rollout of row 0 was asked for another prompt"):
        trainer.train()
    trainer = run_ahead("came")
    finish = trainer.engine.finish
    trainer.engine.finish = lambda batch: finish(batch)[::-1]
    with pytest.raises(StoppedError, match=r"rollout\.ahead: the rollout of row 0 came for another prompt"):
        trainer.train()


@pytest.mark.parametrize(
    "settings",
    [
        {"save_steps": 1},
        pytest.param({"save_steps": 3, "max_steps": 5, **HALVES, "num_iterations": 2}, marks=pytest.mark.slow),
        pytest.param({"save_steps": 2, "top_p": 0.8, "importance_correction": "ppo"}, marks=pytest.mark.slow),
    ],
    ids=["plain", "in mid-buffer", "ppo, truncated"],
)
def test_a_killed_run_goes_on_with_what_was_under_way(settings, run_ahead, monkeypatch):
    """Control: resumed without it, the run differs. In mid-buffer nothing is under way yet."""
    settings = {"save_strategy": "steps", "save_total_limit": None, **settings}
    whole = run_ahead("whole", **settings)
    expected = lines_of(whole)
    at = settings["save_steps"]
    with pytest.raises(Killed):
        run_ahead("killed", callbacks=(KillAt(at + 1),), **settings).train()
    torch.manual_seed(1234)  # another process would not have this process's generator state
    second = run_ahead("killed", **settings)
    checkpoint = f"{second.args.output_dir}/checkpoint-{at}"
    assert lines_of(second, checkpoint) == expected
    assert equal(weights(second), weights(whole))
    if "num_iterations" in settings:
        return
    monkeypatch.setattr(Ahead, "load", lambda self, state: None)
    third = run_ahead("killed", **settings)
    third.train(resume_from_checkpoint=checkpoint)
    assert not equal(weights(third), weights(whole))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rollout": {"engine": "hf", "ahead": 1}}, "needs an engine that samples on other machines or GPUs"),
        ({"importance_correction": "none"}, "the loss needs their ratio"),
        ({"tools": ["trainer_runs:digits"]}, "turns of conversations"),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, "whole updates of 3 micro-batches"),
        ({"rollout": {"engine": "server", "servers": ["http://host:8000"]}}, ""),  # the control
        ({}, ""),
        ({"importance_correction": "ppo"}, ""),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, ""),
    ],
)
def test_a_recipe_that_cannot_sample_ahead_is_refused(change, words, tmp_path):
    rollout = {"engine": "server", "servers": ["http://host:8000"], "ahead": 1}
    keys = {"rewards": ["boxed"], "num_generations": 4, "cache": GKV, "rollout": rollout, **change}
    content = {**small("model", tmp_path, kind="grpo"), **keys}
    if not words:
        return make_recipe(content)
    with pytest.raises(UserError, match=words) as caught:
        make_recipe(content)
    assert caught.value.key == "rollout.ahead"


def test_only_grpo_samples_ahead(tmp_path):
    keys = small("model", tmp_path, cache=GKV, kind="distill", teacher="model")
    make_recipe(keys)
    with pytest.raises(UserError, match=r"rollout\.ahead: unknown key"):
        make_recipe({**keys, "rollout": {"ahead": 1}})
