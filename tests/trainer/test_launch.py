"""The number of processes per machine is checked, and a launched process leaves its group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import distributed

from trainer.config import LaunchConfig
from trainer.launch import crowded, leave_group


@pytest.mark.parametrize(("cards", "places"), [(0, "3 CPU cores"), (3, "3 GPUs"), (1, "1 GPU")])
def test_more_processes_than_places_are_reported(cards: int, places: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch with more processes than GPUs or CPU cores gets a message with both numbers. Each machine is checked for
    its own share of the processes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)  # this process may use the three cores below
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 6}, raising=False)
    maximum = int(places[0])
    assert crowded(LaunchConfig(processes=maximum)) is None
    assert crowded(LaunchConfig(processes=maximum + 1)) == f"{maximum + 1} processes on {places}; lower processes"
    two_machines = {"machines": 2, "main_process_ip": "10.0.0.1"}
    assert crowded(LaunchConfig(processes=2 * maximum, **two_machines)) is None
    assert (
        crowded(LaunchConfig(processes=2 * maximum + 2, **two_machines))
        == f"{maximum + 1} processes on {places}; lower processes"
    )


def test_a_launched_process_leaves_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        leave_group()
        assert distributed.is_initialized()  # this process was not launched, so the group is not ours
        monkeypatch.setenv("RANK", "0")
        leave_group()
        assert not distributed.is_initialized()
        leave_group()
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
