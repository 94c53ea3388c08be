"""Every step logs its panels of metrics, and validation does not change the training."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from trainer_runs import digits, timeless, trained
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from sparse_rl.metrics import read_metrics
from trainer.grpo.metrics import PANELS as FIRST_PANELS
from trainer.grpo.metrics import show_panels
from trainer.rundir import CompletionLog, RunLog

PANELS = {
    "replay": ("gap_mean", "gap_max", "k3"),
    "ratio": ("mean", "p5", "p95", "max", "clipped"),
    "cache": ("retention", "bytes_held", "bytes_full"),
    "time": ("sync", "generate", "rewards", "logprobs", "update", "step", "tokens_per_second"),
}
VALIDATED = {
    "held_out": 4,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 4,
}


@pytest.mark.parametrize("settings", [{}, {"importance_correction": "token_truncate", "logging_steps": 2}])
@pytest.mark.few(1)
def test_every_step_logs_every_panel(settings, metrics_of):
    lines = metrics_of(max_steps=4, **settings)
    assert [line["step"] for line in lines] == list(
        range(settings.get("logging_steps", 1), 5, settings.get("logging_steps", 1))
    )
    for line in lines:
        missing = [f"{p}/{n}" for p, names in PANELS.items() for n in names if f"{p}/{n}" not in line]
        assert not missing
        assert {"reward", "rewards/digits/mean", "frac_reward_zero_std", "entropy", "grad_norm"} <= line.keys()
        parts = [line[f"time/{name}"] for name in PANELS["time"][:5]]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(line["time/step"], rel=1e-3)
        assert line["time/generate"] > 0
        assert line["time/tokens_per_second"] > 0
        assert 0 < line["cache/retention"] < 1
        assert line["cache/bytes_held"] < line["cache/bytes_full"]
        assert (line["time/logprobs"] > 0) is bool(settings)


@pytest.mark.parametrize(
    "schedule", [{}, {"per_device_train_batch_size": 4, "steps_per_generation": 2}], ids=["plain", "buffered"]
)
@pytest.mark.few(1)
def test_validation_logs_its_metrics_and_does_not_change_training(schedule, grpo, metrics_of):
    count = 4 if schedule else 2
    plain = metrics_of("plain", max_steps=count, **schedule)
    trainer = grpo("validated", max_steps=count, **schedule, **VALIDATED)
    assert timeless(trained(trainer)) == timeless(plain)
    assert timeless(metrics_of("control", max_steps=count, **schedule, seed=8)) != timeless(plain)
    lines = [line for line in read_metrics(trainer.args.output_dir) if "eval_reward" in line]
    assert [line["step"] for line in lines] == list(range(1, count + 1))
    for line in lines:
        assert {"eval_reward", "eval_rewards/digits/mean", "eval_entropy", "eval_cache/retention"} <= line.keys()
        assert line["eval_entropy"] > 0
        assert line["eval_replay/gap_max"] <= 1e-5
        assert not any(name.startswith(("replay/", "time/")) for name in line)
    assert lines[0]["eval_entropy"] != lines[-1]["eval_entropy"]


def test_a_steps_time_is_that_of_sampling_and_updates(grpo, monkeypatch):
    """Its parts are told by a clock that rewards (1 s) and checkpoints (50 s) move."""
    clock = [0.0]
    monkeypatch.setattr("trainer.grpo.metrics.now", lambda: clock[0])

    def reward(**columns: Any) -> list[float]:
        clock[0] += 1
        return digits(**columns)

    slow: Any = TrainerCallback()
    slow.on_save = lambda *_, **__: clock.append(clock.pop() + 50)
    more = {"eval_on_start": True, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2}
    trainer = grpo(reward=reward, callbacks=(slow,), max_steps=2, **VALIDATED, **more)
    clock[0] += 100
    assert [(line["time/step"], line["time/rewards"]) for line in trained(trainer)] == [(1, 1)]
    assert clock[0] > 200  # the control: validations and checkpoints took time


def test_a_reward_of_none_is_null_in_the_completions(tmp_path):
    log = CompletionLog(tmp_path)
    columns = {"prompt": ["p", "q"], "completion": ["c", "d"], "advantages": [0.5, -0.5]}
    log.trainer = SimpleNamespace(_logs={**columns, "rewards": {"right": [1.0, 0.0], "some": [float("nan"), 0.25]}})
    log.on_log(None, SimpleNamespace(is_world_process_zero=True, global_step=3), None, logs={"reward": 0.5})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in log.file.read_text().splitlines()]
    assert [(line["rewards/right"], line["rewards/some"]) for line in lines] == [(1.0, None), (0.0, 0.25)]


@pytest.mark.parametrize("prefix", ["", "eval_"])
def test_a_tracker_sorts_the_first_panels_before_all_other_metrics(prefix, tmp_path):
    names = [
        *FIRST_PANELS,
        *(f"{panel}/{name}" for panel, names in PANELS.items() for name in names),
        "aux",
        "rewards/x",
    ]
    logs = {prefix + name: float(i) for i, name in enumerate(names)} | {"epoch": 1.0}
    tracker, file = TensorBoardCallback(SummaryWriter(str(tmp_path))), RunLog(tmp_path)
    show_panels([tracker, file])
    state = SimpleNamespace(is_world_process_zero=True, global_step=3)
    for callback in (tracker, file):
        callback.on_log(None, state, None, logs=logs)
    events = EventAccumulator(str(tmp_path)).Reload()
    group = sorted(tag for tag in events.Tags()["scalars"] if tag.startswith("eval/" if prefix else "train/"))
    assert [tag.split("/", 1)[1] for tag in group[:6]] == list(FIRST_PANELS.values())
    for tag, name in zip(group[:6], FIRST_PANELS, strict=True):
        assert events.Scalars(tag)[0].value == logs[prefix + name]
    assert read_metrics(tmp_path) == [{"step": 3, **logs}]
