"""vLLM's own OpenAI server, run like `vllm serve`: what is fixed under eviction, who may use it, and what it refuses.

vLLM itself checks the API key under some path prefixes only. `Guard` wraps vLLM's whole app (`--middleware`), so that
it also covers routes that a new version of vLLM adds: a request must name an allowed host, come from no foreign page,
and have the key.

A request with a seed is sampled as a rollout is (rollout/sampling.py): a sequence's seed is computed from the request's
seed, the prompt and the sample index. Only the server's process has all three. It puts the sequence's seed into
`extra_args` (for sampling.SeededSampler in the workers), and removes the request's seed. Otherwise vLLM would make a
generator of its own, whose offset it resets between two chunks of a prompt: on a CPU this crashes the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from ipaddress import ip_address
from math import prod
from typing import Any, NoReturn
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import GenerationError, VLLMValidationError

from rollout.sampling import sequence_seed
from rollout.vllm.compat import arguments
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.compat.plugin import REASON
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.models.load import load_generation_config

OURS = ("model", "dtype", "allowed_hosts", "allowed_origins")
ALONE = (
    *("additional_config", "api_server_count", "data_parallel_multi_port_external_lb", "grpc", "headless"),
    "worker_cls",
)
FIXED = (  # arguments that the user cannot choose under eviction, besides those that `refuse_unsupported` finds
    *("attention_backend", "kv_offloading_backend", "kv_offloading_size", "kv_transfer_config", "scheduler_cls"),
)
SAMPLING = (  # options that vLLM takes from a generation config (ModelConfig.get_diff_sampling_param)
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p"),
    "max_new_tokens",
)
GRACE = 1  # seconds from the engine's end until open connections are closed, which would otherwise wait forever
NOT_FINITE = (
    "the model's log-probabilities for this request are not finite: the model's weights or activations are NaN or "
    "infinite; serve an undamaged checkpoint, or use another --dtype"
)


def read_arguments(ours: list[str], further: list[str]) -> Namespace:
    """Parse the words that `serve.serve` has built, and the user's, which take precedence. Raises UserError for invalid
    ones, and for the user's choice of settings that eviction needs.
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
    for name in [*OURS, *ALONE, *(FIXED if combined.kv_transfer_config is not None else ())]:
        if getattr(user, name) != getattr(default, name):
            why = "must be given before --" if name in OURS else "cannot be chosen; leave it out"
            raise UserError(f"--{name.replace('_', '-')} {why}")
    with user_errors():
        validate_parsed_serve_args(combined)
    combined.api_key = [key for key in combined.api_key or [envs.VLLM_API_KEY] if key]
    combined.middleware = [*combined.middleware, f"{__name__}.Guard"]  # the last one wraps all others
    return combined


def run_server(ours: list[str], further: list[str]) -> None:
    """Run the server as `vllm serve` does, which itself does not start with the CPU build, until a signal ends it.
    Raises StoppedError if the engine dies.
    """
    import uvloop
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    words = read_arguments(ours, further)
    configure_logging_from_args(words)
    check_before_it_starts()
    if words.generation_config == "vllm":
        values = load_generation_config(words.hf_config_path or words.model).to_diff_dict()
        if ignored := ", ".join(f"{name} {values[name]}" for name in SAMPLING if name in values):
            applies = "-- --generation-config auto applies them"
            print(f"sampling defaults of the model, ignored ({applies}): {ignored}", flush=True)
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
    """Make vLLM call our checks of its configuration, and of requests, before it starts a process."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    create: Any = AsyncEngineArgs.create_engine_config

    @wraps(create)
    def create_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
        with user_errors():
            vllm_config = create(self, *args, **kwargs)
        config = arguments.cache_config(vllm_config)
        if config is not None and config.physical:
            arguments.refuse_unsupported(vllm_config, config.full_graphs)
        refuse_requests()
        if config is not None and config.policy.schedule.evicts:
            refuse_what_goes_round_the_policy()
        # with speculative decoding or a watermark, vLLM uses another sampler
        if vllm_config.speculative_config is None and vllm_config.watermark_config is None:
            give_sequences_their_seeds()
        return vllm_config

    AsyncEngineArgs.create_engine_config = create_and_check  # type: ignore[method-assign]


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn vLLM's errors for wrong arguments, of many types, into a UserError; a ValueError passes unchanged."""
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


# ---- requests that reach the engine ---------------------------------------------------------------------------------


class RefusedError(VLLMValidationError, ValueError):
    """Answered with status 400. Client routes expect a VLLMValidationError, development routes a ValueError."""


def refuse_requests() -> None:
    """Make the server refuse requests that would stop the engine for everybody, or that use our workers' own words."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor

    validate_prompt, validate_parameters = InputProcessor._validate_model_input, InputProcessor._validate_params
    generate: Any = AsyncLLM.generate

    def validate_tokens(self: Any, prompt_input: Any, prompt_type: Any) -> None:
        validate_prompt(self, prompt_input, prompt_type)
        largest = max(prompt_input.get("prompt_token_ids") or (0,))
        if largest >= self.model_config.get_vocab_size():  # in the tokenizer, not in the model: the engine would crash
            raise RefusedError(f"Token id {largest} is out of vocabulary")

    def validate_ours(self: Any, params: Any, supported_tasks: Any) -> Any:
        if KEY in (getattr(params, "extra_args", None) or {}):  # workers would take it for ours
            raise RefusedError(f"vllm_xargs: the name {KEY!r} is reserved for the server; leave it out")
        structure = getattr(params, "structured_outputs", None)
        if structure is not None and (message := over_structure(structure)):
            raise RefusedError(message)
        return validate_parameters(self, params, supported_tasks)

    async def generate_or_fail(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Raise an error if log-probs were not finite. Later code would drop the error of a stream without tokens."""
        outputs = generate(self, *args, **kwargs)
        try:
            async for output in outputs:
                if any((sample.finish_reason, sample.stop_reason) == ("error", REASON) for sample in output.outputs):
                    raise GenerationError(NOT_FINITE)
                yield output
        finally:
            await outputs.aclose()

    InputProcessor._validate_model_input = validate_tokens  # type: ignore[method-assign]
    InputProcessor._validate_params = validate_ours  # type: ignore[method-assign]
    AsyncLLM.generate = generate_or_fail  # type: ignore[assignment, method-assign]


def refuse_what_goes_round_the_policy() -> None:
    """Make the server refuse calls after which the engine would prefill sampled tokens again, densely (status 400), so
    that the wrong entries, or none, would be evicted.
    """
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.v1.engine.async_llm import AsyncLLM

    def beam_search(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        why = "each step of a beam search prefills the whole text again, which a cache that evicts cannot do"
        raise RefusedError(f"use_beam_search: {why}; leave it out, or serve with --cache policy=full")

    def refusing(name: str, method: Any, prefills_again: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if prefills_again(*args, **kwargs):
                why = "if the cache evicts, running requests cannot be prefilled again"
                raise RefusedError(f"{name}: {why}; let them end first")
            return await method(self, *args, **kwargs)

        return call

    BeamSearchOnlineMixin.beam_search = beam_search  # type: ignore[assignment, method-assign]
    calls: dict[str, Callable[..., Any]] = {
        "pause_generation": lambda mode="abort", clear_cache=True, **_: mode == "keep" and clear_cache,
        "reset_prefix_cache": lambda reset_running_requests=False, reset_connector=False: reset_running_requests,
        "sleep": lambda level=1, mode="abort": mode == "keep" and level >= 1,
    }
    for name, prefills_again in calls.items():
        setattr(AsyncLLM, name, refusing(name, getattr(AsyncLLM, name), prefills_again))


def give_sequences_their_seeds() -> None:
    """In the server, give each sequence its own seed. vLLM adds the samples of a request one by one."""
    from vllm.v1.engine.output_processor import OutputProcessor

    add: Any = OutputProcessor.add_request

    @wraps(add)
    def seed_and_add(
        self: Any, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> None:
        params = request.sampling_params
        if params is not None and params.seed is not None and params.temperature > 0:
            seed = params.seed if parent_req is None else parent_req.sampling_params.seed
            own_seed = sequence_seed(seed, request.prompt_token_ids or (), request_index)
            params.extra_args, params.seed = {**(params.extra_args or {}), KEY: {"seed": own_seed}}, None
        add(self, request, prompt, parent_req, request_index, queue)

    OutputProcessor.add_request = seed_and_add  # type: ignore[method-assign]


# ---- who may use the server -----------------------------------------------------------------------------------------

read_json = Request.json
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Guard:
    """Refuses a request, or passes it to vLLM's app, whose `state.args` has the keys, hosts and origins."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        Request.json = _json  # type: ignore[assignment, method-assign]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        if refusal := _refusal(scope, scope["app"].state.args):
            status, message = refusal
            error = {"message": message, "type": "invalid_request_error", "code": status}
            await JSONResponse({"error": error}, status)(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if refused := over("request", bytes=size):
                raise HTTPException(400, refused)
            return message

        await self.app(scope, counted, send)


def _refusal(scope: Scope, args: Namespace) -> tuple[int, str] | None:
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _is_ours(host, args):
        return 400, f"this server does not accept the host name {host!r}; add it with --allowed-hosts"
    if origin is not None and not {origin, "*"} & set(args.allowed_origins) and urlsplit(origin).netloc != host:
        return 403, f"pages of {origin!r} may not use this server; allow them with --allowed-origins"
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    preflight = scope.get("method") == "OPTIONS" and origin and "access-control-request-method" in headers
    open_to_all = path == "/health" or preflight or not args.api_key  # /health only shows that the server runs
    if not open_to_all and not _has_key(headers, args.api_key):
        return 401, "this server needs an API key; send the header Authorization: Bearer KEY"
    return None


def _is_ours(host: str, args: Namespace) -> bool:
    """Return True for a Host header with an allowed name, or with the address that the server is bound to; any address
    if it is bound to all. A foreign page can make its own name resolve to this machine, but not an IP address.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    bound = (args.host or "0.0.0.0").lower()
    everywhere = _is_number(bound, "is_unspecified")
    accepted = {bound, *args.allowed_hosts}
    if everywhere or bound in LOOPBACK or _is_number(bound, "is_loopback"):
        accepted.update(LOOPBACK)
    if everywhere:
        accepted.add(socket.gethostname().lower())
    return "*" in accepted or (name != "" and (name in accepted or (everywhere and _is_number(name))))


def _is_number(name: str, attribute: str = "version") -> bool:
    try:
        return bool(getattr(ip_address(name), attribute))
    except ValueError:
        return False


def _has_key(headers: Headers, keys: list[str]) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    matches = [secrets.compare_digest(token.encode(), key.encode()) for key in keys]  # all keys, for constant time
    return scheme.lower() == "bearer" and any(matches)


# ---- limits of a request --------------------------------------------------------------------------------------------
# vLLM itself limits the numbers of prompts, stop strings, bad words and log-probabilities. Without these limits, a
# request of 130 bytes can take all memory, and one of 1 MB can block all other requests for a minute, before vLLM
# schedules it.

LIMITS = {
    "bytes": 2**24,  # of a request
    "levels": 100,  # of nesting in a field
    "values": 2**14,  # in a field, without token ids; vLLM reports each invalid one with up to 15 errors
    "sequences": 2**10,  # n times the number of prompts
    "characters": 2**15,  # of a schema, grammar, regular expression or list of choices
    "items": 2**15,  # that a schema may demand or allow in all; nested numbers multiply
    "repetitions": 10**6,  # of a character, or by nested quantifiers such as {1000}
}
ITEMS = re.compile("(min|max)(Items|Contains|Properties)?")
LENGTHS = ("minLength", "maxLength", "max_tokens", "max_chars", "max_whitespace_cnt")
PATTERNS = ("pattern", "regex", "grammar", "whitespace_pattern", "patternProperties")
TOKEN = re.compile(r"\\.|\[(?:\\.|[^]\\~{])*\]|[()]|\{\s*(\d*)\s*,?\s*(\d*)\s*\}|~\s*(\d+)(?:\.\.(\d+))?", re.DOTALL)


def over(field: str, **sizes: float) -> str | None:
    """Return the message for the first of a field's sizes that exceeds its limit, or None."""
    names = [name for name, size in sizes.items() if not size <= LIMITS[name]]
    return f"{field}: the server accepts at most {LIMITS[names[0]]} {names[0]} here; send less" if names else None


async def _json(request: Request) -> Any:
    try:
        body = await read_json(request)
    except RecursionError:
        body = [None]
        for _ in range(LIMITS["levels"]):
            body = [body]
    if refused := over_body(body):
        raise HTTPException(400, refused)
    return body


def over_body(body: Any) -> str | None:
    fields = body if isinstance(body, dict) else {"request": body}
    number, prompts = fields.get("n"), fields.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and not isinstance(next(iter(prompts), 0), int) else 1
    messages = [over("n", sequences=several * number)] if isinstance(number, int) else []
    return next(filter(None, [*messages, *(over(name, **_sizes(value, name)) for name, value in fields.items())]), None)


def over_structure(structure: Any) -> str | None:
    """Return the message for vLLM's `StructuredOutputsParams` that exceed a limit, or None."""
    for field in ("json", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern"):
        value = getattr(structure, field)
        text = value if isinstance(value, str) else json.dumps(value)
        if field in ("json", "structural_tag"):
            try:
                value = json.loads(text)
            except RecursionError:
                return over(field, levels=len(text))
            except ValueError:  # vLLM refuses it
                continue
        items, repetitions = zip((0, 0), *_repeats(value, field), strict=True)
        sizes = {**_sizes(value, field), "characters": len(text), "items": sum(items), "repetitions": max(repetitions)}
        if message := over(field, **sizes):
            return message
    return None


def _sizes(value: Any, field: str) -> dict[str, float]:
    levels, values, level = 0, 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        levels += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        ids = field in ("prompt", "tokens") and all(type(item) is int and item >= 0 for item in level)
        values += 0 if ids else len(level)
    return {"levels": levels, "values": values}


def _repeats(value: Any, key: str, times: float = 1) -> Iterator[tuple[float, float]]:
    """Yield (items, repetitions) of each part of a schema. `times` is how often the value itself may be repeated."""
    if isinstance(value, str) and key in PATTERNS:
        yield 0, _quantified(value)
    elif isinstance(value, list):
        for item in value:
            yield from _repeats(item, key, times)
    elif isinstance(value, dict):
        numbers = {name: float(min(item, 2**40)) for name, item in value.items() if isinstance(item, (int, float))}
        own = max([1.0, *(number for name, number in numbers.items() if ITEMS.fullmatch(name))])
        yield times * own if own > 1 else 0, max(numbers.get(name, 0) for name in LENGTHS)
        for name, item in value.items():
            yield from _repeats(name, key)  # the names of patternProperties are patterns
            yield from _repeats(item, name, times * own)


def _quantified(pattern: str) -> float:
    """Return the product of a pattern's largest quantifiers at each depth of parentheses: at least that of any nested
    ones.
    """
    depth, end, part, most = 0, 0, 1.0, dict[int, float]()
    for token in TOKEN.finditer(re.sub(r"\s", "", pattern)):
        depth += (token[0] == "(") - (token[0] == ")")
        numbers = [float(number) for number in token.groups() if number]
        part = max(1.0, *numbers) * (part if token.start() == end else 1) if numbers else 1.0
        end, most[depth] = token.end(), max(part, most.get(depth, 1))
    return prod(most.values())
