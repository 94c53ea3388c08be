"""vLLM's own OpenAI server, run like `vllm serve`, but with fixed values of the options that eviction depends on."""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

from rollout.vllm.compat import access, arguments, refusals, seeds
from sparse_rl.errors import StoppedError, UserError

FIXED = (  # arguments of vLLM that the user cannot change under eviction
    "async_scheduling",
    "attention_backend",
    "decode_context_parallel_size",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "kv_offloading_backend",
    "kv_offloading_size",
    "kv_transfer_config",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "scheduler_cls",
    "scheduler_reserve_full_isl",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "speculative_config",
    "worker_cls",
)
NOT_TAKEN = {  # arguments of vLLM that this server does not support, with the reason
    "additional_config": "the server has its own",
    "api_server_count": "the server is a single process",
    "data_parallel_multi_port_external_lb": "the server is a single process",
    "grpc": "the server speaks HTTP",
    "headless": "the server speaks HTTP",
}
IN_FRONT = ("model", "dtype", "allowed_hosts", "allowed_origins")  # our own options, which must be given before --
GRACE = 1  # seconds from the engine's end until open connections are closed, which would otherwise wait forever


def read_arguments(ours: list[str], further: list[str]) -> Namespace:
    """Parse the arguments of `vllm serve`, and our `--allowed-hosts`. Raises UserError for invalid arguments.

    ours : words that `serve.serve` has built
    further : words of the user, which take precedence, but cannot change settings that eviction needs
    """
    from vllm import envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(message)

    parser = make_arg_parser(Parser(prog="vllm serve"))
    parser.add_argument("--allowed-hosts", type=json.loads, default=[])
    default, user, combined = (parser.parse_args(words) for words in ([], further, [*ours, *further]))
    if user.model_tag is not None:
        raise UserError(f"{user.model_tag!r} is not a flag")
    wrong = dict.fromkeys(IN_FRONT, "must be given before --")
    if combined.kv_transfer_config is not None:
        wrong |= dict.fromkeys(FIXED, "cannot be chosen under this cache; leave it out")
    wrong |= {name: f"cannot be chosen, as {why}; leave it out" for name, why in NOT_TAKEN.items()}
    for name, why in wrong.items():
        if getattr(user, name) != getattr(default, name):
            raise UserError(f"--{name.replace('_', '-')} {why}")
    with user_errors():
        validate_parsed_serve_args(combined)
    combined.api_key = [key for key in combined.api_key or [envs.VLLM_API_KEY] if key]
    combined.middleware = [*combined.middleware, access.GUARD]  # the last one wraps all others
    return combined


def run_server(ours: list[str], further: list[str]) -> None:
    """Run the server as `vllm serve` does, until a signal ends it. Raises StoppedError if the engine dies.

    The command `vllm serve` itself does not start with the CPU build, whose distribution has another name. Once the
    engine has started, vLLM handles signals. The arguments are those of `read_arguments`.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    words = read_arguments(ours, further)
    configure_logging_from_args(words)
    check_before_it_starts()
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    with user_errors():
        address, listening = entry.setup_server(words, reuse_port=False)

    async def serve() -> bool:
        async with entry.build_async_engine_client(words) as engine:
            end = await entry.build_and_serve(engine, address, listening, words, timeout_graceful_shutdown=GRACE)
        await end
        return end.__name__ == "dummy_shutdown"  # type: ignore[attr-defined]  # the engine ended without a signal

    if uvloop.run(serve()):
        raise StoppedError("vLLM's engine died; see its messages above")


def check_before_it_starts() -> None:
    """Make vLLM call our checks of its configuration before it starts a process.

    Also make the server refuse the requests that this configuration cannot serve (clients.py).
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rollout.vllm.compat import clients

    create: Any = AsyncEngineArgs.create_engine_config

    @wraps(create)
    def create_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        with user_errors():
            vllm_config = create(self, *args, **kwargs)
        refusals.refuse_configuration(vllm_config)
        clients.refuse_what_stops_the_engine()
        config = arguments.cache_config(vllm_config)
        if config is not None and config.policy.schedule.evicts:
            clients.refuse_what_goes_round_the_policy()
        if vllm_config.speculative_config is None:  # with speculative decoding, vLLM uses another sampler
            seeds.give_sequences_their_seeds()
        return vllm_config

    AsyncEngineArgs.create_engine_config = create_and_check  # type: ignore[method-assign]


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn vLLM's errors for wrong arguments into a UserError with their text; a ValueError passes unchanged.

    vLLM raises KeyError, TypeError, NotImplementedError and others, and only the text of these errors is useful.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise UserError(error.args[0] if isinstance(error, KeyError) else str(error)) from error


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for the long log entries about requests that the end of the server has interrupted, else True."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError) and "listen_for_disconnect" not in record.getMessage()
