"""vLLM's own OpenAI server, run by its arguments: what `vllm serve` does, with what eviction needs held fixed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NoReturn

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
GRACE = 1  # seconds that open connections have once the engine has ended: they would wait for ever


def run_server(ours: list[str], further: list[str], fail: Callable[[str], NoReturn]) -> None:
    """Serve as `vllm serve` does, until a signal ends it. `fail` is told what is wrong with the arguments.

    The command `vllm serve` itself does not start from the CPU build, whose distribution has another name. While the
    engine starts, signals are left as they are; vLLM's own handling then waits for the engine to have started.

    Raises RuntimeError where the engine dies.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            fail(message)

    cli_env_setup()
    parser = make_arg_parser(Parser(prog="vllm serve"))
    default, asked, together = (parser.parse_args(words) for words in ([], further, [*ours, *further]))
    if asked.model_tag is not None:
        fail(f"{asked.model_tag!r} is not a flag")
    for name in ("model", "dtype"):
        if getattr(asked, name) != getattr(default, name):
            fail(f"--{name} does not stand behind --")
    changed = [name for name in FIXED if getattr(asked, name) != getattr(default, name)]
    if changed and together.kv_transfer_config is not None:
        fail(f"--{changed[0].replace('_', '-')} cannot be chosen where the cache evicts; leave it out")
    configure_logging_from_args(together)
    validate_parsed_serve_args(together)
    _refuse_foreign_tokens()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    address, listening = entry.setup_server(together, reuse_port=False)

    async def serve() -> bool:
        async with entry.build_async_engine_client(together) as engine:
            end = await entry.build_and_serve(engine, address, listening, together, timeout_graceful_shutdown=GRACE)
        await end
        return end.__name__ == "dummy_shutdown"  # type: ignore[attr-defined]  # no signal, but the engine's own end

    if uvloop.run(serve()):
        raise StoppedError("vLLM's engine died; what it said stands above")


def _refuse_foreign_tokens() -> None:
    """Refuse a prompt with a token that the model does not have: where the tokenizer has more, vLLM's engine dies."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    validate = InputProcessor._validate_model_input

    def validate_all(self: Any, prompt_input: Any, prompt_type: Any) -> None:
        validate(self, prompt_input, prompt_type)
        largest = max(prompt_input.get("prompt_token_ids") or (0,))
        if largest >= self.model_config.get_vocab_size():
            raise VLLMValidationError(f"Token id {largest} is out of vocabulary")

    InputProcessor._validate_model_input = validate_all  # type: ignore[method-assign]


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log entry says more than that the end of the server cut a request off, which it does at length."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "listen_for_disconnect" not in record.getMessage()
