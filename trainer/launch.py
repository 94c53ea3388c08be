"""Starts the processes of a training, and lets them reuse what the launcher has computed.

`sparse-rl train` runs itself once per process through torch's elastic launcher, which `torchrun` uses too, on each
machine with its own `machine_rank`. Before, it starts servers of rollouts if the recipe asks for them, and it ends them
with the run. The launcher keeps tokenised datasets and the digests of checkpoints in a folder
that exists as long as the command runs, and passes its path in an environment variable. Processes started by torchrun
or accelerate launch have no such folder, and reuse nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from rollout.config import KEY, SERVERS
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.progress import stage
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

    return asked.processes > 1 or asked.zero_stage > 0 or asked.rollout_gpus > 0 or torch.cuda.device_count() > 1


def crowded(asked: LaunchConfig) -> str | None:
    """Return a message if this machine would run more processes than it has GPUs (or usable CPU cores), else None."""
    import torch

    local, cards = asked.processes // asked.machines, torch.cuda.device_count()
    cards = max(cards - asked.rollout_gpus, 0)
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


# ---- servers of rollouts --------------------------------------------------------------------------------------------

BOUND = """
import ctypes, os, signal, sys
if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
    prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the launcher, even if it is killed
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, "-P", *sys.argv[2:]])
"""
GRACE = 15  # seconds that a server has to end


@contextmanager
def rollout_servers(count: int, words: Sequence[str], folder: Path) -> Iterator[None]:
    """Start servers of rollouts on this machine, wait until they answer, and end them with the block or this process.

    count : number of servers, each on one of the last GPUs, if there are GPUs
    words : what Python runs as a server, with `--port N` behind it
    folder : folder for what the servers print, rollout-server-*.log

    In the block the environment has the servers' URLs and key, and leaves the other GPUs to the processes of a
    training. Raises StoppedError if a server ends, and UserError if no GPU is left.
    """

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = dict(os.environ)
    cards = _visible_cards()
    if cards and len(cards) <= count:
        wrong = f"{count} of {len(cards)} GPUs for servers leave none for training; lower it"
        raise UserError(wrong, "launch.rollout_gpus")
    os.environ[KEY] = secrets.token_hex(16)
    ports = _free_ports(count)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with ExitStack() as stack:
        stack.callback(os.environ.update, before)
        stack.callback(os.environ.clear)
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, interrupt))
        folder.mkdir(parents=True, exist_ok=True)
        servers, logs = [], [folder / f"rollout-server-{i}.log" for i in range(count)]
        for i, port in enumerate(ports):
            log = stack.enter_context(open(logs[i], "wb"))
            own = {"CUDA_VISIBLE_DEVICES": cards[len(cards) - count + i]} if cards else {}
            arguments = [sys.executable, "-c", BOUND, str(os.getpid()), *words, "--port", str(port)]
            servers.append(
                subprocess.Popen(arguments, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True)
            )
            stack.callback(_end, servers[-1])
        key = {"Authorization": f"Bearer {os.environ[KEY]}"}
        client = stack.enter_context(httpx.Client(headers=key, trust_env=False))
        with stage("starting", f"{count} server{'s' * (count > 1)} of rollouts"):
            for url in urls:
                while not _answers(client, url):
                    for server, file in zip(servers, logs, strict=True):
                        if server.poll() is not None:
                            last = file.read_text(errors="replace").strip().rpartition("\n")[2]
                            raise StoppedError(f"a server of rollouts ended before it answered: {last} (see {file})")
                    time.sleep(0.3)
        os.environ[SERVERS] = " ".join(urls)
        if cards:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards[:-count])
        yield


def _visible_cards() -> list[str]:
    """Return the names of this process's GPUs, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return (names.split(",") if names else list(map(str, range(count))))[:count]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/rollouts").status_code == 200
    except httpx.HTTPError:
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    """End a server and its processes. Signals to its group reach those that outlive it."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(seconds)


# ---- what the processes share ---------------------------------------------------------------------------------------

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
