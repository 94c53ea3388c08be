"""`sparse-rl serve`: vLLM's own OpenAI server, with the plugin and the policy that the model was trained under.

`serve` makes all checks that need no loaded model, builds vLLM's command line, and replaces this process with a new
Python, which runs `run` below. The new process inherits the environment, but no imports.

Evictions are not recorded. After a preemption, vLLM prefills the request's prompt and its sampled tokens again,
densely, and the policy evicts from them as from any prompt.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import torch

from rollout.config import ALONE
from rollout.context import PromptCacheConfig
from rollout.vllm.beside import beside_cache
from rollout.vllm.compat import arguments, refusals
from sparse_rl.attention.families import cache_shape, context_length
from sparse_rl.config import Source, build
from sparse_rl.errors import UserError
from sparse_rl.models.directory import check_scorers, saved_policy
from sparse_rl.models.load import load_config, load_tokenizer
from sparse_rl.models.weights import stored_shapes
from sparse_rl.policies.base import Policy
from sparse_rl.policies.registry import make_policy
from sparse_rl.source import INSTALL_VLLM
from sparse_rl.temporary import remove_temporary_folder

PROGRAM = """
import os, signal, sys
from sparse_rl.temporary import remove_temporary_folder
def end(*_):  # for the seconds that the import takes
    remove_temporary_folder()
    os._exit(130)
signal.signal(signal.SIGINT, end)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
from rollout.vllm.serve import run
run(sys.argv[1:])
"""
PLUGIN = "sparse_rl"  # name of our entry point in the group vllm.general_plugins
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def serve(
    model: str,
    cache: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str | None = None,
    max_batch: int = 64,
    max_model_len: int | None = None,
    kv_cache_gb: float | None = None,
    allowed_hosts: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    context: str | None = None,
    prompt_cache: Mapping[str, Any] | None = None,
    full_graphs: bool = False,
    further: Sequence[str] = (),
    verbose: bool = False,
) -> NoReturn:
    """Replace this process with vLLM's OpenAI-compatible server for a model.

    model : model directory or hub name, with tokenizer
    cache : the policy, or changes to the policy saved with the model; see `choose_policy`
    dtype : dtype of weights, cache and forward pass; None means vLLM's choice for the model, except that float32 stays
        float32 on a CPU
    max_batch : maximum number of sequences that run at a time
    max_model_len : maximum length of prompt + completion; None means the model's context length, or the longest prompt
        that the cache can hold if that is shorter
    kv_cache_gb : GiB for the cache; None means most of a GPU's memory, or 1 on a CPU
    allowed_hosts : names, in addition to `host`, by which clients may call the server; "*" allows any
    allowed_origins : web pages, in addition to the server's own, that may use the server, for example
        https://example.com; "*" allows any
    context : path of a text file, which is compacted once; prompts that begin with the text continue the compacted text
    prompt_cache : settings of that compaction (`PromptCacheConfig`)
    full_graphs : on a GPU, run a decode step as one CUDA graph
    further : arguments for `vllm serve` itself; they take precedence, but cannot change settings that eviction needs
    verbose : show vLLM's log

    Raises UserError or ValueError for errors that can be found before the model is loaded.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"serving needs vLLM, which is not installed: {INSTALL_VLLM}")
    _check_plugin()
    policy, source = choose_policy(model, cache)
    compaction = _choose_compaction(context, prompt_cache or {}, policy)
    config = load_config(model)
    check_scorers(model, policy)
    flags = {word.partition("=")[0] for word in further}
    _check_files(model, flags)
    _set_environment(verbose)
    _check_platform(policy, config, "--enable-sleep-mode" in flags)
    model_dtype = str(config.dtype).removeprefix("torch.")
    if dtype is None:  # on a CPU vLLM would convert float32 to a 16-bit dtype
        dtype = "float32" if arguments.on_cpu() and model_dtype == "float32" else "auto"
    itemsize = BYTES.get(dtype, BYTES.get(model_dtype, 2))
    bound = policy if context is None else arguments.BehindContext(policy.config)
    beside = beside_cache(bound, config, itemsize=itemsize, max_batch=max_batch)
    memory = arguments.memory_arguments(kv_cache_gb, ALONE, beside)
    if max_model_len is not None:
        _check_length(max_model_len, policy, config, dtype, memory.get("kv_cache_memory_bytes"))
    _check_address(host, port)
    _check_access(allowed_hosts, allowed_origins)
    contexts = None
    if context is not None:
        from rollout.vllm.served_context import compact_text

        window = max_model_len or context_length(config)
        contexts = [compact_text(model, context, compaction, dtype if dtype in BYTES else "bfloat16", window)]
    words = command_line(
        model=model,
        host=host,
        port=port,
        dtype=dtype,
        max_num_seqs=max_batch,
        max_model_len="auto" if max_model_len is None else max_model_len,
        load_format="safetensors",
        disable_uvicorn_access_log=not verbose,
        allowed_hosts=[name.lower() for name in allowed_hosts],
        allowed_origins=list(allowed_origins),
        block_size=arguments.default_block_size(),
        **memory,
        **arguments.engine_arguments(policy, dtype=dtype, contexts=contexts, full_graphs=full_graphs),
    )
    server_host = f"[{host}]" if ":" in host else host
    print(f"serving {model} on http://{server_host}:{port}/v1\ncache: {policy!r}, {source}", flush=True)
    _become([sys.executable, "-P", "-c", PROGRAM, *words, "--", *further])


def choose_policy(model: str, cache: Mapping[str, Any]) -> tuple[Policy, str]:
    """Return the policy to serve under, and a description of its source.

    cache : with a key `policy`, the complete settings of the policy; without this key, changes to the policy saved with
        the model. If `cache` is empty, the saved policy is used, or a full cache if no policy is saved.
    """
    saved = saved_policy(model)
    if not cache:
        return (make_policy("full"), "the model carries no policy") if saved is None else (saved, "of the model")
    if "policy" not in cache:
        if saved is None:
            raise UserError(f"{model} carries no policy to change; name one: policy=gkv,budget=512", "--cache")
        cache = {**saved.config.as_block(), **cache}
    try:
        return make_policy(cache), "as given"
    except UserError as error:
        raise UserError(str(error), "--cache") from error


def _choose_compaction(context: str | None, prompt_cache: Mapping[str, Any], policy: Policy) -> PromptCacheConfig:
    """Build the settings `prompt_cache` with which the server compacts its context.

    Raises UserError for settings without a context, and for a context together with an evicting policy.
    """
    if context is None and prompt_cache:
        raise UserError("there is no context to compact; name its file: --context FILE", "--prompt-cache")
    if context is not None and policy.schedule.evicts:
        raise UserError(
            f"a compacted context cannot be combined with the evicting policy {policy.name}; write --cache policy=full",
            "--context",
        )
    config = build(PromptCacheConfig, {"first": 0, **prompt_cache}, "--prompt-cache", Source())
    if config.summary is not None:
        wrong = "prompts begin with the text itself, so a summary cannot take its place"
        raise UserError(f"{wrong}; remove summary", "--prompt-cache.summary")
    return config


def command_line(**options: Any) -> list[str]:
    """Convert keyword arguments of vLLM, except those that are None, to words of vLLM's command line."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


def _become(words: list[str]) -> NoReturn:
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # blocked until the new Python has started
    os.execv(words[0], words)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_plugin() -> None:
    """Raise UserError if our plugin's entry point is not installed: vLLM looks it up in each of its processes."""
    if PLUGIN not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        raise UserError(
            "sparse-rl is not installed, so vLLM would not find its plugin; run pip install -e . in its source folder"
        )


def _check_files(model: str, flags: set[str]) -> None:
    """Raise UserError if the model has no weights or no tokenizer, unless a flag makes them unnecessary."""
    folder = Path(model)
    if "--load-format" not in flags:
        stored_shapes(model)
    if flags & {"--tokenizer", "--skip-tokenizer-init"}:
        return
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would invent one
        raise UserError(f"{model} has no tokenizer; copy one there, or name one: -- --tokenizer DIR", "model")
    load_tokenizer(model)


def _check_platform(policy: Policy, config: Any, sleep_mode: bool) -> None:
    arguments.check_version()
    if not arguments.on_cpu() and not torch.cuda.is_available():
        raise UserError("there is no GPU, but the installed vLLM needs one")
    refusals.refuse_engine(policy, config, sleep_mode)


def _check_length(length: int, policy: Policy, config: Any, dtype: str, memory: int | None) -> None:
    """Raise UserError if `length` tokens exceed the model's context, or a cache of `memory` bytes (None if unknown)."""
    longest = context_length(config)
    if longest is not None and length > longest:
        raise UserError(f"{length} is more than the model's context, {longest}", "--max-model-len")
    if memory is None or dtype not in BYTES:
        return
    layers, kv_heads, head_dim = cache_shape(config)
    entries = policy.schedule.most_held(length, length)
    need = entries * layers * kv_heads * head_dim * 2 * BYTES[dtype]
    if need > memory:
        raise UserError(
            f"a prompt of {length} tokens takes {need / 2**30:.2f} GiB, but the cache has {memory / 2**30:.2f} GiB; "
            "lower --max-model-len, or raise --kv-cache-gb",
            "--max-model-len",
        )


def _check_address(host: str, port: int) -> None:
    if port > 65535:
        raise UserError(f"{port} is not a port; the highest is 65535", "--port")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot listen on {host}, port {port}: {reason}; choose another --port or --host") from error


def _check_access(hosts: Sequence[str], origins: Sequence[str]) -> None:
    for name in hosts:
        if name != "*" and not re.fullmatch(r"[\w.-]+|[0-9a-fA-F.]*(:[0-9a-fA-F.]*){2,}", name):
            raise UserError(f"{name!r} is not a host; write its name, without https:// and port", "--allowed-hosts")
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"\w+://[^/\s]+", origin):
            raise UserError(f"{origin!r} is not an origin; write it as https://example.com", "--allowed-origins")


def _set_environment(verbose: bool) -> None:
    """Set the environment variables that the server's processes inherit. Most of them keep a value set by the user."""
    if verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    else:
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ["PYTHONSAFEPATH"] = "1"  # otherwise the processes would import our plugin from the working directory
    arguments.prepare_environment()
    if arguments.on_cpu():  # vLLM would bind the threads of every server to the same cores, and leave none of two free
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() - 1)))
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},{PLUGIN}"


# ---- in the server's process ----------------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    """Serve, and return the exit status. words : arguments built by `serve`, then "--", then the user's arguments"""
    from rollout.vllm.compat import server

    separator = words.index("--")
    try:
        server.run_server(words[:separator], words[separator + 1 :])
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except ValueError as error:
        print(f"sparse-rl: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        print(f"sparse-rl: stopped: {_one_line(error)}", file=sys.stderr)
        return 1
    return 0


def _end_at_once(*_: Any) -> NoReturn:
    _kill_children()
    remove_temporary_folder()
    print("sparse-rl: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


def _kill_children() -> None:
    """Kill all child processes except the resource tracker, which frees shared memory once the others have ended."""
    import psutil

    this_process = psutil.Process()
    children: dict[int, Any] = {}
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    while new := [child for child in this_process.children(recursive=True) if child.pid not in (tracker, *children)]:
        for child in new:  # suspended first, so that no child starts another process unnoticed
            children[child.pid] = child
            with contextlib.suppress(psutil.NoSuchProcess):
                child.suspend()
    for child in children.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _one_line(error: Exception) -> str:
    """Return an error's message as one line, with only the first reason of pydantic's errors, which vLLM raises."""
    message = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
    return " ".join(message.removeprefix("Value error, ").split())


def run(words: list[str]) -> NoReturn:
    """Run `main`, and then end this process and all its children."""
    for number in (signal.SIGINT, signal.SIGTERM):  # during the start; afterwards vLLM's server handles signals itself
        signal.signal(number, _end_at_once)
    status = main(words)
    _kill_children()
    remove_temporary_folder()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips Python's normal exit, in which Triton prints a long list of leaks
