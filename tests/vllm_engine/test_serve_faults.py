"""Servers of rollouts that fail, and clients that leave or are killed: a run on two servers ends with the weights of a
run without faults, and a server keeps nothing of clients that have left.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest
import torch
from faulty import Proxy, counting, held
from processes import ROOT, without_launch
from safetensors.torch import load_file
from serving import Server, served_directory
from standin import serving

from rollout import SamplingConfig
from rollout import servers as client
from rollout.sampling import Request
from rollout.servers import ServerEngine
from rollout.wire import About, pack_requests, pack_weights
from sparse_rl.commands.train import train
from sparse_rl.models.directory import save_policy
from sparse_rl.models.load import load_model
from sparse_rl.policies import make_policy
from sparse_rl.recipe import make_recipe
from trainer.checkpoint import checkpoints

pytestmark = pytest.mark.slow

GKV = {"policy": "gkv", "budget": 8, "window": 3, "period": 2}
WORDS = ("--rollouts", "--kv-cache-gb", "0.03", "--max-batch", "16", "--max-model-len", "1024")
RUN: dict[str, Any] = {
    "kind": "grpo",
    "data": {"synthetic": {"task": "running_sum", "size": 64, "n": 4}},
    "rewards": ["trainer_runs:digits"],
    "cache": GKV,
    "dtype": "float32",
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 40,
    "gradient_checkpointing": False,
    "importance_correction": "none",
    "logging_steps": 1,
}


class Pair:
    """Two servers, each of which can be started again at its port."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.numbers = model, folder, iter(range(99))
        self.servers = [self.start(), self.start()]

    def start(self, port: int | None = None) -> Server:
        (folder := self.folder / str(next(self.numbers))).mkdir()
        return Server(self.model, folder, *WORDS, port=port)

    def restart(self, server: Server) -> None:
        self.servers[self.servers.index(server)] = again = self.start(server.port)
        again.wait()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = served_directory(tmp_path_factory.mktemp("trained"))
    save_policy(model, make_policy(GKV))
    folder = tmp_path_factory.mktemp("servers")
    with mock.patch.dict(os.environ, counting(folder)):
        two = Pair(model, folder)
        try:
            for server in two.servers:
                server.wait()
            yield two
        finally:
            for server in two.servers:
                if server.process.poll() is None:
                    server.end(signal.SIGTERM)


def about(server: Server) -> About:
    return About.of(httpx.get(f"{server.url}/rollouts").json())


# ---- clients that leave ---------------------------------------------------------------------------------------------

LANES = 20  # requests at the same time, of up to two sequences each


def body(draw: random.Random, tokens: int, version: int) -> bytes:
    """Return the body that asks for one or two sequences of at most `tokens` tokens."""
    prompts = [[draw.randrange(3, 60) for _ in range(draw.randint(2, 20))] for _ in range(draw.randint(1, 2))]
    requests = [Request(i, ids, draw.randint(1, tokens), draw.randrange(2**31)) for i, ids in enumerate(prompts)]
    sampling = SamplingConfig(tokens, top_p=draw.choice([0.9, 1.0]), record_support=True, ignore_eos=True)
    return pack_requests(requests, sampling, [], version)


async def ask(server: Server, count: int, seed: int) -> Counter[Any]:
    """Ask for rollouts `count` times. In one of ten, leave before the answer; the request may be waiting for
    other weights. Returns the number of requests for each status, and of clients that have left.
    """
    draw, numbers, ends, version = random.Random(seed), iter(range(count)), Counter[Any](), about(server).version
    limits = httpx.Limits(keepalive_expiry=2)  # the server closes connections after 5 idle seconds
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http:

        async def lane() -> None:
            for number in numbers:
                leaves = number % 10 == 9
                content = body(draw, *((400, version + draw.choice([0, 0, 0, 1])) if leaves else (5, version)))
                try:
                    answer = http.post("/rollouts", content=content)
                    reply = await asyncio.wait_for(answer, draw.uniform(0, 0.2) if leaves else None)
                    ends[reply.status_code] += 1
                except TimeoutError:
                    ends["left"] += 1

        await asyncio.gather(*(lane() for _ in range(LANES)))
    return ends


def state(server: Server, folder: Path) -> tuple[dict[str, Any], int]:
    """Wait until a server has nothing to do. Return what it holds after a last request, and its resident memory."""
    until = time.monotonic() + 60
    while (now := about(server)).running or now.waiting or now.recorded:
        assert time.monotonic() < until, now
        time.sleep(0.1)
    server.idle()
    reply = httpx.post(f"{server.url}/rollouts", content=body(random.Random(0), 5, now.version))
    assert reply.status_code == 200  # it still holds the last step
    time.sleep(1)
    files = {f"files {number}": process.num_fds() for number, process in enumerate(server.family())}
    return files | held(server, folder), sum(process.memory_info().rss for process in server.family())


def test_a_server_keeps_nothing_of_clients_that_leave(pair: Pair) -> None:
    """After 10,000 requests, a tenth of them abandoned, and some updates of the weights. Control: while they run."""
    server, model = pair.servers[0], load_model(pair.model)
    weights = pack_weights(model.named_parameters())

    def asked(count: int, seed: int) -> Counter[Any]:
        ends = asyncio.run(ask(server, count, seed))
        update = f"{server.url}/rollouts/weights?version={about(server).version + 1}"
        assert httpx.post(update, content=weights, timeout=60).status_code == 200
        return ends

    asked(1000, 0)
    before, memory = state(server, pair.folder)
    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(lambda: sum((asked(2000, seed) for seed in range(1, 6)), Counter[Any]()))
        time.sleep(2)
        under_way = held(server, pair.folder)
    after, more = state(server, pair.folder)
    print(ends.result(), memory, more)
    assert after.pop("0: RolloutServer.free") <= 4 * LANES  # places of all, and of as many that are being forgotten
    assert set(ends.result()) == {200, "left"} and ends.result()["left"] > 900
    assert {n: x for n, x in after.items() if x != before.get(n, 0)} == {}
    assert more < 1.05 * memory
    assert "Traceback" not in server.log.read_text()
    assert sum(x for n, x in under_way.items() if n.endswith("ServerRecord.place_of")) > 0


# ---- a training that is killed --------------------------------------------------------------------------------------


def run_of(pair: Pair, folder: Path, servers: list[str], **keys: Any) -> dict[str, Any]:
    rollout = {"engine": "server", "servers": servers, "patience": 1000, **keys.pop("rollout", {})}
    return {**RUN, "model": str(pair.model), "output_dir": str(folder), "rollout": rollout, **keys}


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """command(recipe, *words, **job) runs `sparse-rl train` in a forked child of one process; see forked_runs.py."""
    path = [ROOT, ROOT / "tests/trainer", ROOT / "tests"]
    environment = without_launch() | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    words = [sys.executable, str(ROOT / "tests/trainer/forked_runs.py")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, **pipes, text=True, env=environment, cwd=tmp_path) as process:

        def run(recipe: dict[str, Any], *words: str, **job: Any) -> dict[str, Any]:
            (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
            (log := tmp_path / "log").unlink(missing_ok=True)
            words = ("train", "recipe.yaml", f"output_dir={recipe['output_dir']}", *words)
            process.stdin.write(json.dumps({"words": words, "log": str(log), **job}) + "\n")
            process.stdin.flush()
            return {**json.loads(process.stdout.readline()), "log": log.read_text()}

        yield run
        process.stdin.close()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


KILLS = 6


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_killed_at_any_time_ends_like_one_that_is_not(ahead: int, pair: Pair, tmp_path: Path, command) -> None:
    """At a file operation or at any time. The servers go on, with weights and sequences of the killed run. Control: the
    first weights.
    """
    rollout = {"ahead": ahead}
    keys = {"rollout": rollout, "importance_correction": "token_truncate", "max_steps": 6, "save_steps": 1}

    def recipe(name: str) -> dict[str, Any]:
        return run_of(pair, tmp_path / name, [server.url for server in pair.servers], **keys)

    whole = command(recipe("whole"), record=str(tmp_path / "operations.json"))
    assert whole["status"] == 0, whole["log"]
    operations = len(json.loads((tmp_path / "operations.json").read_text()))
    expected, seconds, draw, steps = weights_of(tmp_path / "whole"), whole["seconds"], random.Random(ahead), list[int]()
    while len(steps) < KILLS:
        folder = tmp_path / f"run-{len([*tmp_path.glob('run-*')])}"
        while True:
            complete = checkpoints(folder)
            moments = {"kill_at": draw.randint(1, operations)}, {"kill_after": draw.uniform(0.4, 0.95) * seconds}
            moment = moments[len(steps) % 2] if len(steps) < KILLS else {}
            done = command(recipe(folder.name), *["--resume"] * bool(complete), **moment)
            if done["status"] == 0:
                seconds = min(seconds, done["seconds"])
                break
            assert done["status"] == -signal.SIGKILL, done["log"]
            steps.append(max([0, *(int(path.name.partition("-")[2]) for path in checkpoints(folder))]))
        assert equal(weights_of(folder), expected), steps
    print(steps, seconds)
    assert max(steps) > 0 and min(about(server).version for server in pair.servers) > 0
    assert not equal(load_file(pair.model / "model.safetensors"), expected)


# ---- servers that fail ----------------------------------------------------------------------------------------------

FAULTS = {"reset": 7, "cut": 6, "damaged": 5, "500": 4, "abort": 4, "stop": 1, "kill": 3}
SEEN = {
    "reset": "ReadError",
    "cut": "peer closed connection without sending complete message body",
    "damaged": "the body is not an answer with rollouts",
    "500": "status 500: a fault",
    "abort": "ended by 'abort'",
    "stop": "no answer to GET /rollouts",
}
STOPPED = 15  # seconds


class Trouble:
    """Makes faults at random moments, in random order.

    coming, made : faults that are to come, in reverse order, and those that were made
    restarted : proxies of servers that were started again, and how often these had been given weights before
    """

    def __init__(self, pair: Pair, faults: dict[str, int], seed: int = 0) -> None:
        self.pair, self.draw, self.lock, self.pool = pair, random.Random(seed), threading.Lock(), ThreadPoolExecutor()
        self.coming = [name for name, count in faults.items() for _ in range(count)]
        self.draw.shuffle(self.coming)
        self.victims, self.wait = ["python", "VLLM::EngineCore", "VLLM::Worker"], 0
        self.busy, self.made = set[Proxy](), Counter[str]()
        self.tasks: list[Future[None]] = []
        self.restarted: list[tuple[Proxy, int]] = []

    def next_fault(self, proxy: Proxy) -> str:
        with self.lock:
            self.wait -= 1
            if self.wait > 0 or not self.coming or proxy in self.busy:
                return ""
            strike = {"kill": self.kill, "stop": self.stop}.get(name := self.coming.pop())
            self.made[name] += 1
            self.wait = self.draw.randint(1, 5)
            if strike is None:
                return name
            self.busy.add(proxy)
            self.tasks.append(self.pool.submit(strike, proxy, self.draw.uniform(0, 0.3)))
            return ""

    def server(self, proxy: Proxy) -> Server:
        return next(server for server in self.pair.servers if server.port == proxy.port)

    def kill(self, proxy: Proxy, pause: float) -> None:
        time.sleep(pause)
        server = self.server(proxy)
        family, victim = server.family(), self.victims.pop()
        next(process for process in family if victim in process.cmdline()[0]).kill()
        server.process.wait(100)
        assert not psutil.wait_procs(family[1:], 20)[1]
        self.restarted.append((proxy, proxy.given))
        self.pair.restart(server)
        self.busy.discard(proxy)

    def stop(self, proxy: Proxy, pause: float) -> None:
        time.sleep(pause)
        group = self.server(proxy).process.pid
        os.killpg(group, signal.SIGSTOP)
        time.sleep(STOPPED)
        os.killpg(group, signal.SIGCONT)
        self.busy.discard(proxy)


def test_thirty_faults_do_not_change_a_run(pair: Pair, tmp_path: Path, monkeypatch: Any) -> None:
    """Servers are killed in different processes. Control: sequences that are cut short, but do not say so."""
    monkeypatch.syspath_prepend(ROOT / "tests/trainer")
    monkeypatch.setattr(client, "CHUNK", 1)
    monkeypatch.setattr(client, "LOOK", 3.0)
    monkeypatch.setitem(ServerEngine.__init__.__kwdefaults__, "beat", 0.5)
    fail, seen = ServerEngine._fail, list[str]()

    def fail_and_note(self: Any, server: Any, error: Exception, first: bool = True) -> None:
        seen.append(str(error))
        fail(self, server, error, first)

    monkeypatch.setattr(ServerEngine, "_fail", fail_and_note)

    def weights(name: str, trouble: Trouble) -> dict[str, torch.Tensor]:
        with serving(*(Proxy(server.port, trouble.next_fault) for server in pair.servers)) as servers:
            train(make_recipe(run_of(pair, tmp_path / name, servers, max_steps=6, save_steps=0)))
            for task in trouble.tasks:
                task.result()
        return weights_of(tmp_path / name)

    expected = weights("without", Trouble(pair, {}))
    seen.clear()
    begun, trouble = time.monotonic(), Trouble(pair, FAULTS)
    assert equal(weights("faults", trouble), expected)
    counts = {name: sum(text in message for message in seen) for name, text in SEEN.items()}
    print(trouble.made, counts, len(seen), time.monotonic() - begun)
    assert trouble.made == FAULTS and sum(FAULTS.values()) == 30
    assert [name for name, count in counts.items() if 2 * count < FAULTS[name]] == []
    came_back = [proxy.given > before for proxy, before in trouble.restarted]
    assert len(came_back) == 3 and sum(came_back) >= 2  # the run may end before the last one is up
    assert not equal(weights("believed", Trouble(pair, {"believed": 9})), expected)
