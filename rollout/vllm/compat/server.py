"""vLLM's own OpenAI server, run by its arguments: what `vllm serve` does, with what eviction needs held fixed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from itertools import accumulate
from typing import Any, NoReturn

from rollout.vllm.compat import access
from rollout.vllm.compat.finite import REASON
from sparse_rl.errors import StoppedError

FIXED = (  # vLLM's arguments that eviction needs as they are
    "additional_config",
    "async_scheduling",
    "attention_backend",
    "decode_context_parallel_size",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "kv_transfer_config",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "scheduler_reserve_full_isl",
    "speculative_config",
)
IN_FRONT = ("model", "dtype", "allowed_hosts", "allowed_origins")  # options of ours, which stand before --
NOT_FINITE = (
    "the model's log-probabilities for this request are not finite: its weights, or its activations in this dtype, are "
    "NaN or infinite; serve a checkpoint that is whole, or another --dtype"
)
DEEPEST = 100  # levels of a JSON schema
GRACE = 1  # seconds that open connections have once the engine has ended: they would wait for ever


def read_arguments(ours: list[str], further: list[str], fail: Callable[[str], NoReturn]) -> Namespace:
    """The arguments of `vllm serve`, and `allowed_hosts`. `fail` is told what is wrong with them.

    ours : the words that `serve.serve` wrote down; further : the user's, which win but for what eviction needs
    """
    from vllm import envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            fail(message)

    parser = make_arg_parser(Parser(prog="vllm serve"))
    parser.add_argument("--allowed-hosts", type=json.loads, default=[])
    default, asked, together = (parser.parse_args(words) for words in ([], further, [*ours, *further]))
    if asked.model_tag is not None:
        fail(f"{asked.model_tag!r} is not a flag")
    for name in IN_FRONT:
        if getattr(asked, name) != getattr(default, name):
            fail(f"--{name.replace('_', '-')} does not stand behind --")
    changed = [name for name in FIXED if getattr(asked, name) != getattr(default, name)]
    if changed and together.kv_transfer_config is not None:
        fail(f"--{changed[0].replace('_', '-')} cannot be chosen where the cache evicts; leave it out")
    validate_parsed_serve_args(together)
    together.api_key = [key for key in together.api_key or [envs.VLLM_API_KEY] if key]
    together.middleware = [*together.middleware, access.GUARD]  # the last stands around all others
    return together


def run_server(ours: list[str], further: list[str], fail: Callable[[str], NoReturn]) -> None:
    """Serve as `vllm serve` does, until a signal ends it. See `read_arguments`.

    The command `vllm serve` itself does not start from the CPU build, whose distribution has another name. While the
    engine starts, signals are left as they are; vLLM's own handling then waits for the engine to have started.

    Raises RuntimeError where the engine dies.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    arguments = read_arguments(ours, further, fail)
    configure_logging_from_args(arguments)
    refuse_what_stops_the_engine()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    address, listening = entry.setup_server(arguments, reuse_port=False)

    async def serve() -> bool:
        async with entry.build_async_engine_client(arguments) as engine:
            end = await entry.build_and_serve(engine, address, listening, arguments, timeout_graceful_shutdown=GRACE)
        await end
        return end.__name__ == "dummy_shutdown"  # type: ignore[attr-defined]  # no signal, but the engine's own end

    if uvloop.run(serve()):
        raise StoppedError("vLLM's engine died; what it said stands above")


def refuse_what_stops_the_engine() -> None:
    """Answer with status 400 to requests that vLLM lets through, at which its engine dies, stands still or gives up,
    and with status 500 to one whose log-probs are not finite (finite.py).
    """
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GenerationError, VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    validate_prompt = InputProcessor._validate_model_input
    validate_structure = SamplingParams._validate_structured_outputs
    generate: Any = AsyncLLM.generate

    def validate_tokens(self: Any, prompt_input: Any, prompt_type: Any) -> None:
        """A token that the tokenizer has and the model has not would end the engine."""
        validate_prompt(self, prompt_input, prompt_type)
        largest = max(prompt_input.get("prompt_token_ids") or (0,))
        if largest >= self.model_config.get_vocab_size():
            raise VLLMValidationError(f"Token id {largest} is out of vocabulary")

    def validate_depth(self: Any, model_config: Any, structured_outputs_config: Any, tokenizer: Any) -> None:
        """The time that a schema takes to compile grows with its depth so fast that a deep one holds everybody up."""
        asked = self.structured_outputs
        if asked is not None and _depth(asked.json or asked.structural_tag) > DEEPEST:
            raise VLLMValidationError(f"the JSON schema is nested deeper than {DEEPEST} levels")
        validate_structure(self, model_config, structured_outputs_config, tokenizer)

    def raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        """The engine gives a request up where no token fits the structure that it asks for: {"$ref": "#"}."""
        if finish_reason == "error":
            raise VLLMValidationError("no text fits the structure that the request asks for")

    async def generate_or_fail(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """All endpoints ask here; behind it, a stream would drop an error without a token."""
        outputs = generate(self, *args, **kwargs)
        try:
            async for output in outputs:
                if any((one.finish_reason, one.stop_reason) == ("error", REASON) for one in output.outputs):
                    raise GenerationError(NOT_FINITE)
                yield output
        finally:
            await outputs.aclose()

    InputProcessor._validate_model_input = validate_tokens  # type: ignore[method-assign]
    SamplingParams._validate_structured_outputs = validate_depth  # type: ignore[method-assign]
    GenerateBaseServing._raise_if_error = raise_if_error  # type: ignore[method-assign]
    AsyncLLM.generate = generate_or_fail  # type: ignore[assignment, method-assign]


def _depth(schema: Any) -> int:
    """How deep a schema is nested, as a value or as text; without recursion."""
    if isinstance(schema, str):
        depths = accumulate((c in "{[") - (c in "}]") for c in re.sub(r'"(?:\\.|[^"\\])*"', "", schema))
        return max(depths, default=0)
    depth, level = 0, [schema]
    while level := [each for each in level if isinstance(each, (dict, list))]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log entry says more than that the end of the server cut a request off, which it does at length."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "listen_for_disconnect" not in record.getMessage()
