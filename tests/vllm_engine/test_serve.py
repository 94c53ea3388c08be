"""`sparse-rl serve` returns the engine's tokens, uses few blocks, survives hostile requests and stops cleanly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learned import learned_policy, with_scorers
from openai import OpenAIError
from serving import START, Server, free_port, run, running, served_directory
from tiny import new_model, random_prompts

from rollout import SamplingConfig, make_engine
from rollout.vllm import serve
from sparse_rl.attention.families import FAMILIES
from sparse_rl.models.directory import save_policy, write_scorers
from sparse_rl.models.load import load_plain_model
from sparse_rl.policies import make_policy
from sparse_rl.temporary import FOLDER

POLICY = {"policy": "gkv", "budget": 48, "window": 8, "period": 16}
PEAK, BLOCK = 64, 32
COPIES = ("garbled", "bare", "broken", "small-heads")  # directories of changed models
POOL_GB = 0.005  # 160 blocks


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model directory as training leaves it, with its tokenizer and its policy."""
    folder = served_directory(tmp_path_factory.mktemp("trained"))
    save_policy(folder, make_policy(POLICY))
    return folder


# ---- before anything is loaded --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["./nowhere"], "./nowhere is neither a model directory nor a hub name"),
        (["empty"], "empty is not a model directory: it has no config.json"),
        (["weightless"], "weightless has no weights"),
        (["mute"], "mute has no tokenizer; copy one there"),
        (["garbled"], "garbled has no tokenizer that can be read"),
        (["small-heads"], "vLLM on a CPU cannot run head size 8 (it supports 32, 64, 80, 96, 112, 128, 160, 192, 224,"),
        (["MODEL", "--cache", "policy=gvk,budget=48"], "--cache: unknown cache policy 'gvk' (did you mean 'gkv'?)"),
        (["MODEL", "--cache", "budgte=48"], "--cache: cache policy 'gkv' has no parameter 'budgte' (did you mean"),
        (["MODEL", "--cache", "policy=gkv"], "--cache: cache policy 'gkv' needs a budget"),
        (["MODEL", "--cache", "budget=4"], "--cache: gkv: budget: 4 must exceed window 8"),
        (["MODEL", "--cache", "budget"], "'budget' is not of the form key=value"),
        (["bare", "--cache", "budget=48"], "--cache: bare carries no policy to change; name one"),
        (["broken"], "cache_policy.json cannot be used"),
        (["MODEL", "--kv-cache-gb", "0"], "expected a number > 0, got '0'"),
        (["MODEL", "--max-batch", "0"], "expected a whole number >= 1"),
        (["MODEL", "--tensor-parallel-size", "2"], "unrecognised argument '--tensor-parallel-size'"),
        ([], "the following arguments are required: MODEL"),
    ],
)
def test_user_errors_are_one_line_and_status_2(
    words: list[str],
    says: str,
    model: Path,
    tmp_path: Path,
    started: list,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    left_out = {"mute": "token", "weightless": ".safetensors", **dict.fromkeys(COPIES, "")}
    for name, part in left_out.items():
        (tmp_path / name).mkdir()
        for file in model.iterdir():
            if file.name != "cache_policy.json" and not (part and part in file.name):
                (tmp_path / name / file.name).write_bytes(file.read_bytes())
    (tmp_path / "garbled" / "tokenizer.json").write_text("{")
    (tmp_path / "broken" / "cache_policy.json").write_text('{"format_version": 1, "policy": "gkv"}')
    new_model("qwen3").config.save_pretrained(tmp_path / "small-heads")
    capfd.readouterr()
    assert run(*(model if word == "MODEL" else word for word in words)) == 2
    out, err = capfd.readouterr()
    assert out == "", err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("sparse-rl: error: ")
    assert says in err
    assert not started


@pytest.mark.parametrize(
    ("owner", "name", "value", "says"),
    [
        (serve.importlib.util, "find_spec", lambda name: None, 'is not installed: pip install "vllm==0.32.*"'),
        (serve, "PLUGIN", "another", "sparse-rl is not installed, so vLLM would not find its plugin"),
        (FAMILIES, "qwen3", "vllm has no code for it", "sparse-rl: error: model: qwen3: vllm has no code for it\n"),
    ],
    ids=["no vLLM", "no plugin", "hf alone"],
)
def test_what_vllm_cannot_serve_is_refused(
    owner: Any, name: str, value: Any, says: str, model: Path, started: list, capfd: Any, monkeypatch: Any
) -> None:
    (monkeypatch.setitem if owner is FAMILIES else monkeypatch.setattr)(owner, name, value)
    assert run(model) == 2
    assert says in capfd.readouterr().err
    assert not started


def test_an_address_that_cannot_be_bound_is_refused(
    model: Path, started: list, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM binds the address before it loads anything; its error is one line."""
    monkeypatch.setattr("uvloop.run", lambda serving: pytest.fail("the server was started"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for words in (["--port", other.getsockname()[1]], ["--port", 70_000], ["--host", "no.such.host.invalid"]):
            run(model, *words)
            capfd.readouterr()
            assert serve.main(started.pop()[4:]) == 2
            err = capfd.readouterr().err
            assert err.startswith("sparse-rl: error: ")
            assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("cache", "budget", "says"),
    [
        ({}, 48, "of the model"),
        ({"budget": 32}, 32, "as given"),
        ({"budget": 32, "window": 4, "period": 8}, 32, "as given"),
        ({"policy": "streaming", "budget": 32}, 32, "as given"),
    ],
)
def test_the_server_uses_the_models_own_policy_unless_another_is_given(
    cache: dict[str, Any], budget: int, says: str, model: Path
) -> None:
    policy, source = serve.choose_policy(str(model), cache)
    assert source == says
    assert policy.config.budget == budget
    if len(cache) == 3:
        assert (policy.name, policy.config.window, policy.config.period) == ("gkv", 4, 8)  # type: ignore[attr-defined]
    elif "policy" in cache:
        assert policy.name == "streaming"
    else:
        assert policy.parameters() == {**make_policy(POLICY).parameters(), "budget": budget}


def test_a_model_without_a_policy_is_served_with_a_full_cache(tmp_path: Path) -> None:
    policy, source = serve.choose_policy(str(tmp_path), {})
    assert policy.name == "full"
    assert source == "the model carries no policy"


def test_the_command_starts_vllms_server(
    model: Path, started: list, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    run(model, "--port", free_port(), "--", "--max-num-batched-tokens", "256")
    (words,) = started
    assert words[:4] == [sys.executable, "-P", "-c", serve.PROGRAM]
    assert words[-3:] == ["--", "--max-num-batched-tokens", "256"]
    assert words[words.index("--dtype") + 1] == "float32"  # the dtype on a CPU
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(2**30)
    assert os.environ["VLLM_PLUGINS"] == "other,sparse_rl"
    assert "cache: gkv(budget=48" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ([], 4 * 2**30),
        (["--kept-gb", "0.5"], 2**29),
        (["--kept-gb", "0"], 0),
        (["--cache", "turns=prefilled"], 0),
        (["--cache", "policy=full"], None),
        (
            ["--cache", "turns=prefilled", "--kept-gb", "1"],
            "--kept-gb: no conversation is kept under the policy gkv: its",
        ),
        (
            ["--cache", "policy=full", "--kept-gb", "1"],
            "--kept-gb: no conversation is kept under the policy full: it e",
        ),
        (["--rollouts"], 0),
        (["--rollouts", "--kept-gb", "1"], "--kept-gb: a server of rollouts keeps no conversations; leave one of"),
        (["--kept-gb", "-1"], "expected a number >= 0, got '-1'"),
    ],
)
def test_conversations_are_kept_if_their_turns_are(
    words: list[str], kept: int | str | None, model: Path, started: list, capfd: pytest.CaptureFixture
) -> None:
    status = run(model, "--port", free_port(), *words)
    out, err = capfd.readouterr()
    if isinstance(kept, str):
        assert (status, kept in err, started) == (2, True, [])
        return
    (command,) = started
    assert ("conversations: the next turn goes on from a kept cache, of up to" in out) == bool(kept)
    if kept is None:
        assert "--kv-transfer-config" not in command
    else:
        transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector_extra_config"]["sparse_rl"]["kept"] == kept


@pytest.mark.parametrize(
    ("values", "flags", "source", "says"),
    [
        ({}, [], "vllm", None),
        ({"top_k": 20, "repetition_penalty": 1.1}, [], "vllm", "repetition_penalty 1.1, top_k 20"),
        ({"temperature": 0.6, "top_p": 0.8, "max_new_tokens": 9}, [], "vllm", "temperature 0.6, top_p 0.8, max_new_t"),
        ({"temperature": 0.6}, ["--generation-config", "auto"], "auto", None),  # control: the user asks for the values
        ({"temperature": 0.6}, ["--generation_config=auto"], "auto", None),
    ],
)
def test_sampling_defaults_of_the_model_are_ignored_and_named_unless_asked_for(
    values: dict[str, Any],
    flags: list[str],
    source: str,
    says: str | None,
    model: Path,
    tmp_path: Path,
    started: list,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server's sampling defaults are neutral, like those of both engines. One line names the ignored values."""
    from vllm.entrypoints.launchers.api_server import entry

    parsed: list[Any] = []
    monkeypatch.setattr(entry, "setup_server", lambda arguments, **_: parsed.append(arguments) or ("", None))
    monkeypatch.setattr("uvloop.run", lambda serving: serving.close())
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    content = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**content, **values}))
    run(folder, "--port", free_port())
    capfd.readouterr()
    assert serve.main([*started[0][4:], *flags]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if "sampling defaults" in line]
    assert parsed[0].generation_config == source
    assert len(lines) == (says is not None)
    assert all(str(says) in line for line in lines)


@pytest.mark.slow
def test_flags_of_vllm_are_passed_on_unless_they_conflict_with_eviction(
    model: Path, started: list, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full cache, prefix caching is accepted."""
    from vllm.entrypoints.launchers.api_server import entry

    parsed: list[Any] = []
    monkeypatch.setattr(entry, "setup_server", lambda arguments, **_: parsed.append(arguments) or ("", None))
    monkeypatch.setattr("uvloop.run", lambda serving: serving.close())
    run(model, "--port", free_port(), "--max-batch", 7)
    words = started[0][4:]
    assert serve.main([*words, "--max-num-batched-tokens", "256"]) == 0
    arguments = parsed[0]
    assert (arguments.max_num_seqs, arguments.max_model_len, arguments.max_num_batched_tokens) == (7, -1, 256)
    assert arguments.enable_prefix_caching is False
    assert arguments.async_scheduling is False
    assert arguments.enforce_eager is True
    assert arguments.kv_transfer_config.kv_connector == "EvictionConnector"
    assert arguments.additional_config["sparse_rl"] == {"exact": True, "folds": False}
    assert arguments.kv_transfer_config.kv_connector_extra_config["sparse_rl"]["max_prompt"] is None
    for flags, message in (
        (["--kv-offloading-size", "1"], "--kv-offloading-size cannot be chosen; leave it out"),
        (["--kv-offloading-backend", "lmcache"], "--kv-offloading-backend cannot be chosen; leave it out"),
        (["--scheduler-cls", "a.b"], "--scheduler-cls cannot be chosen; leave it out"),
        (["--worker-cls", "a.b"], "--worker-cls cannot be chosen; leave it out"),
        (["--headless"], "--headless cannot be chosen; leave it out"),
        (["--api-server-count", "2"], "--api-server-count cannot be chosen; leave it out"),
        (["--additional-config", '{"a": 1}'], "--additional-config cannot be chosen; leave it out"),
        (["--enable-auto-tool-choice"], "Error: --enable-auto-tool-choice requires --tool-call-parser"),
        (["--dtype", "bfloat16"], "--dtype must be given before --"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["word"], "'word' is not a flag"),
    ):
        capfd.readouterr()
        assert serve.main([*words, *flags]) == 2
        err = capfd.readouterr().err
        assert err.startswith(f"sparse-rl: error: {message}")
        assert len(err.splitlines()) == 1
    run(model, "--port", free_port(), "--cache", "policy=full")
    assert serve.main([*started[1][4:], "--headless"]) == serve.main([*started[1][4:], "--grpc"]) == 2
    assert serve.main([*started[1][4:], "--enable-prefix-caching"]) == 0  # a valid configuration
    assert len(parsed) == 2
    assert parsed[1].enable_prefix_caching is True


# ---- a server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set and return the directory for temporary files of child processes; its path is short, as it holds sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv(FOLDER, raising=False)
        yield Path(folder)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one server for all tests. test_ctrl_c_stops_the_server_with_running_requests stops it."""
    words = ["--kv-cache-gb", str(POOL_GB), "--max-batch", "50", "--"]
    words += ["--max-num-batched-tokens", "2048", "--enable-scale-out", "--trust-request-chat-template"]
    with running(model, tmp_path_factory.mktemp("server"), *words) as shared_server:
        yield shared_server


@pytest.fixture(scope="module")
def offline(model: Path) -> Callable[..., list[list[int]]]:
    """offline(prompts, tokens, policy=None) -> the tokens that the engine samples greedily, without an end of text."""

    def sample(prompts: list[list[int]], tokens: int, policy: Any = None) -> list[list[int]]:
        engine = make_engine("vllm", model=model, policy=policy, kv_cache_gb=0.05, max_batch=50)
        try:
            outputs = engine.generate(prompts, SamplingConfig(tokens, temperature=0, ignore_eos=True))
        finally:
            engine.close()
        return [rollout.completion_ids for rollout in outputs]

    return sample


@pytest.mark.slow
def test_fifty_concurrent_requests_get_the_tokens_of_the_engine(server: Server, offline: Callable) -> None:
    """Control: with a full cache, more than 40 of them would get other tokens."""
    prompts = random_prompts([5 + 7 * i % 150 for i in range(46)] + [300, 500, 800, 1200])
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, 160).choices[0], prompts))
    expected = offline(prompts, 160)
    assert [answer.token_ids for answer in answers] == expected
    assert all(answer.finish_reason == "length" and answer.prompt_token_ids for answer in answers)
    full = offline(prompts, 160, "full")
    assert sum(a != b for a, b in zip(expected, full, strict=True)) > 40  # the policy changes the tokens
    assert server.metrics()["num_preemptions_total"] == 0


@pytest.mark.slow
def test_used_blocks_never_exceed_the_peaks_of_the_running_requests(server: Server) -> None:
    """Fifty requests run together in a pool that has room for ten with a full cache."""
    prompts, tokens = random_prompts([14 + i for i in range(50)]), 450
    streams = [server.complete(prompt, 1900, stream=True) for prompt in prompts]
    try:
        for stream in streams:
            next(iter(stream))
        samples = [server.metrics()]
        for _ in zip(range(tokens), streams[-1], strict=False):  # the other streams proceed at the same speed
            pass
        samples += [server.metrics() for _ in range(5)]
    finally:
        for stream in streams:
            stream.close()
    usable = samples[0]["blocks"] - 1  # one block is vLLM's null block
    used = [(round(s["kv_cache_usage_perc"] * usable), s["num_requests_running"]) for s in samples]
    # no prompt is longer than the peak
    assert all(0 < blocks <= running * (PEAK // BLOCK) for blocks, running in used), used
    requests_with_full_cache = usable // -(-(14 + tokens) // BLOCK)
    assert max(running for _, running in used) > 4 * requests_with_full_cache, used
    assert samples[-1]["num_preemptions_total"] == 0
    server.idle()


@pytest.mark.slow
def test_beam_search_and_reserved_names_are_refused(server: Server) -> None:
    """In one line, on every route that accepts them, before a stream begins."""
    (prompt,) = random_prompts([30], seed=8)
    chat = {"messages": [{"role": "user", "content": "1"}], "chat_template": "{{messages[0].content}}"}
    requests: dict[str, dict[str, Any]] = {
        "v1/completions": {"prompt": prompt, "max_tokens": 3},
        "v1/chat/completions": {**chat, "max_tokens": 3},
        "inference/v1/generate": {"token_ids": prompt, "sampling_params": {"max_tokens": 3}},
    }

    def post(path: str, **options: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/{path}", json={"model": server.model, **requests[path], **options}, timeout=60)

    for path in requests:
        assert post(path).status_code == 200
        if path == "inference/v1/generate":
            reserved: dict[str, Any] = {"sampling_params": {"max_tokens": 3, "extra_args": {"sparse_rl": {"seed": 1}}}}
        else:
            reserved = {"vllm_xargs": {"sparse_rl": "x"}}
            for options in ({}, {"n": 2}, {"stream": True}, {"temperature": 0}):
                refused = post(path, use_beam_search=True, **options)
                message = refused.json()["error"]["message"]
                assert refused.status_code == 400, (path, options)
                assert "beam search" in message, (path, options)
                assert "\n" not in message, (path, options)
        refused = post(path, **reserved)
        assert refused.status_code == 400, (path, refused.text)
        assert "is reserved for the server" in refused.text, (path, refused.text)
    assert post("inference/v1/generate", sampling_params={"seed": 2**70}).status_code == 400
    assert len(server.complete(prompt, 60).choices[0].token_ids) == 60


@pytest.mark.slow
def test_a_disconnected_client_frees_its_blocks(server: Server) -> None:
    for i, prompt in enumerate(random_prompts([10, 100, 700], seed=4)):
        stream = server.complete(prompt, 1000, stream=True)
        for _ in zip(range(40 * i + 1), stream, strict=False):
            pass
        stream.close()
    server.idle()


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


NO_TEXT_FITS = [  # structures that no text fits, or for which none could be found in time
    {"json": {"$ref": "#"}},
    {"json": {"anyOf": [{"$ref": "#"}]}},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json": deep(60)},
    {"json": deep(400)},
    {"json": json.dumps(deep(300))},
    {"grammar": "root ::= root"},
]


@pytest.mark.slow
def test_malformed_requests_do_not_affect_other_requests(server: Server) -> None:
    """Each gets a client error. After all of them, the server gives the same tokens as before."""
    (prompt,) = random_prompts([40], seed=5)
    before = server.complete(prompt, 60).choices[0].token_ids
    url = f"{server.url}/v1/completions"
    good = {"model": server.model, "prompt": prompt, "max_tokens": 4}
    bad: list[dict[str, Any]] = [
        *({"model": "nobody"}, {"temperature": -1}, {"top_p": 2}, {"n": 0}, {"logprobs": 10**4}, {"seed": "x"}),
        *({"max_tokens": tokens} for tokens in (-1, "many", 10**6)),
        *({"prompt": wrong} for wrong in ([3] * 2049, [64], [10**9], [-1], [], {"a": 1})),
        *({"logit_bias": {"100": 1}}, {"stop_token_ids": ["x"]}, {"kv_transfer_params": "nothing"}, {"seed": 2**64}),
    ]
    for change in bad:
        answer = httpx.post(url, json={**good, **change}, timeout=60)
        assert 400 <= answer.status_code < 500, (change, answer.status_code, answer.text)
    for structure in NO_TEXT_FITS:
        answer = httpx.post(url, json={**good, "structured_outputs": structure}, timeout=60)
        assert answer.status_code in (400, 500), (str(structure)[:80], answer.status_code, answer.text)
    assert httpx.post(url, content=b'{"model": ').status_code in (400, 422)
    assert httpx.post(url, content=b"\xff\xfe").status_code in (400, 422)
    assert httpx.get(f"{server.url}/v1/nothing").status_code == 404
    chat = {"model": server.model, "messages": [{"role": "user", "content": "1"}], "max_tokens": 4}
    # the model has no chat template
    assert httpx.post(f"{server.url}/v1/chat/completions", json=chat).status_code == 400
    # a name that is not reserved is harmless
    foreign = {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1, 2]}}
    assert httpx.post(url, json={**good, **foreign}, timeout=60).status_code == 200
    assert server.complete(prompt, 60).choices[0].token_ids == before


JSON_VALUES = st.recursive(
    st.sampled_from([None, True, -1, 0, 1, 2, 2**31, 2**63, -(10**30), 0.5, -1e308, "", "x", "\ud7ff\0", "{", "$ref"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "a", "$ref"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@pytest.mark.slow
def test_hostile_requests_do_not_affect_other_requests(server: Server) -> None:
    """A thousand requests have random values for random fields of vLLM, and are answered in time."""
    (prompt,) = random_prompts([40], seed=5)
    before = server.complete(prompt, 60).choices[0].token_ids
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    kinds = {"completions": "CompletionRequest", "chat/completions": "ChatCompletionRequest"}
    fields = {path: sorted(schemas[kind]["properties"]) for path, kind in kinds.items()}
    good = {
        "completions": {"prompt": prompt, "max_tokens": 2},
        "chat/completions": {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2, "chat_template": "{{1}}"},
    }
    statuses: set[int] = set()

    @settings(max_examples=1000, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def request(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(kinds)))
        changes = data.draw(st.dictionaries(st.sampled_from(fields[path]), JSON_VALUES, min_size=1, max_size=3))
        body = {"model": server.model, **good[path], **changes}
        answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
        statuses.add(answer.status_code)

    request()
    assert {200, 400} <= statuses
    assert server.complete(prompt, 60).choices[0].token_ids == before


@pytest.mark.slow
def test_ctrl_c_stops_the_server_with_running_requests(server: Server) -> None:
    """The last test of the shared server."""
    before = len(server.log.read_text())
    streams = [server.complete(prompt, 1900, stream=True) for prompt in random_prompts([20] * 8, seed=6)]
    for stream in streams:
        next(iter(stream))
    assert len(server.family()) >= 3  # the API, the engine, the worker
    assert server.end(signal.SIGINT) == 0
    for stream in streams:
        with pytest.raises((httpx.TransportError, OpenAIError)):
            list(stream)
    log = server.log.read_text()[before:]
    assert "Traceback" not in log, log
    assert "nanobind" not in log, log


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "delayed", "am"])
def test_a_model_with_a_policy_is_served_without_flags(name: str, model: Path, tmp_path: Path) -> None:
    """A learned policy with its scorers, and Attention Matching, whose biases lie in the heads: concurrent requests get
    the tokens of the reference engine."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    if name == "am":
        policy = make_policy("am", budget=32, window=8, period=16)
    else:
        policy = learned_policy(name, 40)
        write_scorers(folder, with_scorers(load_plain_model(folder), policy, scale=0.2).state_dict())
    save_policy(folder, policy)
    prompts = random_prompts([5 + 11 * i for i in range(20)])
    server = Server(folder, tmp_path, "--kv-cache-gb", str(POOL_GB), "--max-batch", "8")
    try:
        server.wait()
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda prompt: server.complete(prompt, 60).choices[0].token_ids, prompts))
        server.idle()
    finally:
        server.end(signal.SIGTERM)
    sampling = SamplingConfig(60, temperature=0, ignore_eos=True)
    expected = make_engine("hf", model=folder).generate(prompts, sampling)
    assert answers == [r.completion_ids for r in expected]
    full = make_engine("hf", model=folder, policy="full").generate(prompts, sampling)
    differ = sum(a.completion_ids != b.completion_ids for a, b in zip(expected, full, strict=True))
    assert differ > 10  # the policy matters


@pytest.mark.slow
def test_a_killed_server_leaves_no_processes(model: Path, tmp_path: Path, temporary: Path) -> None:
    """Its sockets are in the command's temporary folder. A server with an API key refuses requests without it."""
    server = Server(model, tmp_path, "--kv-cache-gb", str(POOL_GB), "--", "--api-key", "secret")
    try:
        server.wait()
        key, (prompt,) = {"Authorization": "Bearer secret"}, random_prompts([20])
        request = {"model": server.model, "prompt": prompt, "max_tokens": 2}
        for path in ("/invocations", "/v1/completions"):
            assert httpx.post(server.url + path, json=request).status_code == 401
            assert httpx.post(server.url + path, json=request, headers=key, timeout=60).status_code == 200
            foreign = {**key, "Origin": "https://evil.example"}
            assert httpx.post(server.url + path, json=request, headers=foreign).status_code == 403
        for path in ("/metrics", "/docs", "/load", "/version", "/v1/models"):
            assert httpx.get(server.url + path).status_code == 401
            assert httpx.get(server.url + path, headers=key).status_code == 200
            assert httpx.get(server.url + path, headers={**key, "Host": "evil.example"}).status_code == 400
        server.client.api_key = "secret"
        stream = server.complete(prompt, 1900, stream=True)
        next(iter(stream))
        assert len(server.family()) >= 3
    finally:
        status = server.end(signal.SIGKILL)
    assert status == -signal.SIGKILL
    (folder,) = temporary.glob("sparse-rl-*")
    sockets = {file for file in temporary.rglob("*") if file.is_socket()}
    assert sockets
    assert {file.parent for file in sockets} == {folder}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "children"), [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_a_starting_server_can_be_stopped(
    how: signal.Signals, children: int, model: Path, tmp_path: Path, temporary: Path
) -> None:
    """Before anything is loaded, and while the engine's process starts, for which vLLM itself waits."""
    server = Server(model, tmp_path, "--kv-cache-gb", str(POOL_GB))
    until = time.monotonic() + START
    while "cache: " not in server.log.read_text() or len(server.family()) < 1 + children:
        assert time.monotonic() < until, server.log.read_text()
        assert server.process.poll() is None, server.log.read_text()
        time.sleep(0.05)
    assert server.end(how, 10) == 130
    assert [*temporary.glob("sparse-rl-*")] == []
    assert "Traceback" not in server.log.read_text()
