"""The weights that a request gets, and who waits for whom, in the routes of a server of rollouts: with an engine that
only pretends to sample.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest
import torch
from tiny import directory_of, loaded, policy_of, random_prompts

from rollout import SamplingConfig
from rollout.sampling import NotFiniteLogprobError, Request
from rollout.wire import Asked, pack_requests, pack_weights
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.policies.make import fingerprint

LENGTH = 4


class Engine:
    """Stands in for vLLM's AsyncLLM. `outcomes` are (finish_reason, stop_reason) of the next requests."""

    def __init__(self, folder: Path, policy: str | None = None) -> None:
        from rollout.vllm.compat.arguments import KEY

        settings = {KEY: {"policy": policy, "contexts": None, "max_prompt": None}} if policy else {}
        self.vllm_config = SimpleNamespace(
            additional_config={KEY: {"exact": True, "folds": False}},
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=settings),
            cache_config=SimpleNamespace(block_size=32, num_gpu_blocks=9),
            model_config=SimpleNamespace(model=str(folder), dtype=torch.float32, max_model_len=64),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
        )
        self.outcomes: list[tuple[str, Any]] = []
        self.version, self.paused, self.log = 0, False, list[str]()
        self.running: dict[str, int] = {}  # request id -> version at its begin
        self.done: dict[int, list[int]] = {}
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.breaks = False  # while it loads weights

    async def add_request(self, request_id: str, prompt: Any, parameters: Any) -> Any:
        assert request_id not in self.running and int(request_id) not in self.done
        self.log.append(f"begin {request_id}")
        if int(request_id) < 0:  # a holder, which ends by itself
            self.done[int(request_id)] = [self.version, self.version]
        else:
            self.running[request_id] = self.version
        await asyncio.sleep(0)

        async def get() -> Any:
            await self.go_on.wait()
            finish_reason, stop_reason = self.outcomes.pop(0) if self.outcomes else ("length", None)
            self.done[int(request_id)] = [self.running.pop(request_id), self.version]
            tokens = list(range(parameters.max_tokens))
            return SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=tokens, finish_reason=finish_reason, stop_reason=stop_reason)]
            )

        return SimpleNamespace(get=get)

    async def abort(self, request_ids: list[str]) -> None:
        for i in request_ids:
            self.running.pop(i, None)

    async def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        await asyncio.sleep(0)
        if method == "serve_weights":
            assert self.paused and not self.running
            if self.breaks:
                raise MemoryError
            self.version = args[1]
            return [None]
        if method == "scorer_digests":
            return [{}]
        assert method == "take_rollouts"
        lengths, forgotten = args
        results = []
        for place, length in lengths.items():
            logprobs = np.full((length - LENGTH, 2), -1.0, np.float32).tobytes()
            result = {"evict_at": None, "logprobs": logprobs, "routed": None, "supports": {}}
            results.append({**result, "versions": self.done.pop(place)})
        for place in forgotten:
            self.done.pop(place, None)
        return [(results, len(self.done))]

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("wait", True)  # the default is to abort, and to answer with what there is
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False


@pytest.fixture
def served() -> Callable:
    """served(test, policy=None) runs the coroutine test(server, engine). policy : fingerprint; None is a full cache"""
    pytest.importorskip("vllm")
    from rollout.vllm import routes

    def run(test: Callable, policy: str | None = None) -> None:
        async def whole() -> None:
            engine = Engine(directory_of("qwen2"), policy)
            server = routes.RolloutServer(engine)
            await test(server, engine)
            for _ in range(9):
                await asyncio.sleep(0)
            assert not engine.running and not engine.done  # the workers keep nothing
            assert sorted(server.free) == list(range(server.places))
            about = await server.tell()
            assert (about.version, about.running, about.waiting, about.recorded) == (engine.version, 0, 0, 0)

        asyncio.run(whole())

    return run


def asked(version: int, count: int = 2, tokens: int = 3) -> Asked:
    requests = [Request(i, prompt, tokens, i) for i, prompt in enumerate(random_prompts([LENGTH] * count))]
    return Asked(requests, SamplingConfig(tokens), [], version)


def test_an_update_waits_for_what_runs_and_requests_for_their_version(served: Callable, tmp_path: Path) -> None:
    """So each sequence has one version. Control: what was admitted before the update has the version before it."""
    weights = tmp_path / "weights"
    weights.write_bytes(pack_weights(loaded(directory_of("qwen2")).named_parameters()))

    async def test(server: Any, engine: Engine) -> None:
        engine.go_on.clear()
        old = asyncio.create_task(server.sample(asked(0)))
        await asyncio.sleep(0.01)
        update = asyncio.create_task(server.load(str(weights), 1))
        while not server.updating:
            await asyncio.sleep(0.01)
        new = [asyncio.create_task(server.sample(asked(version))) for version in (1, 1, 0)]
        await asyncio.sleep(0.01)
        assert len(engine.running) == 2 and engine.version == 0
        engine.go_on.set()
        answers = await asyncio.gather(old, update, *new, return_exceptions=True)
        assert [one.versions for one in answers[0]] == [(0, 0)] * 2
        assert [one.versions for one in answers[2] + answers[3]] == [(1, 1)] * 4
        assert "version 0 of the weights was asked for, but the server has 1" in str(answers[4])

    served(test)


def test_a_version_that_does_not_come_is_refused(served: Callable) -> None:
    from rollout.vllm.routes import StaleError

    async def test(server: Any, engine: Engine) -> None:
        wrong = "version 3 of the weights was asked for, but the server has 0"
        with mock.patch("rollout.vllm.routes.PATIENCE", 0.01), pytest.raises(StaleError, match=wrong):
            await server.sample(asked(3))
        assert not engine.log
        await server.sample(asked(0))  # control

    served(test)


def test_wrong_weights_change_nothing(served: Callable, tmp_path: Path) -> None:
    """A name, a shape, a dtype, a missing weight, or a damaged file. Control: the right ones."""
    weights = dict(loaded(directory_of("qwen2")).named_parameters())
    first, *_ = weights
    wrong = {
        "its model has no 'other'": {**weights, "other": torch.zeros(1)},
        "must have shape": {**weights, first: torch.zeros(1)},
        "dtype I64": {**weights, first: weights[first].long()},
        "were not handed over": {name: weight for name, weight in weights.items() if name != first},
    }
    bodies = {says: pack_weights(some.items()) for says, some in wrong.items()}
    right = pack_weights(weights.items())
    bodies["not a safetensors file"] = right[:-1]

    async def test(server: Any, engine: Engine) -> None:
        for says, body in bodies.items():
            (tmp_path / "weights").write_bytes(body)
            with pytest.raises(UserError, match=says):
                await server.load(str(tmp_path / "weights"), 1)
            assert engine.version == server.version == 0
        (tmp_path / "weights").write_bytes(right)
        engine.breaks = True
        with pytest.raises(MemoryError):
            await server.load(str(tmp_path / "weights"), 1)
        assert engine.paused and server.version == -1  # weights that are not whole serve nobody
        engine.breaks = False
        await server.load(str(tmp_path / "weights"), 1)
        assert not engine.paused
        assert engine.version == server.version == 1
        assert max(map(len, bodies.values())) <= server.most_bytes

    served(test)


def test_a_preempted_sequence_is_sampled_again(served: Callable) -> None:
    """At most three times. The others of its request are sampled once."""
    from rollout.vllm.scheduler import PREEMPTED

    async def test(server: Any, engine: Engine) -> None:
        engine.outcomes = [("length", None), ("error", PREEMPTED), ("length", None), ("error", PREEMPTED)]
        answers = await server.sample(asked(0, 3))
        assert len(answers) == 3 and len(engine.log) == 5
        engine.outcomes = [("error", PREEMPTED)] * 3
        with pytest.raises(StoppedError, match="1 sequences were preempted 3 times"):
            await server.sample(asked(0, 1))

    served(test)


@pytest.mark.parametrize(
    ("outcome", "error", "says"),
    [
        (("error", "not finite"), NotFiniteLogprobError, "prompt 1, sample 0: .* token 3 "),
        (("abort", None), StoppedError, "sequence 1 ended by 'abort'"),
    ],
)
def test_an_unfinished_sequence_is_never_handed_out(
    outcome: tuple, error: type[Exception], says: str, served: Callable
) -> None:
    async def test(server: Any, engine: Engine) -> None:
        engine.outcomes = [("length", None), outcome]
        with pytest.raises(error, match=says):
            await server.sample(asked(0, 3))

    served(test)


def test_a_client_that_leaves_takes_its_sequences_along(served: Callable) -> None:
    """At any time, and the holder of its prompt, too. Others get theirs."""

    async def test(server: Any, engine: Engine) -> None:
        for steps in range(12):
            engine.go_on.clear()
            same = Asked([replace(r, prompt=[5, 6, 7, 8]) for r in asked(0).requests], SamplingConfig(3), [], 0)
            leaving, staying = (asyncio.create_task(server.sample(same)) for _ in range(2))
            for _ in range(steps):
                await asyncio.sleep(0)
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
            engine.go_on.set()
            assert len(await staying) == 2

    served(test, fingerprint(policy_of("gkv", budget=32, window=8, period=8)))


def test_the_prompt_of_several_samples_is_given_once_and_after_them(served: Callable) -> None:
    """Its holder would not wait for samples that come later. Controls: single samples, and a full cache."""

    async def test(server: Any, engine: Engine) -> None:
        one, other, third = random_prompts([LENGTH] * 3)
        prompts = [one, other, one, third, other, one]
        requests = [Request(i, prompt, 3, i) for i, prompt in enumerate(prompts)]
        answers = await server.sample(Asked(requests, SamplingConfig(3), [], 0))
        assert [answer.rollout.prompt_ids for answer in answers] == prompts
        begun = [int(line.split()[1]) for line in engine.log]
        if engine.vllm_config.kv_transfer_config.kv_connector_extra_config:
            group, pair = begun[:3], begun[4:6]
            assert begun == [*group, -1 - group[0], *pair, -1 - pair[0], begun[7]]
        else:
            assert min(begun) == 0 and len(begun) == 6

    served(test, fingerprint(policy_of("gkv", budget=32, window=8, period=8)))
    served(test)


def test_a_request_that_does_not_fit_is_refused(served: Callable) -> None:
    async def test(server: Any, engine: Engine) -> None:
        with pytest.raises(UserError, match="more than max_model_len 64"):
            await server.sample(asked(0, tokens=61))
        wrong = Request(0, [1, 999], 3)
        with pytest.raises(UserError, match="prompt 0 has token 999"):
            await server.sample(Asked([wrong], SamplingConfig(3), [], 0))
        await server.sample(asked(0, tokens=60))  # control

    served(test)


def test_a_request_counts_until_its_answer_is_sent_or_its_client_has_left() -> None:
    """The client would not believe a server that has nothing to do. It reads slowly here, or leaves."""
    pytest.importorskip("vllm")
    from fastapi import FastAPI

    from rollout.vllm.routes import attach

    engine, body = Engine(directory_of("qwen2")), pack_requests(asked(0).requests, SamplingConfig(3), [], 0)
    attach(app := FastAPI(), engine)

    async def requests() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            return int((await http.get("/rollouts")).json()["requests"])

    async def test(leaves: bool) -> None:
        sent, reads, left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        parts = iter([{"type": "http.request", "body": body}])

        async def receive() -> dict[str, Any]:
            if (part := next(parts, None)) is None:
                await left.wait()
            return part or {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.set()
            await reads.wait()

        headers = [(b"host", b"server")]
        scope = {"type": "http", "method": "POST", "path": "/rollouts", "query_string": b"", "headers": headers}
        if leaves:
            engine.go_on.clear()
        task = asyncio.create_task(app(scope, receive, send))
        if not leaves:
            await sent.wait()
        await asyncio.sleep(0.05)
        assert await requests() == 1 and not task.done()
        (left if leaves else reads).set()
        reads.set()
        await task
        assert await requests() == 0
        engine.go_on.set()

    for leaves in (False, True):
        asyncio.run(asyncio.wait_for(test(leaves), 20))


def test_a_server_says_for_how_long_its_workers_have_been_silent(served: Callable) -> None:
    """Controls: workers that answer; a server that samples nothing asks them nothing."""

    async def test(server: Any, engine: Engine) -> None:
        call, silent = engine.collective_rpc, asyncio.Event()

        async def answer(method: str, args: tuple = ()) -> list[Any]:
            if silent.is_set():
                await asyncio.sleep(0.3)
            return await call(method, args)

        engine.collective_rpc = answer  # type: ignore[method-assign]
        engine.go_on.clear()
        task = asyncio.create_task(server.sample(asked(0)))
        while not engine.running:
            await asyncio.sleep(0.01)
        for most in (0.0, 9.0):
            await server.tell()
            await asyncio.sleep(0.05)
            assert most / 180 <= (await server.tell()).silent <= most
            await asyncio.sleep(0.05)
            silent.set()
        silent.clear()
        engine.go_on.set()
        await task
        await asyncio.sleep(0.4)
        assert (await server.tell()).silent == 0.0 and server.pinged is None

    served(test)


def test_a_client_that_leaves_while_it_sends_fills_no_log() -> None:
    """Control: an error."""
    pytest.importorskip("vllm")
    from starlette.requests import ClientDisconnect

    from rollout.vllm.compat.server import _is_news

    for error in (ClientDisconnect(), ValueError()):
        raised = (type(error), error, None)
        record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "Exception", None, raised)
        assert _is_news(record) == isinstance(error, ValueError)


def test_weights_come_in_a_body_or_in_the_file_of_a_client_on_this_machine(tmp_path: Path) -> None:
    """In another container, the path of the client's file is that of another one, of any kind: its version tells."""
    pytest.importorskip("vllm")
    from fastapi import FastAPI

    from rollout.vllm.routes import attach

    engine, weights = Engine(directory_of("qwen2")), loaded(directory_of("qwen2")).named_parameters()
    attach(app := FastAPI(), engine)
    (tmp_path / "weights").write_bytes(body := pack_weights(weights, 7))
    (tmp_path / "damaged").write_bytes(body[:9])
    (tmp_path / "none").touch()
    os.mkfifo(tmp_path / "pipe")

    async def give(host: str, version: int, file: str | int = "", body: bytes = b"") -> int:
        transport = httpx.ASGITransport(app, client=(host, 1))
        query = {"version": version, "file": file if isinstance(file, str) else f"/proc/{os.getpid()}/fd/{file}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            answer = (await http.post("/rollouts/weights", params=query, content=body)).json()["version"]
        assert answer == engine.version
        return int(answer)

    async def test() -> None:
        right, *others = (os.open(tmp_path / name, os.O_RDWR) for name in ("weights", "damaged", "none", "pipe"))
        for host, version, file in (
            *(("127.0.0.1", 7, other) for other in [*others, 10**6, str(tmp_path / "weights")]),
            *(("127.0.0.1", 8, right), ("10.0.0.7", 7, right)),
        ):
            assert await give(host, version, file) == 0
        assert await give("127.0.0.1", 7, right) == 7
        assert await give("10.0.0.7", 9, body=body) == 9
        for file in (right, *others):
            os.close(file)

    asyncio.run(test())
