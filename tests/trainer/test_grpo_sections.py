"""GRPO passes every section of a trace to each forward pass, also for buffered completions and after a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import KillAt, Killed

from sparse_rl.attention import views as factory
from sparse_rl.attention.views import ReplayView
from sparse_rl.trace import EvictionTrace, TraceError

MID_BUFFER = {
    "max_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
}


@pytest.fixture
def forwards(monkeypatch):
    """Install a view that accepts two artificial sections and ignores them. Return the batches of all forward
    passes.
    """
    batches: list[dict[str, torch.Tensor]] = []

    class Takes(ReplayView):
        replays = frozenset({"evict_at", "visits", "gains"})

        def __init__(self, batch: Any, *args: Any) -> None:
            batches.append(dict(batch))
            super().__init__(batch, *args)

    monkeypatch.setattr(factory, "views", lambda: [ReplayView, Takes])
    return batches


def visiting(trainer: Any, add: Callable) -> Any:
    """Make the trainer's engine record sections that identify each completion, and return the trainer."""
    generate = trainer.engine.generate
    trainer.engine.generate = lambda prompts, sampling: [
        # probes, which set ignore_eos, do not change
        r if sampling.ignore_eos else dataclasses.replace(r, trace=add(r.trace, r.completion_ids))
        for r in generate(prompts, sampling)
    ]
    return trainer


def test_a_resumed_run_replays_every_section(grpo, with_visits, forwards):
    visiting(grpo("whole", **MID_BUFFER), with_visits).train()
    whole = forwards.copy()
    forwards.clear()
    with pytest.raises(Killed):
        visiting(grpo("stopped", callbacks=(KillAt(1),), **MID_BUFFER), with_visits).train()
    before_checkpoint = len(forwards)
    forwards.clear()
    second = grpo("stopped", **MID_BUFFER)
    checkpoint = Path(second.args.output_dir) / "checkpoint-1"
    buffer = torch.load(checkpoint / "progress_0.pt", weights_only=True)["buffer"]
    assert [list(state) for batch in buffer for state in batch["traces"]] == [["evict_at", "visits", "gains"]] * 8
    for state in (state for batch in buffer for state in batch["traces"]):
        ids = torch.cat([b["completion_ids"] for b in buffer])
        assert any(state["visits"].tolist() == row[: len(state["visits"])].tolist() for row in ids)
        assert EvictionTrace.from_state(state).further.keys() == {"visits", "gains"}
    visiting(second, with_visits).train(resume_from_checkpoint=str(checkpoint))

    expected = whole[before_checkpoint:]
    assert len(forwards) == len(expected) > 0
    for sections, expected_sections in zip(forwards, expected, strict=True):
        assert list(sections) == list(expected_sections) == ["evict_at", "visits", "gains"]
        assert all(torch.equal(sections[name], expected_sections[name]) for name in sections)


def test_a_section_that_no_view_replays_stops_the_run(grpo, with_visits):
    with pytest.raises(TraceError, match=r"^no view replays traces with the sections .*, visits, gains") as caught:
        visiting(grpo(max_steps=1), with_visits).train()
    assert "\n" not in str(caught.value)


def test_full_attention_replays_no_section(grpo, with_visits, forwards):
    visiting(grpo(max_steps=1, train_attention="full"), with_visits).train()
    assert not forwards, "full attention uses the view that replays evict_at alone"
