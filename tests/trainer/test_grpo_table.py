"""TRL's table of completions has the columns that rewards add and the trained advantages, also after a resume."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from trainer_runs import KillAt, Killed, digits, trained

from sparse_rl.errors import UserError
from trainer.grpo.trainer import load_log, log_state, plain_values
from trainer.rundir import CompletionLog

TABLES = {
    "log_completions": True,
    "held_out": 2,  # half of the table's rows
    "eval_strategy": "steps",
    "eval_steps": 1,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 4,
    "per_device_train_batch_size": 4,
    "steps_per_generation": 2,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 3,
}


def noting(completions: list[str], log_extra: Callable, **columns: Any) -> list[float]:
    log_extra("length", [np.int64(len(text)) for text in completions])
    log_extra("words", [[text[:3], None] for text in completions])
    return digits(completions, **columns)


def tables(trainer: Any) -> dict[str, pandas.DataFrame]:
    folder = Path(trainer.args.output_dir) / "completions"
    return {file.name: pandas.read_parquet(file) for file in sorted(folder.iterdir())}


def test_a_checkpoint_keeps_every_column(tmp_path):
    def empty() -> dict[str, Any]:
        columns = {name: deque(maxlen=2) for name in ("images", "prompt", "completion", "advantages")}
        return {**columns, **{name: defaultdict(lambda: deque(maxlen=2)) for name in ("rewards", "extra")}}

    logs, restored = empty(), empty()
    for name in ("prompt", "completion"):
        logs[name].extend(["a", "b", "c"])
    logs["advantages"].extend([1.0, -1.0])
    logs["rewards"]["digits"].extend([0.5, 0.0])
    logs["extra"]["length"].extend(plain_values("length", [np.int64(3), torch.tensor(4)]))
    torch.save(log_state(logs), tmp_path / "state")
    load_log(restored, torch.load(tmp_path / "state", weights_only=True))
    assert restored == logs
    assert restored["extra"]["length"] == deque([3, 4])
    restored["extra"]["length"].append(5)
    assert restored["extra"]["length"] == deque([4, 5])


@pytest.mark.slow
def test_a_resumed_run_writes_the_same_tables(grpo):
    """It stops in mid-buffer, when the table holds rows of a validation beside rows of the last generation."""
    whole = grpo("whole", reward=noting, **TABLES)
    whole.train()
    expected = tables(whole)
    assert len(expected) == 4
    assert {"length", "words", "noting"} <= set(expected["completions_00004.parquet"])
    with pytest.raises(Killed):
        grpo("stopped", reward=noting, callbacks=(KillAt(3),), **TABLES).train()
    resumed = grpo("stopped", reward=noting, **TABLES)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-3")
    result = tables(resumed)
    assert result.keys() == expected.keys()
    for name, table in result.items():
        pandas.testing.assert_frame_equal(table, expected[name])


def test_log_extra_refuses_values_that_checkpoints_cannot_store(grpo):
    def reward(completions: list[str], log_extra: Callable, **_: Any) -> list[float]:
        log_extra("match", [{1} for _ in completions])
        return digits(completions)

    with pytest.raises(UserError, match=r"log_extra takes numbers, strings, None, .* the column 'match'"):
        grpo(reward=reward).train()


def test_completions_have_the_advantages_that_are_trained_on(grpo, tmp_path):
    """The table shows the advantages that are trained on: truncated outputs have advantage 0."""
    log = CompletionLog(tmp_path)
    log.trainer = grpo(max_steps=1, per_device_train_batch_size=4, max_completion_length=8, callbacks=(log,))
    sampled: list[list[Any]] = []
    generate = log.trainer.engine.generate
    log.trainer.engine.generate = lambda *arguments: sampled.append(generate(*arguments)) or sampled[-1]
    trained(log.trainer)
    advantages = [json.loads(line)["advantage"] for line in log.file.read_text().splitlines()]
    assert len(advantages) == 4
    assert [value == 0 for value in advantages] == [r.finish_reason == "length" for r in sampled[-1]]
    assert 0 < sum(value == 0 for value in advantages) < 4
