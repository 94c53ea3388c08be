"""The configurations are imported without torch, and a recipe and Python code are checked in the same way."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.config import SamplingConfig
from sparse_rl import config
from sparse_rl.errors import UserError
from sparse_rl.methods.config import GKVConfig, H2OConfig
from sparse_rl.methods.kvpop.config import TargetConfig
from trainer.config import DistillationLossConfig, DistillConfig, GuardConfig, SparseGRPOConfig

grpo: Any = SparseGRPOConfig


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: SparseGRPOConfig(loss_type="gpro"),
            r"^loss_type: expected one of grpo, .* got 'gpro'; did you mean 'grpo'",
        ),  # type: ignore[arg-type]
        (lambda: grpo(beta=-1), "^beta: expected a number >= 0, got -1"),
        (lambda: grpo(replay_guard=GuardConfig(factor=True)), "^factor: expected a number >= 1 or null, got true"),
        (lambda: grpo(replay_guard={"factor": 0}), "^replay_guard.factor: expected a number >= 1 or null, got 0"),  # type: ignore[arg-type]
        (lambda: GKVConfig(budget=2.5), "^budget: expected a mapping or a whole number >= 1, got 2.5"),  # type: ignore[arg-type]
        (lambda: H2OConfig(budget="8"), "^budget: expected a mapping or a whole number >= 1, got '8'"),  # type: ignore[arg-type]
        (lambda: SamplingConfig(4, float("inf")), "^temperature: expected a number >= 0, got inf"),
        (lambda: SamplingConfig(4, top_k=0), "^top_k: expected a whole number >= 1 or null, got 0"),
        (
            lambda: SparseGRPOConfig(loss_type="vespo", importance_correction="sequence_mask"),
            "importance_correction: loss_",
        ),
        (lambda: grpo(uniform_groups="drop", beta=0.1), "uniform_groups: drop needs beta 0"),
        (lambda: TargetConfig(group="most"), "group: expected one of max, mean"),  # type: ignore[arg-type]
        (lambda: DistillationLossConfig(kl_weight=0.0), "kl_weight: one of kl_weight and ce_weight"),
        (lambda: DistillationLossConfig(renormalise=True), "renormalise: needs the teacher's top k"),
        (lambda: DistillConfig(completions="student", refresh_every=2), "refresh_every: applies only to the dataset's"),
    ],
)
def test_invalid_settings_are_refused_in_python_too(make, says):
    with pytest.raises(UserError, match=says):
        make()


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("Text", ("a", " a "), ("", " ")),
        ("PositiveInt", (1, 2), (0, -1)),
        ("NonNegativeInt", (0, 1), (-1,)),
        ("Positive", (1e-9, 2), (0, -1)),
        ("NonNegative", (0, 2), (-1e-9,)),
        ("AtLeastOne", (1, 1.5), (0.999, 0)),
        ("Fraction", (1e-9, 1), (0, 1.001)),
        ("Probability", (0, 1), (-1e-9, 1.001)),
        ("BelowOne", (0, 0.999), (-1e-9, 1)),
    ],
)
def test_a_range_accepts_its_limits_and_refuses_values_beyond(name, valid, invalid):
    for value in valid:
        assert config.coerce(value, getattr(config, name), "key", config.Source()) == value
    for value in invalid:
        with pytest.raises(UserError, match=r"^key: expected "):
            config.coerce(value, getattr(config, name), "key", config.Source())


def test_python_values_are_converted_as_yaml_values_are():
    settings = SparseGRPOConfig(beta=1, replay_guard={"factor": 3})  # type: ignore[arg-type]
    assert settings == SparseGRPOConfig(beta=1.0, replay_guard=GuardConfig(factor=3.0))
    assert type(settings.beta) is float
    assert settings != SparseGRPOConfig(beta=2)  # the control
