"""vLLM's own OpenAI server, run like `vllm serve`: what is fixed under eviction, who may use it, and what it refuses.

vLLM itself checks the API key under some path prefixes only. `Guard` wraps vLLM's whole app (`--middleware`), so that
it also covers routes that a new version of vLLM adds: a request must name an allowed host, come from no foreign page,
and have the key.

A request with a seed is sampled as a rollout is (rollout/sampling.py): a sequence's seed is computed from the request's
seed, the prompt and the sample index. The server puts the seeds of all samples into `extra_args` (for
sampling.SeededSampler in the workers), and removes the request's seed. With it vLLM would make a generator, whose
offset it resets between two chunks of a prompt: on a CPU this crashes the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import socket
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from ipaddress import ip_address
from math import prod
from typing import Any, NoReturn
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.exceptions import VLLMValidationError

from rollout.sampling import sequence_seed
from rollout.vllm.compat import arguments
from rollout.vllm.compat.arguments import KEY
from rollout.vllm.routes import WEIGHTS, OwnSettings, attach
from rollout.wire import LOOPBACK
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.models.load import load_generation_config

OURS = ("model", "dtype", "allowed_hosts", "allowed_origins", "rollouts")
ALONE = (
    *("additional_config", "api_server_count", "data_parallel_multi_port_external_lb", "grpc", "headless"),
    "worker_cls",
)
ROLLOUTS = (  # that would lose records, or change bits, of rollouts
    *("async_scheduling", "data_parallel_size", "enable_expert_parallel", "enable_lora", "enable_prefix_caching"),
    *("kv_cache_dtype", "pipeline_parallel_size", "quantization", "speculative_config", "watermark_config"),
    *("hf_config_path", "hf_overrides", "load_format", "logits_processors", "revision"),
)
FIXED = (  # arguments that the user cannot choose under eviction, besides those that `refuse_unsupported` finds
    *("attention_backend", "kv_offloading_backend", "kv_offloading_size", "kv_transfer_config", "scheduler_cls"),
)
SAMPLING = (  # options that vLLM takes from a generation config (ModelConfig.get_diff_sampling_param)
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p"),
    "max_new_tokens",
)
GRACE = 1  # seconds from the engine's end until open connections are closed, which would otherwise wait forever


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
    parser.add_argument("--rollouts", action="store_true")
    default, user, own, combined = (parser.parse_args(words) for words in ([], further, ours, [*ours, *further]))
    if user.model_tag is not None:
        raise UserError(f"{user.model_tag!r} is not a flag")
    fixed = *(FIXED if combined.kv_transfer_config is not None else ()), *(ROLLOUTS if own.rollouts else ())
    for name in [*OURS, *ALONE, *fixed]:
        if getattr(user, name) != getattr(default, name):
            why = "must be given before --" if name in OURS else "cannot be chosen; leave it out"
            raise UserError(f"--{name.replace('_', '-')} {why}")
    with user_errors():
        validate_parsed_serve_args(combined)
    combined.hf_overrides = {**own.hf_overrides, **user.hf_overrides}
    combined.api_key = [key for key in combined.api_key or [envs.VLLM_API_KEY] if key]
    if own.rollouts and not combined.api_key and combined.host not in LOOPBACK:
        wrong = "other machines may sample and replace weights, so they need a key"
        raise UserError(f"{wrong}; set the environment variable VLLM_API_KEY", "--host")
    combined.middleware = [*combined.middleware, f"{__name__}.Guard"]  # the last one wraps all others
    return combined


def run_server(ours: list[str], further: list[str]) -> None:
    """Run the server as `vllm serve` does, which itself does not start with the CPU build, until a signal ends it.
    Raises StoppedError if the engine dies.
    """
    import uvloop
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    cli_env_setup()
    words = read_arguments(ours, further)
    configure_logging_from_args(words)
    if words.generation_config == "vllm":
        values = load_generation_config(words.hf_config_path or words.model).to_diff_dict()
        if ignored := ", ".join(f"{name} {values[name]}" for name in SAMPLING if name in values):
            applies = "-- --generation-config auto applies them"
            print(f"sampling defaults of the model, ignored ({applies}): {ignored}", flush=True)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    usage = UsageContext.OPENAI_API_SERVER
    with user_errors():
        address, listening = entry.setup_server(words, reuse_port=False)
        vllm_config = AsyncEngineArgs.from_cli_args(words).create_engine_config(usage)
    config = arguments.cache_config(vllm_config)
    if config is not None and config.physical:
        arguments.refuse_unsupported(vllm_config, config.full_graphs)

    async def serve() -> bool:
        check_requests(vllm_config)
        engine = AsyncLLM.from_vllm_config(
            vllm_config,
            usage_context=usage,
            enable_log_requests=words.enable_log_requests,
            aggregate_engine_logging=words.aggregate_engine_logging,
            disable_log_stats=words.disable_log_stats,
        )
        if words.rollouts:
            build_app = entry.build_app

            def with_rollouts(*args: Any, **kwargs: Any) -> Any:
                attach(app := build_app(*args, **kwargs), engine)
                return app

            entry.build_app = with_rollouts  # type: ignore[assignment]
        try:
            end = await entry.build_and_serve(engine, address, listening, words, timeout_graceful_shutdown=GRACE)
        finally:
            engine.shutdown(timeout=vllm_config.shutdown_timeout)
        await end
        return end.__name__ == "dummy_shutdown"  # type: ignore[attr-defined]  # the engine ended without a signal

    if uvloop.run(serve()):
        raise StoppedError("vLLM's engine died; see its messages above")


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
    """Return False for the long log entries about requests that the end of the server, or their client, has cut off."""
    error = record.exc_info[1] if record.exc_info else None
    left = isinstance(error, (asyncio.CancelledError, ClientDisconnect))
    return not left and "listen_for_disconnect" not in record.getMessage()


# ---- requests that reach the engine ---------------------------------------------------------------------------------


def check_requests(vllm_config: Any) -> None:
    """Make the server give sequences their seeds, and refuse requests that would stop the engine for everybody or that
    use our workers' own words. If our code assigns the slots of the cache, also prompts that are sent in pieces: vLLM
    schedules each piece after the tokens sampled before, which our connectors would treat as a new request.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    config, vocab_size = arguments.cache_config(vllm_config), vllm_config.model_config.get_vocab_size()
    whole_prompts, keeps = config is not None and config.physical, config is not None and config.kept > 0
    if vllm_config.watermark_config is not None:
        raise UserError("vLLM draws tokens with a watermark by a sampler of its own; leave --watermark-config out")
    seeded = vllm_config.speculative_config is None  # with speculative decoding, vLLM uses another sampler
    process: Any = InputProcessor.process_inputs

    @wraps(process)
    def check_and_process(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if whole_prompts and kwargs.get("resumable"):
            wrong = "an input session cannot be served if the cache evicts or requests continue a context"
            raise VLLMValidationError(wrong)
        extra = getattr(params, "extra_args", None) or {}
        if KEY in extra and not isinstance(extra[KEY], OwnSettings):  # workers would take it for ours
            raise VLLMValidationError(f"vllm_xargs: the name {KEY!r} is reserved for the server; leave it out")
        structure = getattr(params, "structured_outputs", None)
        if structure is not None and (message := over_structure(structure)):
            raise VLLMValidationError(message)
        request = process(self, request_id, prompt, params, *args, **kwargs)
        ids, own = request.prompt_token_ids or (), request.sampling_params
        if (largest := max(ids, default=0)) >= vocab_size:  # in the tokenizer, not in the model: the engine would crash
            raise VLLMValidationError(f"Token id {largest} is out of vocabulary")
        settings: dict[str, Any] = {}
        if keeps and own is not None and (owner := owner_of(request)) is not None:
            settings["owner"] = owner
        if seeded and own is not None and own.seed is not None and own.temperature > 0:
            settings["seeds"], own.seed = [sequence_seed(own.seed, ids, sample) for sample in range(own.n)], None
        if settings:
            own.extra_args = {**(own.extra_args or {}), KEY: settings}
        return request

    InputProcessor.process_inputs = check_and_process  # type: ignore[method-assign]


# ---- who may use the server -----------------------------------------------------------------------------------------

TOKEN_OF: ContextVar[str | None] = ContextVar("token", default=None)  # the API key with which a request came, or ""
SECRET = secrets.token_bytes(32)


def owner_of(request: Any) -> str | None:
    """Return a name that is the same for requests with the same API key and the same cache_salt, which alone may share
    conversations; None for a request that shares none: with a LoRA adapter, with inputs that are no tokens, or by a way
    that does not tell us its key.
    """
    token = TOKEN_OF.get()
    if token is None or request.lora_request or request.mm_features or request.prompt_embeds is not None:
        return None
    return hashlib.blake2b(json.dumps([token, request.cache_salt]).encode(), key=SECRET, digest_size=16).hexdigest()


read_json = Request.json


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
        TOKEN_OF.set(_token(Headers(scope=scope))[1])

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if scope["path"].endswith(WEIGHTS):  # which has its own limit
                return message
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


def _token(headers: Headers) -> tuple[str, str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return scheme, token


def _has_key(headers: Headers, keys: list[str]) -> bool:
    scheme, token = _token(headers)
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
    connector = getattr(request.app.state.args.kv_transfer_config, "kv_connector", None)
    if isinstance(body, dict) and body.get("use_beam_search") and connector == "EvictionConnector":
        why = "each step of a beam search prefills the whole text again, so nothing would ever be evicted"
        raise HTTPException(400, f"use_beam_search: {why}; leave it out, or serve with --cache policy=full")
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
