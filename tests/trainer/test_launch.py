"""The number of processes per machine, the end of a process group, and the dtype in which gradients are added up."""

import importlib
import os
from pathlib import Path

import pytest
import torch
from torch import distributed

from trainer.arguments import deepspeed_config
from trainer.config import LaunchConfig
from trainer.launch import crowded, leave_group


@pytest.mark.parametrize(("cards", "places"), [(0, "3 CPU cores"), (3, "3 GPUs"), (1, "1 GPU")])
def test_more_processes_than_places_are_reported(cards, places, monkeypatch):
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


def test_a_launched_process_leaves_its_group(tmp_path, monkeypatch):
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


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_deepspeed_reads_float32_for_gradients_unless_the_weights_dtype_is_asked_for(stage, offload):
    from deepspeed.runtime.config import DeepSpeedConfig

    for words, reduced, added in [({}, torch.float32, "fp32"), ({"gradient_dtype": "weights"}, None, None)]:
        config = deepspeed_config(LaunchConfig(zero_stage=stage, offload=offload, **words))
        numbers = {name: 1 for name in ("train_batch_size", "train_micro_batch_size_per_gpu")}
        of_bfloat16 = {"bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_accumulation_steps": 1}
        read = DeepSpeedConfig({**config, **numbers, **of_bfloat16, "gradient_clipping": 1.0})
        assert read.communication_data_type is reduced
        assert read.grad_accum_dtype == added


@pytest.mark.slow
def test_gradients_of_two_processes_lose_nothing_in_float32(monkeypatch):
    """After 16 micro-batches; in the weights' bfloat16 the gradient is far from the exact mean."""
    monkeypatch.syspath_prepend(str(ROOT))
    error = importlib.import_module("benchmarks.exactness").gradient_dtype
    for stage in (1, 2, 3):
        assert error(stage, "float32")["error"] < 1e-6
        assert error(stage, "weights")["error"] > 1e-3
