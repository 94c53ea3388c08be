"""The client of servers of rollouts: its results are those of one engine, whatever servers and connections do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standin import StandIn, serving

from rollout import Rollout, SamplingConfig, make_engine
from rollout import servers as client
from rollout.config import KEY
from rollout.hf import HFEngine
from rollout.servers import ServerEngine
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.policies import make_policy

GKV = {"policy": "gkv", "budget": 6, "window": 3, "period": 2}
STREAMING = {"policy": "streaming", "sinks": 1, "budget": 6, "period": 2}
PROMPTS = [[3, 9, 4], [5, 8, 7, 6, 11, 12, 13], [2, 10, 14, 15, 16]]
SAMPLING = SamplingConfig(8, n=2, seed=5, ignore_eos=True)
FAULTS = ["reset", "cut", "damaged", "500", "409", "abort", "shape", "version", "lost"]


@pytest.fixture(scope="module")
def model(new_model, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("served")
    new_model("qwen3").save_pretrained(folder)
    return str(folder)


def bits(rollouts: list[Rollout]) -> list[Any]:
    """Return all that an engine has recorded."""
    return [
        (r.completion_ids, r.logprobs, r.model_logprobs, r.finish_reason, r.trace.evict_at.tolist()) for r in rollouts
    ]


@contextmanager
def asking(model: str, *servers: StandIn, policy: Any = GKV, **options: Any) -> Iterator[ServerEngine]:
    options = {"beat": 0.1, "patience": 20, **options}
    make = partial(make_engine, "server", model=model, policy=policy, **options)
    with serving(*servers) as urls, closing(make(servers=urls)) as engine:
        yield engine


def changed(model: str) -> dict[str, torch.Tensor]:
    """Return other weights for a model."""
    return {name: weight * 1.5 for name, weight in HFEngine(model, make_policy("full")).model.named_parameters()}


@pytest.mark.parametrize("policy", [GKV, STREAMING, {"policy": "full"}], ids=lambda p: p["policy"])
def test_servers_give_what_one_engine_gives(model, policy):
    hf = make_engine("hf", model=model, policy=policy)
    wanted = hf.generate(PROMPTS, SAMPLING)
    one, other = StandIn(model, policy, max_batch=4), StandIn(model, policy, max_batch=4)
    with asking(model, one, other, policy=policy) as engine:
        assert engine.max_batch == 8
        assert bits(engine.generate(PROMPTS, SAMPLING)) == bits(wanted)
        assert min(one.asked, other.asked) > 0
        given = [r.prompt_ids for r in wanted], [r.completion_ids for r in wanted]
        assert bits(engine.simulate(*given)) == bits(hf.simulate(*given))
        assert bits(engine.generate(PROMPTS, SamplingConfig(8, n=2, seed=6, ignore_eos=True))) != bits(wanted)
        assert engine.generate([], SAMPLING) == []


def test_faults_do_not_change_rollouts(model, monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.001)
    wanted = bits(make_engine("hf", model=model, policy=GKV).generate(PROMPTS, SAMPLING))
    one, other = StandIn(model, GKV, faults=FAULTS), StandIn(model, GKV, faults=["slow", *reversed(FAULTS)])
    with asking(model, one, other) as engine:
        while one.faults or other.faults:
            assert bits(engine.generate(PROMPTS, SAMPLING)) == wanted


def test_a_run_stops_if_every_server_keeps_failing(model):
    """The message shows that each of these faults is noticed, and by its own check."""
    server = StandIn(model, GKV)
    whys = {"reset": "disconnected", "damaged": "not an answer with rollouts", "500": "status 500: a fault"}
    whys |= {"abort": "'abort'", "shape": "evict_at of shape", "version": "not 0"}
    with asking(model, server, patience=0.2) as engine:
        for fault, why in whys.items():
            server.faults = [fault] * 1000
            with pytest.raises(StoppedError, match=why) as stopped:
                engine.generate(PROMPTS[:1], SAMPLING)
            assert server.url in str(stopped.value)
            assert "rollout.patience" in str(stopped.value)
        server.faults = []
        assert engine.generate(PROMPTS[:1], SAMPLING)


def test_a_slow_server_is_not_a_failing_one(model):
    with asking(model, StandIn(model, GKV, faults=["slow"] * 3), patience=0.2) as engine:
        assert len(engine.generate(PROMPTS, SAMPLING)) == 6


def test_a_server_whose_engine_is_silent_ends_the_run(model):
    """The server itself answers. Control: for half of the patience, it may be silent."""
    server = StandIn(model, GKV)
    with asking(model, server, patience=1) as engine:
        for silent in (0.4, 0.6):
            server.about["silent"] = silent
            with server.lock:
                batch = engine.begin(PROMPTS, SAMPLING)
                wait([batch.future], 1.5 if silent < 0.5 else 10)
                assert batch.future.done() == (silent > 0.5)
            if silent < 0.5:
                assert engine.finish(batch)
        with pytest.raises(StoppedError, match=r"hangs: its engine has not answered for 1 seconds"):
            engine.finish(batch)


def test_a_server_that_comes_back_is_given_the_weights(model):
    weights = changed(model)
    hf = make_engine("hf", model=model, policy=GKV)
    before = bits(hf.generate(PROMPTS, SAMPLING))
    hf.load_weights(weights.items())
    wanted = bits(hf.generate(PROMPTS, SAMPLING))
    assert wanted != before
    first = StandIn(model, GKV)
    port = first.server_address[1]
    with ExitStack() as stack:
        with serving(first) as urls:
            engine = stack.enter_context(closing(ServerEngine(model, make_policy(GKV), servers=urls, patience=20)))
            engine.load_weights(weights.items())
            assert bits(engine.generate(PROMPTS, SAMPLING)) == wanted
            engine.load_weights(weights.items())
            assert (first.pushes, first.about["version"]) == (2, engine.version)
        batch = engine.begin(PROMPTS, SAMPLING)
        time.sleep(0.1)
        again = StandIn(model, GKV, port=port)
        stack.enter_context(serving(again))
        assert again.about["version"] == 0
        assert bits(engine.finish(batch)) == wanted
        assert (again.pushes, again.about["version"]) == (1, engine.version)


def test_weights_that_come_while_a_server_is_given_the_ones_before_are_given_too(model):
    """It has come back, and is slow to take them. Control: the weights differ."""
    new, quick, slow = changed(model), StandIn(model, GKV), StandIn(model, GKV)
    with asking(model, quick, slow, beat=5) as engine:
        engine.load_weights((name, weight * 2) for name, weight in new.items())
        back = engine.servers[1]
        with slow.lock:
            slow.about["version"] = 0
            engine.loop.call_soon_threadsafe(engine._fail, back, client.Fault("restarted"))
            until = time.monotonic() + 10
            while not slow.requests and time.monotonic() < until:
                time.sleep(0.01)
            before = {name: weight.clone() for name, weight in slow.engine.model.named_parameters()}
            giving = threading.Thread(target=engine.load_weights, args=(new.items(),))
            giving.start()
            time.sleep(0.3)
        giving.join(20)
        assert slow.about["version"] == quick.about["version"] == engine.version
        assert back.near
        now = dict(slow.engine.model.named_parameters())
        assert all(torch.equal(now[name], weight) for name, weight in new.items())
        assert not any(torch.equal(now[name], weight) for name, weight in before.items())


def test_a_batch_is_under_way_while_the_caller_goes_on(model):
    with asking(model, StandIn(model, GKV, faults=["slow"] * 2)) as engine:
        batch = engine.begin(PROMPTS, SAMPLING)
        assert len(batch.done) < 6
        with pytest.raises(RuntimeError, match="under way"):
            engine.begin(PROMPTS, SAMPLING)
        with pytest.raises(RuntimeError, match="under way"):
            engine.load_weights([])
        rollouts = engine.finish(batch)
        assert [batch.done[i] for i in range(6)] == rollouts
        assert bits(engine.generate(PROMPTS, SAMPLING)) == bits(rollouts)


def test_requests_wait_at_a_server_so_that_it_is_always_full(model):
    """A chunk ends with its longest sequence, so one chunk alone would leave places empty."""
    server = StandIn(model, GKV, max_batch=2 * client.CHUNK)
    with asking(model, server) as engine:
        with server.lock:
            batch = engine.begin(PROMPTS, SamplingConfig(8, n=16, seed=5))
            until = time.monotonic() + 10
            while server.requests < 4 and time.monotonic() < until:
                time.sleep(0.01)
            assert server.requests == 4
        assert len(engine.finish(batch)) == 48


def test_other_servers_are_refused_by_what_differs(model, new_model, tmp_path, monkeypatch):
    server = StandIn(model, GKV)
    new_model("llama").save_pretrained(tmp_path / "llama")
    new_model("qwen3", seed=1).save_pretrained(tmp_path / "qwen3")
    with serving(server) as (url,):
        open_engine: Callable[..., Any] = partial(make_engine, "server", servers=[url], patience=5)
        with pytest.raises(UserError, match=r'has policy .*"budget": 6.*this run needs .*"budget": 7'):
            open_engine(model=model, policy={**GKV, "budget": 7})
        with pytest.raises(UserError, match="has dtype float32, but this run needs bfloat16"):
            open_engine(model=model, policy=GKV, dtype="bfloat16")
        with pytest.raises(UserError, match=r"has model qwen3-.* but this run needs llama-"):
            open_engine(model=tmp_path / "llama", policy=GKV)
        with pytest.raises(UserError, match=r"has weights .* but this run needs"):
            open_engine(model=tmp_path / "qwen3", policy=GKV)
        with closing(open_engine(model=model, policy=GKV)) as engine:
            for refused in (lambda: engine.converse([], SAMPLING), lambda: engine.logprobs([], [], None)):
                with pytest.raises(UserError, match="use the engine vllm or hf"):
                    refused()
            with pytest.raises(UserError, match=r"prompt 1 has 250 tokens: with max_tokens 8 .* max_model_len 256"):
                engine.generate([[3], [3] * 250], SAMPLING)
        server.about["format"] = 1
        with pytest.raises(UserError, match=r"has format 1, but this run needs 2; .* with the same sparse-rl"):
            open_engine(model=model, policy=GKV)
        server.about |= {"format": 2, "version": 4}
        with closing(open_engine(model=model, policy=GKV)) as engine:
            with pytest.raises(UserError, match="an earlier run has given it"):
                engine.generate(PROMPTS, SAMPLING)
            engine.load_weights(changed(model).items())
            assert server.about["version"] == engine.version > 4
            assert engine.generate(PROMPTS, SAMPLING)
        monkeypatch.setenv(KEY, "one")
        with pytest.raises(UserError, match=r"401.*set VLLM_API_KEY"):
            open_engine(model=model, policy=GKV, key="another")
        server.about["version"] = 0
        with closing(open_engine(model=model, policy=GKV)) as engine:
            assert engine.generate(PROMPTS, SAMPLING)
    with pytest.raises(UserError, match="needs the URL"):
        make_engine("server", model=model, policy=GKV)
    with pytest.raises(StoppedError, match=r"no server of rollouts has worked for 0\.1 seconds"):
        make_engine("server", model=model, policy=GKV, servers=[url], patience=0.1)


def test_of_several_processes_one_gives_the_weights(model, monkeypatch):
    """Two processes, here threads, each with a client of its own, share two servers."""
    values: list[Any] = [None, None]
    meet, own = threading.Barrier(2), threading.local()

    def gather(everyone: list[Any], value: Any) -> None:
        values[own.rank] = value
        meet.wait()
        everyone[:] = values
        meet.wait()

    of_rank = {"get_rank": lambda: own.rank, "get_world_size": lambda: 2, "all_gather_object": gather}
    always = {name: lambda: True for name in ("is_available", "is_initialized")}
    monkeypatch.setattr(client, "distributed", SimpleNamespace(**of_rank, **always))
    one, other = StandIn(model, GKV), StandIn(model, GKV)
    weights, read, results = changed(model), [0, 0], [None, None]
    hf = make_engine("hf", model=model, policy=GKV)
    hf.load_weights(weights.items())

    def work(rank: int, urls: list[str]) -> None:
        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            for item in weights.items():
                read[rank] += 1
                yield item

        own.rank = rank
        with closing(ServerEngine(model, make_policy(GKV), servers=urls[:: 1 - 2 * rank], patience=20)) as engine:
            for _ in range(2):
                engine.load_weights(counted())
                results[rank] = bits(engine.generate(PROMPTS, SAMPLING))

    with serving(one, other) as urls:
        threads = [threading.Thread(target=work, args=(rank, urls)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [bits(hf.generate(PROMPTS, SAMPLING))] * 2
    assert read == [2 * len(weights)] * 2  # under ZeRO-3 all processes gather them
    assert one.pushes == other.pushes == 2
    assert one.about["version"] == other.about["version"] > 0


def test_two_runs_on_one_server_never_have_the_same_version(model):
    """Else the weights of one would be taken for those of the other. Control: the run whose weights it has goes on."""
    server = StandIn(model, GKV)
    with serving(server) as urls, ExitStack() as stack:
        runs = [
            stack.enter_context(closing(ServerEngine(model, make_policy(GKV), servers=urls, patience=0.5)))
            for _ in range(2)
        ]
        for engine in runs:
            engine.load_weights(changed(model).items())
        refused, goes_on = sorted(runs, key=lambda engine: engine.version)
        assert refused.version < goes_on.version == server.about["version"]
        assert goes_on.generate(PROMPTS, SAMPLING)
        with pytest.raises(StoppedError, match="which another run has given it"):
            refused.generate(PROMPTS, SAMPLING)


def test_sequences_that_fail_again_and_again_stop_the_run(model, monkeypatch):
    """Patience would never end, if the server says in between that it works. Control: four failures stop nothing."""
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.001)
    server = StandIn(model, GKV, faults=["500"] * 4)
    with asking(model, server, patience=60) as engine:
        assert engine.generate(PROMPTS[:1], SAMPLING)
        server.faults = ["500"] * 99
        with pytest.raises(StoppedError, match=r"the same sequences have failed 5 times.*status 500"):
            engine.generate(PROMPTS[:1], SAMPLING)


def test_no_process_waits_without_end_for_weights_that_another_gives(model):
    """Control: given by this process, they come."""
    with asking(model, StandIn(model, GKV), patience=0.4) as engine:
        asyncio.run_coroutine_threadsafe(engine._renew(None, 5, set()), engine.loop).result(timeout=20)
        with pytest.raises(StoppedError, match="another process has not given it the weights"):
            engine.generate(PROMPTS, SAMPLING)
        engine.load_weights(changed(model).items())
        assert engine.generate(PROMPTS, SAMPLING)


def test_digests_are_those_in_which_the_servers_agree(model, monkeypatch):
    """A server that does not answer is left out; if none does, they are asked again, as long as patience lasts."""
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)
    one, other = StandIn(model, GKV), StandIn(model, GKV)
    digests = [{"same": ["a", "b"], "differs": ["a"]}, {"same": ["a", "b"], "differs": ["b"], "more": ["c"]}]
    for server, own in zip((one, other), digests, strict=True):
        monkeypatch.setattr(server.engine, "scorer_digests", lambda own=own: own)
    with asking(model, one, other, patience=1) as engine:
        assert engine.scorer_digests() == {"same": ["a", "b"]}
        other.deaf = 1
        assert engine.scorer_digests() == digests[0]
        one.deaf = other.deaf = 3
        assert engine.scorer_digests() == {"same": ["a", "b"]}
        one.deaf = other.deaf = 10**6
        with pytest.raises(StoppedError, match="no server of rollouts has worked for 1 seconds"):
            engine.scorer_digests()
        one.deaf = other.deaf = 0


def test_weights_stay_in_memory_if_a_server_can_read_them_there(model):
    """Else their bytes are sent, and the server is asked only once. Both have the weights of the engine in process."""
    near, far = StandIn(model, GKV), StandIn(model, GKV)
    far.near = False
    hf = make_engine("hf", model=model, policy=GKV)
    with asking(model, near, far) as engine:
        for factor in (1.5, 0.5):
            weights = {name: factor * weight for name, weight in changed(model).items()}
            engine.load_weights(weights.items())
            hf.load_weights(weights.items())
            assert bits(engine.generate(PROMPTS, SAMPLING)) == bits(hf.generate(PROMPTS, SAMPLING))
            assert [server.near for server in engine.servers] == [True, False]
        assert min(near.asked, far.asked) > 0
        assert (near.pushes, near.bodies, far.pushes, far.bodies) == (2, 0, 2, 2)
