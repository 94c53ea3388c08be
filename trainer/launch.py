"""Starts the processes of a training, and lets them reuse what the launcher has computed.

`sparse-rl train` runs itself once per process through torch's elastic launcher, which `torchrun` uses too, on each
machine with its own `machine_rank`. The launcher keeps tokenised datasets and the digests of checkpoints in a folder
that exists as long as the command runs, and passes its path in an environment variable. Processes started by torchrun
or accelerate launch have no such folder, and reuse nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sparse_rl.temporary import temporary_folder
from trainer.config import LaunchConfig

if TYPE_CHECKING:
    from datasets import Dataset


def launched() -> bool:
    return "RANK" in os.environ


def take_device() -> None:
    """Make this process's GPU the current device; "cuda" would otherwise mean GPU 0 in every process."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def leave_group() -> None:
    """Destroy the process group at the end of a successful run (after an error, other processes may still wait in it).
    Threads of a remaining process group can crash the process as it exits."""
    from torch import distributed

    if launched() and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def needs_launch(asked: LaunchConfig) -> bool:
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
    """Run `sparse-rl ARGUMENTS` in each process of this machine, and return the exit status (2 for a user error)."""
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


FOLDER = "SPARSE_RL_LAUNCH_FOLDER"
T = TypeVar("T")


@contextmanager
def remembered() -> Iterator[None]:
    """Compute each result of `once` only once in this block and in the processes launched from it."""
    place = temporary_folder()
    if launched():  # the launcher's folder is used; it outlives this process
        yield
        return
    with tempfile.TemporaryDirectory(dir=place) as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


def once(what: str, make: Callable[[], T]) -> T:
    """Return the result that the launcher has stored under the name `what`; if there is none, return make()."""
    if FOLDER not in os.environ:
        return make()
    file = Path(os.environ[FOLDER]) / hashlib.sha256(what.encode()).hexdigest()
    if file.exists():
        return pickle.loads(file.read_bytes())
    result = make()
    if not launched():  # launched processes would overwrite each other's file
        file.write_bytes(pickle.dumps(result))
    return result


def once_on_disk(what: str, make: Callable[[], Dataset]) -> Dataset:
    """Return the dataset of `make`, read from a copy that all processes share, with the results of its `map`."""
    import datasets

    if FOLDER not in os.environ:
        return make()

    def saved() -> str:
        place = tempfile.mkdtemp(dir=os.environ[FOLDER])
        result, bars_shown = make(), not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            result.save_to_disk(place)
        finally:
            if bars_shown:
                datasets.enable_progress_bars()
        return place

    return datasets.load_from_disk(once(what, saved))
