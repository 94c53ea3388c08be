"""A running clock sees the steps, compactions and blocks of a vLLM engine (rollout/vllm/engine.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny import random_prompts
from watching import scheduler_of

from rollout import SamplingConfig
from rollout.measure.timing import time_sampling
from rollout.vllm.engine import steps_reported
from sparse_rl.policies import make_policy

PROMPT, LENGTH, BATCH = 10, 60, 3
CACHE = {"policy": "streaming", "budget": 16, "period": 8}


def test_a_clock_sees_steps_compactions_and_blocks(open_engine: Callable) -> None:
    """Tokens, steps, compactions and used blocks are those of the schedule. Afterwards the engine samples as before."""
    engine, prompts = open_engine(CACHE, shared=True), random_prompts([PROMPT] * BATCH)
    sampling = SamplingConfig(LENGTH - PROMPT, seed=0, ignore_eos=True)
    short, whole = time_sampling(
        lambda: engine.generate(prompts, sampling), BATCH, PROMPT, [30, LENGTH], observed=steps_reported(engine.llm)
    )
    schedule = make_policy(CACHE).schedule
    for measured in (short, whole):
        due = [schedule.due(PROMPT, seen) for seen in range(PROMPT + 1, measured.length)]
        assert measured.decode_steps == measured.length - PROMPT - 1
        assert measured.decode_tokens == BATCH * measured.decode_steps
        assert measured.compactions == sum(due) > 0
        assert measured.at_once == BATCH
        assert 0 < measured.parts["compaction"] < measured.decode_seconds < measured.seconds
    layers, heads, dim, block = engine.shape[0], engine.shape[1], engine.config.head_dim, 32
    most_blocks = -(-schedule.most_held(PROMPT, LENGTH) // block)
    assert whole.cache_bytes == BATCH * most_blocks * block * 2 * layers * heads * dim * 4
    assert len(engine.generate(prompts, sampling)) == BATCH  # the engine's own method is back


def test_a_decode_step_asks_the_schedule_for_no_block(open_engine: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for the blocks of each running request in each step. They are computed at a request's admission and at
    its first compaction, so twice the number of tokens needs no further computation.
    """
    engine, prompts = open_engine(CACHE, shared=True), random_prompts([PROMPT] * BATCH)
    (manager,) = scheduler_of(engine).kv_cache_manager.coordinator.single_type_managers
    plain = manager.schedule

    class Asked:
        count = 0

        def __getattr__(self, name: str) -> Any:
            self.count += 1
            return getattr(plain, name)

    asked = Asked()
    monkeypatch.setattr(manager, "schedule", asked)
    counts = []
    for tokens in (20, 40):
        engine.generate(prompts, SamplingConfig(tokens, seed=0, ignore_eos=True))
        counts.append(asked.count)
        asked.count = 0
    assert 0 < counts[0] <= 3 * BATCH
    assert counts[0] == counts[1]
