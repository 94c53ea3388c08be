"""A server refuses unsupported settings at its start, and unsupported requests of clients, in vLLM's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from tiny import directory_of, policy_of

from rollout.vllm import serve
from rollout.vllm.compat.arguments import KEY, engine_arguments, model_arguments
from sparse_rl.models.load import load_config
from sparse_rl.policies import make_policy

POLICY = {"policy": "gkv", "budget": 64, "window": 8, "period": 16}


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
    policy: Any, further: list[str], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values may come from any source; command-line options are checked earlier, by name."""
    from vllm.entrypoints.launchers.api_server import entry

    from rollout.vllm.compat import server

    monkeypatch.setattr(entry, "setup_server", lambda arguments, **_: ("", None))
    monkeypatch.setattr("uvloop.run", lambda serving: serving.close())
    fields = {"model": str(directory_of("llama")), "dtype": "float32", "allowed_hosts": [], "allowed_origins": []}
    words = serve.command_line(**fields, **engine_arguments(make_policy(policy), dtype="float32"))
    with nullcontext() if says is None else pytest.raises(ValueError, match=says):
        server.run_server([*words, *further], [])


def test_overrides_of_the_user_are_added_to_ours() -> None:
    """Control: without ours, vLLM does not scale the queries of Ministral 3."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rollout.vllm.compat import server

    folder = str(directory_of("ministral3"))
    fields = {"model": folder, "dtype": "float32", "allowed_hosts": [], "allowed_origins": []}
    for ours, scaled in ((model_arguments(load_config(folder)), True), ({}, False)):
        parsed = server.read_arguments(serve.command_line(**fields, **ours), ["--hf-overrides", '{"eos_token_id": 5}'])
        config = AsyncEngineArgs.from_cli_args(parsed).create_model_config().hf_text_config
        assert config.eos_token_id == 5
        assert hasattr(config, "llama_4_scaling") is scaled


@pytest.mark.parametrize("name", ["gkv", "full"])
def test_unsafe_fields_of_clients_are_refused(
    name: str, open_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gkv refuses an input session; every policy, the field by which our engine passes settings to its workers, a token
    that the model lacks, and a structure beyond a limit."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.engine.input_processor import InputProcessor

    from rollout.vllm.compat import server

    engine = open_engine(policy_of(name, budget=64, window=8, period=16)).llm.llm_engine

    def processed(parameters: SamplingParams, tokens: Sequence[int] = (5, 6, 7), **options: Any) -> Any:
        prompt: Any = {"prompt_token_ids": [*tokens]}
        return engine.input_processor.process_inputs("1", prompt, parameters, supported_tasks=("generate",), **options)

    beyond = engine.vllm_config.model_config.get_vocab_size()
    schema = StructuredOutputsParams(json={"type": "array", "minItems": 10**9})
    refused: list[tuple[str, dict[str, Any]]] = [
        (
            f"the name '{KEY}' is reserved for the server",
            {"parameters": SamplingParams(extra_args={KEY: {"seeds": 1}})},
        ),
        (f"Token id {beyond} is out of vocabulary", {"parameters": SamplingParams(), "tokens": [5, beyond]}),
        ("json: the server accepts at most", {"parameters": SamplingParams(structured_outputs=schema)}),
    ]
    assert processed(SamplingParams(), [5, beyond]).prompt_token_ids[1] == beyond  # control: vLLM does not refuse it
    assert processed(SamplingParams(), resumable=True).resumable
    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs)  # put back after the test
    server.check_requests(engine.vllm_config)
    for says, arguments in refused:
        with pytest.raises(VLLMValidationError, match=says):
            processed(**arguments)
    with nullcontext() if name == "full" else pytest.raises(VLLMValidationError, match="an input session cannot be"):
        assert processed(SamplingParams(), resumable=True).resumable
    harmless = {"seed": 1, "forced": [3], "place": 0, "context": ["x", 2, 1]}
    request = processed(SamplingParams(extra_args=harmless), [5, beyond - 1])
    assert request.sampling_params.extra_args == harmless
    assert request.sampling_params.watermarking is not None  # what vLLM resolves is not lost
