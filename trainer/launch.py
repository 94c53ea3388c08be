"""N processes from one command, on one machine or on each of several.

`sparse-rl train` calls itself once per process through torch's elastic launcher, as `torchrun` does. A process that
has RANK set launches nothing. On several machines the same command runs on each, with its own `machine_rank`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from sparse_rl.temporary import temporary_folder
from trainer.config import LaunchConfig


def launched() -> bool:
    """Whether this process is already one of N."""
    return "RANK" in os.environ


def take_device() -> None:
    """Make the GPU of this process, one of N, the current one: until then "cuda" is GPU 0, for each of them."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def leave_group() -> None:
    """At the end of a run that succeeded: threads of a process group that is still there can crash the process as it
    exits, and the launcher then takes the run for failed. (After an error others may still wait in it.)
    """
    from torch import distributed

    if launched() and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def needs_launch(asked: LaunchConfig) -> bool:
    """Whether a run must go through the launcher: several processes, DeepSpeed, or several GPUs to choose one from."""
    import torch

    return asked.processes > 1 or asked.zero_stage > 0 or torch.cuda.device_count() > 1


def crowded(asked: LaunchConfig) -> str | None:
    """What is wrong with more processes here than GPUs or, without any, CPU cores that may be used; None: nothing."""
    import torch

    local, cards = asked.processes // asked.machines, torch.cuda.device_count()
    # a container or a job may have a share of the cores, where the system tells
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    places, kind = (cards, "GPU") if cards else (cores, "CPU core")
    return f"{local} processes on {places} {kind}{'s' * (places > 1)}; lower it" if local > places else None


def launch(asked: LaunchConfig, arguments: Sequence[str]) -> int:
    """Run `sparse-rl ARGUMENTS` in this machine's share of the processes; returns the exit status (2: user error).

    An interrupt, which the launcher has passed on to the processes, raises KeyboardInterrupt as it would without one.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    agent = "torch.distributed.elastic.agent.server.api"  # it has a level of its own, and tells of every signal
    for name in ("torch.distributed.elastic", agent, "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the processes say themselves what went wrong
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
