"""GRPO logs a policy's metrics over all processes, and not only those of the first process."""

from __future__ import annotations

import json
import math
import os
import socket
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.multiprocessing as mp

from trainer.grpo import metrics as own_metrics
from trainer.grpo.metrics import AuxiliaryLosses, GRPOMetrics, over_processes

PANELS = [{"match/mass": 0.25, "match/bias_max": 3.0}, {}, {"match/mass": 0.75, "match/bias_max": 2.0, "a": 1.0}]


def test_metrics_are_combined_over_the_processes_that_have_them():
    """A process without a compaction has no value; a NaN of any process stays NaN."""
    assert over_processes(PANELS) == {"match/mass": 0.5, "match/bias_max": 3.0, "a": 1.0}
    assert over_processes([PANELS[1]]) == {}
    assert over_processes(PANELS[:1]) == PANELS[0]
    for panels in ([3.0, math.nan], [math.nan, 3.0]):
        assert math.isnan(over_processes([{"match/bias_max": value} for value in panels])["match/bias_max"])


def of_process(rank: int, port: int, folder: str) -> None:
    """Run one of two processes. Each logs its own values; the first one also writes the test's result."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from accelerate import Accelerator

    accelerator, metrics = Accelerator(cpu=True), defaultdict(list)
    auxiliary = AuxiliaryLosses(
        torch.tensor([1.0 + rank, 3.0 + rank]), {0: (torch.tensor(4.0 * rank), torch.tensor(6.0))}
    )
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(
            device=accelerator.device, gather=accelerator.gather, autocast=nullcontext, unwrap_model=lambda model: model
        ),
        args=SimpleNamespace(scorers=True),
        model=torch.nn.Linear(1, 1),
        engine=SimpleNamespace(policy=None),
        mode="train",
        _metrics={"train": metrics},
    )
    trainer.own_metrics = GRPOMetrics(trainer)
    trainer.own_metrics.record_auxiliary(auxiliary)
    own_metrics.base_of = cast(Any, lambda model: model)
    trainer.engine.policy = SimpleNamespace(metrics=lambda *_: {"cache/decisions_agree": 1.0 - rank})
    trainer.own_metrics.record_policy(cast(Any, None))
    if rank == 0:
        Path(folder, "metrics.json").write_text(json.dumps(metrics))
    accelerator.end_training()


@pytest.mark.slow
def test_two_processes_log_values_of_both(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(of_process, (port, str(tmp_path)), nprocs=2)
    logged = json.loads((tmp_path / "metrics.json").read_text())
    assert logged == {"boundary_loss": [2.5], "cache/recall": [pytest.approx(4 / 12)], "cache/decisions_agree": [0.5]}
