"""The replay guard stops the run if the sampler's weights or its traces do not fit the trainer."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import GKV, steps, trained

from rollout import Rollout, make_engine
from sparse_rl.errors import NotFiniteError, StoppedError
from sparse_rl.trace import NEVER, EvictionTrace
from trainer.config import GuardConfig
from trainer.grpo.metrics import TOLERANCES, ReplayGapError, check_gap

SCHEDULES = {
    "measured in the loss": {},
    "measured with the old log-probs": {"importance_correction": "token_truncate"},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}


def with_trace(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Any], None]:
    """Return a fault that replaces the evict_at [L, Hkv, S] of every trace by `change(evict_at, prompt length)`; L
    layers, Hkv kv heads, S positions."""

    def corrupt(trainer: Any) -> None:
        generate = trainer.engine.generate

        def generate_with_fault(prompts: Any, sampling: Any) -> list[Rollout]:
            return [
                dataclasses.replace(r, trace=EvictionTrace(change(r.trace.evict_at.clone(), len(r.prompt_ids))))
                for r in generate(prompts, sampling)
            ]

        trainer.engine.generate = generate_with_fault

    return corrupt


def one_period_late(evict_at: torch.Tensor, prompt: int) -> torch.Tensor:
    """Record each eviction one period late, as G-KV's published code does."""
    return torch.where(evict_at < evict_at.shape[-1] - 1 - GKV["period"], evict_at + GKV["period"], NEVER)


def later(evict_at: torch.Tensor, prompt: int) -> torch.Tensor:
    """Record each eviction one position late."""
    return torch.where(evict_at < evict_at.shape[-1] - 2, evict_at + 1, evict_at)


def stale(trainer: Any) -> None:
    """Let the engine, after its probe, sample from a copy of the model whose weights no longer equal the trainer's."""
    engine = make_engine("hf", model=trainer.args.output_dir + "/stale", policy=trainer.engine.policy)
    generate = trainer.engine.generate
    trainer.engine.generate = lambda prompts, sampling: (generate if sampling.ignore_eos else engine.generate)(
        prompts, sampling
    )


def not_a_number(trainer: Any) -> None:
    generate = trainer.engine.generate

    def generate_with_nan(prompts: Any, sampling: Any) -> list[Rollout]:
        rollouts = generate(prompts, sampling)
        if not sampling.ignore_eos:  # the probe's calls set ignore_eos
            rollouts[3].model_logprobs[0] = math.nan
        return rollouts

    trainer.engine.generate = generate_with_nan


FAULTS = {
    "stale weights": stale,
    "one position late": with_trace(later),
    "kv heads swapped": with_trace(lambda evict_at, prompt: evict_at.flip(1)),
    "nothing evicted": with_trace(lambda evict_at, prompt: torch.full_like(evict_at, NEVER)),
    "NaN": not_a_number,
}


def inject(trainer: Any, fault: str) -> None:
    weights = copy.deepcopy(trainer.model.state_dict())
    changed_model = type(trainer.model)(trainer.model.config)
    changed_model.load_state_dict({name: tensor * 1.05 for name, tensor in weights.items()})
    changed_model.save_pretrained(trainer.args.output_dir + "/stale")
    FAULTS[fault](trainer)


def digest(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.rglob("*")) if f.is_file()}


CASES = [(fault, "measured in the loss") for fault in FAULTS] + [
    ("one position late", name) for name in list(SCHEDULES)[1:]
]


@pytest.mark.parametrize(("fault", "schedule"), CASES)
@pytest.mark.few(3)
def test_a_fault_stops_the_run(fault, schedule, grpo):
    trainer = grpo(**SCHEDULES[schedule])
    inject(trainer, fault)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    message = r"beyond the limit .*stale weights; the trace" if fault != "NaN" else "not a finite number .*: weights or"
    with pytest.raises(StoppedError, match=f"replay gap: .* {message}") as caught:
        trainer.train()
    assert isinstance(caught.value, NotFiniteError if fault == "NaN" else ReplayGapError)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    assert trainer.state.global_step == 0
    assert not steps(trainer.args.output_dir)


@pytest.mark.parametrize("fault", ["stale weights", "one position late"])
@pytest.mark.few(1)
def test_control_without_the_guard_the_run_continues(fault, grpo):
    """Control: without the guard, the run continues, and the logs show the gap that the guard would have checked."""
    trainer = grpo(replay_guard=GuardConfig(enabled=False), max_steps=1)
    inject(trainer, fault)
    (line,) = trained(trainer)
    assert line["replay/gap_mean"] > 1e-4
    assert line["replay/gap_max"] > 1e-2


@pytest.mark.slow
def test_the_previous_checkpoint_is_unchanged_and_can_be_resumed(grpo):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    first = grpo(**settings)
    trained(first)
    checkpoint = Path(first.args.output_dir) / "checkpoint-1"
    before = digest(checkpoint)
    second = grpo(**{**settings, "max_steps": 3})
    inject(second, "one position late")
    with pytest.raises(ReplayGapError):
        second.train(resume_from_checkpoint=str(checkpoint))
    assert digest(checkpoint) == before
    third = grpo(**{**settings, "max_steps": 3})  # the checkpoint can be resumed
    assert [line["step"] for line in trained(third, str(checkpoint))] == [1, 2, 3]


def test_a_floor_raises_the_limit(grpo):
    """A floor set by the user raises the guard's limit; the limit never falls below the gap that the probe measured."""
    trainer = grpo(replay_guard=GuardConfig(floor=10.0), max_steps=1)
    inject(trainer, "one position late")
    assert len(trained(trainer)) == 1


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.few(1)
def test_in_bfloat16_only_a_late_trace_stops_the_run(shared, grpo, tiny):
    """Sampling uses the live module, or a copy with bfloat16 weights, as in vLLM."""
    model = None if shared else tiny("qwen3")

    def half(name: str) -> Any:
        return grpo(name, bf16=True, own_weights=model, own_dtype="bfloat16")

    lines = trained(half("right"))
    assert len(lines) == 2
    assert all(5e-4 < line["replay/gap_mean"] < 0.05 for line in lines)
    trainer = half("late")
    with_trace(one_period_late)(trainer)
    with pytest.raises(ReplayGapError, match=r"replay gap: .* beyond the limit 1\.00e-01"):
        trainer.train()


@pytest.mark.parametrize("probe", [0.0, 1e-3, 0.03, 0.05])
def test_the_limit_in_bfloat16_separates_rounding_from_late_evictions(probe):
    """Measured: standard deviation 0.05 over 3,916 tokens of Qwen2.5-0.5B-Instruct (TRL issue 6789)."""
    tolerance = TOLERANCES[torch.bfloat16]
    gap = torch.randn(3916, generator=torch.Generator().manual_seed(0))
    check_gap("replay gap", float(0.05 * gap.abs().mean()), tolerance.limit(probe))
    check_gap("weight sync", probe, tolerance.limit(0.0))
    with pytest.raises(ReplayGapError):
        check_gap("replay gap", 0.2, tolerance.limit(probe))


@pytest.mark.parametrize("what", ["replay gap", "weight sync"])
def test_a_gap_that_is_not_finite_is_not_reported_as_stale_weights(what):
    for gap in (math.nan, math.inf):
        with pytest.raises(NotFiniteError, match="not a finite number") as caught:
            check_gap(what, gap, 1.0)
        assert "stale" not in str(caught.value)
    with pytest.raises(ReplayGapError, match=r"beyond the limit .*stale"):
        check_gap(what, 3.0, 1.0)


def test_the_limit_in_float32_is_1e_4_for_small_probes():
    assert [TOLERANCES[torch.float32].limit(probe) for probe in (0.0, 1e-6, 1e-5)] == [1e-4] * 3
