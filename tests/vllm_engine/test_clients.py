"""A server refuses unsupported settings at its start, and unsupported requests of clients, in vLLM's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from starlette.testclient import TestClient
from tiny import directory_of, policy_of

from rollout.vllm import serve
from rollout.vllm.compat.arguments import KEY, engine_arguments
from sparse_rl.policies import make_policy

POLICY = {"policy": "gkv", "budget": 64, "window": 8, "period": 16}


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the members of vLLM that a server replaces in its process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    for owner, names in {
        AsyncEngineArgs: "create_engine_config",
        AsyncLLM: "generate pause_generation reset_prefix_cache sleep",
        BeamSearchOnlineMixin: "beam_search",
        InputProcessor: "_validate_model_input _validate_params",
        OutputProcessor: "add_request",
    }.items():
        for name in names.split():
            monkeypatch.setattr(owner, name, getattr(owner, name))
    yield


@pytest.mark.usefixtures("put_back")
@pytest.mark.parametrize(
    ("policy", "further", "says"),
    [
        ("full", [], None),
        (POLICY, ["--enable-prefix-caching"], "with prefix caching; set --no-enable-prefix-caching"),
        (POLICY, [], None),
        (POLICY, ["--enable-trace-replay"], "trace replay requires Model Runner V2"),
        (POLICY, ["--no-scheduler-reserve-full-isl"], "without --scheduler-reserve-full-isl"),
    ],
)
def test_unservable_configurations_are_refused_before_a_process_starts(
    policy: Any, further: list[str], says: str | None
) -> None:
    """Values may come from any source; command-line options are checked earlier, by name."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rollout.vllm.compat import server

    fields = {"model": str(directory_of("llama")), "dtype": "float32", "allowed_hosts": [], "allowed_origins": []}
    words = serve.command_line(**fields, **engine_arguments(make_policy(policy), dtype="float32"))
    arguments = server.read_arguments([*words, *further], [])
    server.check_before_it_starts()
    with nullcontext() if says is None else pytest.raises(ValueError, match=says):
        AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


@pytest.mark.usefixtures("put_back")
@pytest.mark.parametrize(
    ("request_line", "says"),
    [
        ("/pause?mode=keep", "pause_generation: if the cache evicts, running requests cannot be"),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_prefix_cache: if the cache evicts"),
        ("/sleep?mode=keep", "sleep: if the cache evicts"),
        ("/pause?mode=abort", None),
        ("/pause?mode=keep&clear_cache=false", None),
        ("/reset_prefix_cache", None),
        ("/sleep?mode=keep&level=0", None),
    ],
)
def test_routes_that_would_prefill_running_requests_are_refused(
    request_line: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Development routes that would prefill running requests again get status 400. No engine is connected, so a request
    that passes our check fails with status 500."""
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.vllm.compat import server

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    words = serve.command_line(model="m", host="127.0.0.1", port=8000, allowed_hosts=[], allowed_origins=[])
    app = entry.build_app(server.read_arguments(words, []), ("generate",))
    app.state.engine_client = object.__new__(AsyncLLM)
    client = TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False)
    assert client.post(request_line).status_code == 500  # vLLM alone does not refuse this request
    server.refuse_what_goes_round_the_policy()
    response = client.post(request_line)
    assert response.status_code == (400 if says else 500), response.text
    assert (says or "") in response.text


@pytest.mark.usefixtures("put_back")
@pytest.mark.parametrize("name", ["gkv", "full"])
def test_unsafe_fields_of_clients_are_refused(name: str, open_engine: Callable) -> None:
    """gkv refuses an input session; every policy, the field by which our engine passes settings to its workers."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from rollout.vllm.compat import server

    engine = open_engine(policy_of(name, budget=64, window=8, period=16))
    prompt: Any = {"prompt_token_ids": [5, 6, 7]}

    def processed(parameters: SamplingParams, **options: Any) -> Any:
        processor = engine.llm.llm_engine.input_processor
        return processor.process_inputs("1", prompt, parameters, supported_tasks=("generate",), **options)

    with nullcontext() if name == "full" else pytest.raises(VLLMValidationError, match="an input session cannot be"):
        assert processed(SamplingParams(), resumable=True).resumable
    server.refuse_requests()
    harmless = {"seed": 1, "forced": [3], "place": 0, "context": ["x", 2, 1]}
    assert not processed(SamplingParams(extra_args=harmless)).resumable
    with pytest.raises(VLLMValidationError, match=f"vllm_xargs: the name '{KEY}' is reserved for the server"):
        processed(SamplingParams(extra_args={KEY: {"seed": 1}}))
    assert processed(SamplingParams(seed=1)).sampling_params.seed == 1
