"""A server of rollouts hands out the rollouts of the engine in process, to the bit, also beside other requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from learned import learned_policy, save_learned, with_scorers
from serving import Server, run, running, served_directory
from tiny import HEADS_OF_32, new_model, policy_of, random_prompts

from rollout import Rollout, SamplingConfig, make_engine
from rollout.sampling import Request, requests_to_sample, requests_to_simulate, stop_tokens
from rollout.wire import About, pack_requests, pack_weights, unpack_rollouts
from sparse_rl.data.synthetic import EOS_ID, RunningSum
from sparse_rl.errors import UserError
from sparse_rl.models.directory import save_policy, saved_policy
from sparse_rl.models.load import load_config, load_generation_config, load_model
from sparse_rl.policies import make_policy
from sparse_rl.policies.make import fingerprint

PROMPTS = random_prompts((5, 17, 33, 64, 81, 130))
SAMPLINGS = (
    SamplingConfig(60, n=2, seed=1, temperature=0.9),
    SamplingConfig(40, seed=2, top_p=0.8, record_support=True),
    SamplingConfig(30, temperature=0, ignore_eos=True),
)
OPTIONS: dict[str, Any] = {"kv_cache_gb": 0.03, "max_batch": 16, "max_model_len": 1024}
WORDS = ("--rollouts", "--kv-cache-gb", "0.03", "--max-batch", "16", "--max-model-len", "1024")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "--data-parallel-size", "2"], "--data-parallel-size cannot be chosen"),
        (["--", "--api-server-count", "2"], "--api-server-count cannot be chosen"),
        (["--", "--rollouts"], "--rollouts must be given before --"),
        (["--host", "0.0.0.0"], "they need a key; set the environment variable VLLM_API_KEY"),
    ],
)
def test_what_would_lose_records_or_open_the_weights_is_refused(
    words: list[str], says: str, tmp_path: Path, started: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without rollouts, the server may be open to others."""
    from rollout.vllm.compat.server import read_arguments

    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    folder = served_directory(tmp_path)
    for more in ((["--rollouts"]), []):
        run(folder, *more, *words)
        command = started.pop()
        parts = command[command.index("--model") :]
        split = parts.index("--")
        if more:
            with pytest.raises(UserError, match=says):
                read_arguments(parts[:split], parts[split + 1 :])
        elif "--host" in words:
            assert read_arguments(parts[:split], parts[split + 1 :]).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("hf_overrides", '{"vocab_size": 64}'),
        ("load_format", "dummy"),
        ("logits_processors", "a.module:Processor"),
        ("revision", "main"),
        ("hf_config_path", "another"),
    ],
)
def test_flags_that_would_change_the_model_or_its_draws_are_refused(
    flag: str, value: str, tmp_path: Path, started: list
) -> None:
    """Control: they are accepted without rollouts."""
    from rollout.vllm.compat.server import read_arguments

    folder, words = served_directory(tmp_path), [f"--{flag.replace('_', '-')}", value]
    for more in ((), ("--rollouts",)):
        run(folder, *more, "--", *words)
        command = started.pop()
        parts = command[command.index("--model") : command.index("--")]
        if more:
            with pytest.raises(UserError, match=f"{words[0]} cannot be chosen"):
                read_arguments(parts, words)
        else:
            assert getattr(read_arguments(parts, words), flag)


def changed(model: Any, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {n: w + 0.02 * torch.randn(w.shape, generator=generator) for n, w in model.named_parameters()}


@pytest.fixture(scope="module", params=["full", "streaming", "h2o", "gkv", "am", "kvpop", "experts"])
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[Any, list[Rollout]]]]:
    """A server, and the rollouts of the engine in process, by version of the weights and settings."""
    name, folder = request.param, tmp_path_factory.mktemp("trained")
    family = "qwen3_moe" if name == "experts" else "qwen3"
    model = new_model(family, **HEADS_OF_32, eos_token_id=EOS_ID)
    if name == "kvpop":
        policy = learned_policy("delayed", 48)
        save_learned(with_scorers(model, policy, 0, scale=0.2), policy, folder)
    else:
        model.save_pretrained(folder)
        if name != "full":  # that of a model without a policy
            sizes = {"budget": 48, "window": 8, "period": 16, "sinks": 2, "reference_queries": 32}
            save_policy(folder, policy_of("gkv" if name == "experts" else name, **sizes))
    RunningSum.tokenizer().save_pretrained(folder)
    engine, expected = make_engine("vllm", model=folder, **OPTIONS), {}
    try:
        for version in (0, 1):
            if version:
                engine.load_weights(changed(load_model(folder), version).items())
            for sampling in SAMPLINGS:
                expected[version, sampling.max_tokens] = engine.generate(PROMPTS, sampling)
            completions = [r.completion_ids for r in expected[version, 60][::2]]
            expected[version, "given"] = engine.simulate(PROMPTS, completions, 0.7)
    finally:
        engine.close()
    with running(folder, tmp_path_factory.mktemp("server"), *WORDS) as server:
        yield server, expected


class Client:
    def __init__(self, server: Server) -> None:
        self.http = httpx.Client(base_url=server.url, timeout=300)
        self.config, self.generation_config = load_config(server.model), load_generation_config(server.model)

    def about(self) -> About:
        return About.of(self.http.get("/rollouts").json())

    def ask(self, requests: list[Request], sampling: SamplingConfig, version: int, chunk: int) -> list[Rollout]:
        """Return rollouts, asked for in chunks at the same time."""
        about, answers = self.about(), dict[int, Rollout]()
        stop = stop_tokens(sampling, self.generation_config, self.config)

        def one(part: list[Request]) -> None:
            reply = self.http.post("/rollouts", content=pack_requests(part, sampling, stop, version))
            assert reply.status_code == 200, reply.text
            for request, answer in zip(
                part, unpack_rollouts(reply.content, part, (about.layers, about.kv_heads), 64), strict=True
            ):
                assert answer.versions == (version, version)
                answers[request.place] = answer.rollout

        threads = [
            threading.Thread(target=one, args=(requests[i : i + chunk],)) for i in range(0, len(requests), chunk)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [answers[request.place] for request in requests]


def differences(ours: list[Rollout], theirs: list[Rollout]) -> int:
    """Return the number of rollouts that differ in any bit."""
    count = 0
    for a, b in zip(ours, theirs, strict=True):
        (x, y), (m, n) = (vars(r).copy() for r in (a, b)), (r.trace.sections for r in (a, b))
        del x["trace"], y["trace"]
        count += x != y or m.keys() != n.keys() or not all(torch.equal(m[name], n[name]) for name in m)
    return count


@pytest.mark.slow
def test_a_server_gives_the_rollouts_of_the_engine(served: tuple[Server, dict[Any, list[Rollout]]]) -> None:
    """In chunks of 1 and of 64, before and after an update of the weights, with several settings at a time, beside
    another client's requests, and after clients that have left. Controls: other seeds; the weights before; an update.
    """
    (server, expected), size = served, 64
    client = Client(server)
    policy = saved_policy(server.model) or make_policy("full")
    assert client.about().policy == fingerprint(policy)

    def requests(sampling: SamplingConfig) -> list[Request]:
        return requests_to_sample(PROMPTS, sampling, client.config.vocab_size)

    def compare(version: int, chunk: int) -> None:
        results: dict[int, list[Rollout]] = {}

        def one(sampling: SamplingConfig) -> None:
            results[sampling.max_tokens] = client.ask(requests(sampling), sampling, version, chunk)

        threads = [threading.Thread(target=one, args=(sampling,)) for sampling in SAMPLINGS]
        for thread in threads:
            thread.start()
        server.complete([5, 6, 7] * 20, 30, temperature=1.0)
        server.complete([8] * 9, 30, temperature=0.8, seed=3, n=2)
        for thread in threads:
            thread.join()
        for tokens, rollouts in results.items():
            assert not differences(rollouts, expected[version, tokens]), (version, chunk, tokens)
        completions = [r.completion_ids for r in expected[version, 60][::2]]
        given, sampling = requests_to_simulate(PROMPTS, completions, 0.7, client.config.vocab_size)
        assert not differences(client.ask(given, sampling, version, chunk), expected[version, "given"])

    compare(0, 1)
    body = pack_weights(changed(load_model(server.model), 1).items())
    assert client.http.post("/rollouts/weights?version=1", content=body).json() == {"version": 1}
    compare(1, size)
    stale = client.http.post("/rollouts", content=pack_requests(requests(SAMPLINGS[0]), SAMPLINGS[0], [], 0))
    assert stale.status_code == 409
    assert client.http.post("/rollouts", content=b"no").status_code == 400
    assert client.http.post("/rollouts/weights?version=2", content=body[:-1]).status_code == 400
    long = SamplingConfig(800, n=3, seed=1, ignore_eos=True)
    for _ in range(2):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{server.url}/rollouts", content=pack_requests(requests(long), long, [], 1), timeout=2)
    until = time.monotonic() + 100
    while (about := client.about()).running or about.recorded:
        assert time.monotonic() < until, asdict(about)
        time.sleep(0.2)
    server.idle()
    other = SamplingConfig(60, n=2, seed=9, temperature=0.9)
    assert differences(client.ask(requests(other), other, 1, size), expected[1, 60]) == 12  # control
    assert differences(expected[0, 60], expected[1, 60]) > 9  # control
    assert not differences(client.ask(requests(SAMPLINGS[0]), SAMPLINGS[0], 1, 5), expected[1, 60])
    cached = "prefix_cache_hits_total" if policy.name == "full" else "external_prefix_cache_hits_total"
    before = server.metrics()[cached]
    assert not differences(client.ask(requests(SAMPLINGS[0]), SAMPLINGS[0], 1, size), expected[1, 60])
    copied = server.metrics()[cached] - before  # each prompt is prefilled once, except for its last token
    assert copied == 2 * sum(len(prompt) - 1 for prompt in PROMPTS) or (policy.name == "full" and copied > 0)


@pytest.mark.slow
def test_a_server_with_one_entry_more_is_refused(served: tuple[Server, dict[Any, list[Rollout]]]) -> None:
    """Control: with the check off, the traces are not those that the client's policy gives."""
    (server, expected), policy = served, saved_policy(served[0].model)
    if policy is None:
        pytest.skip("a full cache has no budget")
    fewer = make_policy({**policy.config.as_block(), "budget": 47})
    options: dict[str, Any] = {"model": server.model, "servers": [server.url], "patience": 20}
    with pytest.raises(UserError, match=r'has policy .*"budget": 48.* this run needs .*"budget": 47'):
        make_engine("server", policy=fewer, **options)
    weights = changed(load_model(server.model), 1)
    with closing(make_engine("server", policy=policy, **options)) as engine:
        engine.load_weights(weights.items())
        assert engine.servers[0].near  # by their file
        assert not differences(engine.generate(PROMPTS, SAMPLINGS[0]), expected[1, 60])
        engine.ours["policy"] = ""
        unchecked = engine.generate(PROMPTS, SAMPLINGS[0])
    here = make_engine("hf", model=server.model, policy=fewer)
    here.load_weights(weights.items())
    given = [r.prompt_ids for r in unchecked], [r.completion_ids for r in unchecked]
    pairs = list(zip(unchecked, here.simulate(*given, temperature=0.9), strict=True))
    evicted = [pair for pair in pairs if len(pair[0].trace) > 90]
    assert len(evicted) >= 4
    assert not any(torch.equal(a.trace.evict_at, b.trace.evict_at) for a, b in evicted)
