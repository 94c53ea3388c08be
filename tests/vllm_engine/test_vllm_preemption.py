"""A request that vLLM preempts is sampled again, so that no trace describes a cache that was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from judging import same
from ties import replay_gap
from tiny import policy_of, random_prompts
from watching import pool_of, scheduler_of, watched

from rollout import SamplingConfig

SAMPLING = SamplingConfig(150, seed=0, ignore_eos=True)
LENGTHS = (10, 12, 90, 14, 16, 130, 18, 20)
POLICY = policy_of("gkv", budget=64, window=8, period=32)


@contextmanager
def before_steps(engine: Any, act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with 0, 1, ... before each step of the engine."""
    llm, count = engine.llm.llm_engine, 0
    step = llm.step

    def act_and_step() -> Any:
        nonlocal count
        act(count)
        count += 1
        return step()

    llm.step = act_and_step
    try:
        yield
    finally:
        del llm.step


@contextmanager
def preempting(engine: Any, now: Callable[[int], bool]) -> Iterator[None]:
    """At each step for which `now` is True, an allocation fails once, so the scheduler preempts the latest request."""
    manager = scheduler_of(engine).kv_cache_manager
    allocate, due = manager.allocate_slots, False

    def allocate_or_not(*args: Any, **kwargs: Any) -> Any:
        nonlocal due
        refused, due = due, False
        return None if refused else allocate(*args, **kwargs)

    def set_due(step: int) -> None:
        nonlocal due
        due = now(step)

    manager.allocate_slots = allocate_or_not
    try:
        with before_steps(engine, set_due):
            yield
    finally:
        del manager.allocate_slots


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_preemption_without_free_blocks_does_not_change_results(exact: bool, open_engine: Callable) -> None:
    """Free blocks are removed while sequences grow."""
    engine, prompts = open_engine(POLICY, max_batch=8, exact=exact), random_prompts(LENGTHS)
    expected = engine.generate(prompts, SAMPLING)
    pool = pool_of(engine)
    free = pool.get_num_free_blocks()
    taken: list[Any] = []

    def take_blocks(step: int) -> None:
        if step in (5, 60):
            taken.extend(pool.get_new_blocks(pool.get_num_free_blocks()))
        if step in (40, 75):
            pool.free_blocks(taken)
            taken.clear()

    with watched(engine) as records, before_steps(engine, take_blocks):
        rollouts = engine.generate(prompts, SAMPLING)
    assert records.preempted >= 2
    assert same(rollouts, expected)
    assert replay_gap(rollouts) <= 1e-5
    assert pool.get_num_free_blocks() == free
    assert same(engine.generate(prompts, SAMPLING), expected)


@pytest.mark.parametrize(
    ("policy_name", "steps"),
    [
        pytest.param("gkv", (3,), marks=pytest.mark.slow),
        ("gkv", (100,)),
        pytest.param("tova", (100, 101, 102, 110), marks=pytest.mark.slow),
        ("h2o", range(20, 120, 10)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_preemption_around_evictions_does_not_change_results(
    policy_name: str, steps: Sequence[int], open_engine: Callable
) -> None:
    """Preempted before or after an eviction, once or repeatedly."""
    policy = policy_of(policy_name, budget=64, window=8, period=32)
    engine, prompts = open_engine(policy, shared=True, max_batch=5), random_prompts(LENGTHS)
    expected = engine.generate(prompts, SAMPLING)
    with watched(engine) as records, preempting(engine, lambda step: step in steps):
        rollouts = engine.generate(prompts, SAMPLING)
    assert records.preempted == len(steps)
    assert same(rollouts, expected)
    assert replay_gap(rollouts) <= 1e-5


def test_control_an_unnoticed_preemption_gives_a_wrong_trace(
    open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    engine, prompts = open_engine(POLICY, shared=True, max_batch=5), random_prompts(LENGTHS)
    vllms_own = Scheduler._update_request_with_output.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(Scheduler, "_update_request_with_output", vllms_own)
    with preempting(engine, lambda step: step == 120):
        rollouts = engine.generate(prompts, SAMPLING)
    assert replay_gap(rollouts) >= 1e-3


@pytest.mark.slow
def test_repeated_preemption_is_an_error(open_engine: Callable) -> None:
    """It names the settings to change, and the engine can be used again."""
    engine, prompts = open_engine(POLICY, shared=True, max_batch=5), random_prompts(LENGTHS)
    expected = engine.generate(prompts, SAMPLING)
    error = pytest.raises(RuntimeError, match=r"1 sequences were preempted 3 times; lower max_batch or raise kv_cache")
    with preempting(engine, lambda step: step % 50 == 20), error:
        engine.generate(prompts[:1], SAMPLING)
    assert same(engine.generate(prompts, SAMPLING), expected)


@pytest.mark.slow
def test_preemption_of_all_requests_does_not_change_results(open_engine: Callable) -> None:
    """vLLM's reset of running requests preempts and readmits them in one step."""
    engine, prompts = open_engine(POLICY, shared=True, max_batch=5), random_prompts(LENGTHS)
    expected = engine.generate(prompts, SAMPLING)

    def reset(step: int) -> None:
        if step == 100:
            scheduler_of(engine).reset_prefix_cache(reset_running_requests=True)

    with watched(engine) as records, before_steps(engine, reset):
        rollouts = engine.generate(prompts, SAMPLING)
    assert records.preempted == 5
    assert same(rollouts, expected)
    assert replay_gap(rollouts) <= 1e-5
