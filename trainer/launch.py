"""Starts the processes of a training: each machine runs the same command, with its own `machine_rank`.

`sparse-rl train` runs itself once per process through torch's elastic launcher, which `torchrun` uses too. A process
whose environment variable RANK is set launches no other processes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from sparse_rl.temporary import temporary_folder
from trainer.config import LaunchConfig


def launched() -> bool:
    """Return True if a launcher has started this process, which then must not launch others."""
    return "RANK" in os.environ


def take_device() -> None:
    """Make this process's GPU the current device. Otherwise "cuda" would mean GPU 0 in every process."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def leave_group() -> None:
    """Destroy the process group at the end of a successful run.

    Threads of a remaining process group can crash the process as it exits, and the launcher then reports a failed run.
    Do not call this after an error: other processes may still wait in the group.
    """
    from torch import distributed

    if launched() and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def needs_launch(asked: LaunchConfig) -> bool:
    """Return True if a run uses several processes or DeepSpeed, or can choose between GPUs."""
    import torch

    return asked.processes > 1 or asked.zero_stage > 0 or torch.cuda.device_count() > 1


def crowded(asked: LaunchConfig) -> str | None:
    """Return a message if this machine would run more processes than it has GPUs (or usable CPU cores), else None."""
    import torch

    local, cards = asked.processes // asked.machines, torch.cuda.device_count()
    # A container or a job may use only some of the cores. sched_getaffinity lists them, on platforms that have it.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    places, kind = (cards, "GPU") if cards else (cores, "CPU core")
    return f"{local} processes on {places} {kind}{'s' * (places > 1)}; lower processes" if local > places else None


def launch(asked: LaunchConfig, arguments: Sequence[str]) -> int:
    """Run `sparse-rl ARGUMENTS` in each process of this machine, and return the exit status (2 for a user error).

    If the user interrupts the run, the processes are interrupted too, and KeyboardInterrupt is raised.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    agent = "torch.distributed.elastic.agent.server.api"  # this logger has its own level, and logs every signal
    for name in ("torch.distributed.elastic", agent, "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the processes report their errors themselves
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    several = asked.machines > 1
    config = ElasticConfig(
        min_nodes=asked.machines,
        max_nodes=asked.machines,
        nproc_per_node=asked.processes // asked.machines,
        run_id="sparse-rl",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=f"{asked.main_process_ip}:{asked.main_process_port}" if several else "localhost:0",
        rdzv_configs={"rank": asked.machine_rank, "timeout": 900} if several else {},
        max_restarts=0,
        monitor_interval=0.5,
        logs_specs=DefaultLogsSpecs(temporary_folder()),
    )
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "sparse_rl.cli", *arguments)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return 2 if 2 in codes else 1
    except SignalException as error:
        raise KeyboardInterrupt from error
    return 0
