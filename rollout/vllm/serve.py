"""`sparse-rl serve`: vLLM's own OpenAI server, with the plugin and the policy that the model was trained under.

`serve` makes all checks that need no loaded model, builds vLLM's command line, and replaces this process with a new
Python, which runs `run` below. Evictions are recorded only for the routes of rollouts (routes.py). A request that loses
an evicting cache ends with an error.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import torch

from rollout.config import ALONE
from rollout.context import PromptCacheConfig
from rollout.context.cache import save_context
from rollout.context.reader import ContextPrompts
from rollout.engine import make_engine
from rollout.vllm.compat import arguments
from rollout.vllm.memory import beside_cache
from sparse_rl.attention.families import context_length
from sparse_rl.config import Source, build
from sparse_rl.data.tokens import Prompt, prompt_ids, split_prompt, with_context
from sparse_rl.errors import UserError, unread
from sparse_rl.files import read_text
from sparse_rl.models.centres import check_parameters
from sparse_rl.models.directory import saved_policy
from sparse_rl.models.load import load_config, load_tokenizer, misread_tokenizer
from sparse_rl.models.weights import stored_shapes
from sparse_rl.policies.base import Policy
from sparse_rl.policies.make import make_policy
from sparse_rl.source import INSTALL_VLLM
from sparse_rl.temporary import remove_temporary_folder, temporary_folder

PROGRAM = """
import multiprocessing, os, signal, sys
from sparse_rl.temporary import remove_temporary_folder
def end(*_):  # during the start; afterwards vLLM's server handles signals itself
    for child in multiprocessing.active_children():
        child.kill()
    remove_temporary_folder()
    print("sparse-rl: interrupted", file=sys.stderr, flush=True)
    os._exit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
from rollout.vllm.serve import run
run(sys.argv[1:])
"""
PLUGIN = "sparse_rl"  # name of our entry point in the group vllm.general_plugins
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
BEHIND = ("\n\nWhat", " 0", "a")  # continuations of a text; the text has only the tokens that do not depend on them
KEPT_GB = 4.0  # default of --kept-gb
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def serve(model: str, cache: Mapping[str, Any], prompt_cache: Mapping[str, Any], options: Namespace) -> NoReturn:
    """Replace this process with vLLM's OpenAI-compatible server for a model.

    cache : the policy, or changes to the policy saved with the model; see `choose_policy`
    prompt_cache : settings with which the text `options.context` is compacted (`PromptCacheConfig`)
    options : the other options of the command (sparse_rl/commands/serve.py), and whether to show vLLM's log (`verbose`)
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"serving needs vLLM, which is not installed: {INSTALL_VLLM}")
    _check_plugin()
    policy, source = choose_policy(model, cache)
    compaction = _choose_compaction(options.context, prompt_cache, policy)
    config = load_config(model)
    check_parameters(model, policy)
    flags = {word.partition("=")[0] for word in options.further}
    tokenizer = _check_files(model, config, flags)
    _set_environment(options.verbose)
    arguments.check_version()
    arguments.refuse_engine(policy, config)
    model_dtype = str(config.dtype).removeprefix("torch.")
    dtype = options.dtype
    if dtype is None:  # on a CPU vLLM would convert float32 to a 16-bit dtype
        dtype = "float32" if arguments.on_cpu() and model_dtype == "float32" else "auto"
    itemsize = BYTES.get(dtype, BYTES.get(model_dtype, 2))
    bound = policy if options.context is None else arguments.BehindContext(policy.config)
    if options.rollouts and options.context is not None:
        raise UserError("rollouts cannot continue a served context; leave one of the two out", "--rollouts")
    beside = beside_cache(bound, config, itemsize=itemsize, max_batch=options.max_batch)
    memory = arguments.memory_arguments(options.kv_cache_gb, ALONE, beside)
    kept, contexts = _kept_bytes(options.kept_gb, policy, options.rollouts), None
    if options.context is not None:
        window = options.max_model_len or context_length(config)
        contexts = [compact_text(model, options.context, compaction, dtype if dtype in BYTES else "bfloat16", window)]
    rollouts: dict[str, Any] = {}
    if options.rollouts:  # as in VLLMEngine
        rollouts = {"worker_cls": f"{arguments.WORKERS}ServingWorker", "rollouts": True}
        rollouts["enable_prefix_caching"] = arguments.caches_prompts(policy, config)
    words = command_line(
        model=model,
        tokenizer=tokenizer,
        host=options.host,
        port=options.port,
        dtype=dtype,
        max_num_seqs=options.max_batch,
        **{"max_model_len": "auto", **arguments.length_arguments(config, options.max_model_len)},
        load_format="safetensors",
        generation_config="vllm",
        disable_uvicorn_access_log=not options.verbose,
        allowed_hosts=[name.lower() for name in options.allowed_hosts],
        allowed_origins=options.allowed_origins,
        block_size=arguments.default_block_size(),
        **memory,
        **arguments.model_arguments(config),
        **{
            **arguments.engine_arguments(
                policy, dtype=dtype, contexts=contexts, full_graphs=options.full_graphs, kept=kept
            ),
            **rollouts,
        },
    )
    server_host = f"[{options.host}]" if ":" in options.host else options.host
    print(f"serving {model} on http://{server_host}:{options.port}/v1\ncache: {policy!r}, {source}", flush=True)
    if kept:
        print(
            f"conversations: the next turn goes on from a kept cache, of up to {kept / 2**30:g} GiB in all", flush=True
        )
    _become([sys.executable, "-P", "-c", PROGRAM, *words, "--", *options.further])


def choose_policy(model: str, cache: Mapping[str, Any]) -> tuple[Policy, str]:
    """Return the policy to serve under, and a description of its source: `cache` if it has the key `policy`, else the
    policy saved with the model, or a full cache, with the changes `cache`.
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
    if context is None and prompt_cache:
        raise UserError("there is no context to compact; name its file: --context FILE", "--prompt-cache")
    if context is not None and policy.schedule.evicts:
        wrong = f"a compacted context cannot be combined with the evicting policy {policy.name}"
        raise UserError(f"{wrong}; write --cache policy=full", "--context")
    config = build(PromptCacheConfig, {"first": 0, **prompt_cache}, "--prompt-cache", Source())
    if config.summary is not None:
        wrong = "prompts begin with the text itself, so a summary cannot take its place"
        raise UserError(f"{wrong}; remove summary", "--prompt-cache.summary")
    return config


def _kept_bytes(given: float | None, policy: Policy, rollouts: bool) -> int:
    """Return the maximum bytes of host memory for the conversations that go on from a kept cache."""
    if given and rollouts:
        raise UserError("a server of rollouts keeps no conversations; leave one of the two out", "--kept-gb")
    if rollouts:
        return 0
    if policy.schedule.evicts and policy.config.turns == "kept":
        return int((KEPT_GB if given is None else given) * 2**30)
    if given:
        why = "its turns are prefilled; write --cache turns=kept" if policy.schedule.evicts else "it evicts nothing"
        raise UserError(f"no conversation is kept under the policy {policy.name}: {why}", "--kept-gb")
    return 0


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
    if PLUGIN not in importlib.metadata.entry_points(group="vllm.general_plugins").names:
        raise UserError(
            "sparse-rl is not installed, so vLLM would not find its plugin; run pip install -e . in its source folder"
        )


def _check_files(model: str, config: Any, flags: set[str]) -> str | None:
    """Raise UserError if the model has no weights or no tokenizer, unless a flag makes them unnecessary. Returns a
    directory with the right tokenizer if vLLM would read another one from the model.
    """
    folder = Path(model)
    if "--load-format" not in flags:
        stored_shapes(model)
    if flags & {"--tokenizer", "--skip-tokenizer-init"}:
        return None
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would invent one
        raise UserError(f"{model} has no tokenizer; copy one there, or name one: -- --tokenizer DIR", "model")
    load_tokenizer(model)
    if (right := misread_tokenizer(model)) is None:
        return None
    own = Path(temporary_folder()) / "tokenizer"
    right.save_pretrained(own)
    config.save_pretrained(own)  # vLLM looks for one beside a tokenizer
    return str(own)


def _set_environment(verbose: bool) -> None:
    if verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    else:
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ["PYTHONSAFEPATH"] = "1"  # otherwise the processes would import our plugin from the working directory
    arguments.prepare_environment()
    if arguments.on_cpu():  # vLLM would bind the threads of every server to the same cores, and leave none of two free
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # the first request for log-probs would wait for a compiler
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() - 1)))
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},{PLUGIN}"


# ---- a text that prompts may begin with ------------------------------------------------------------------------------


def compact_text(model: str, file: str, config: PromptCacheConfig, dtype: str, window: int | None) -> str:
    """Compact the text of a file, the beginning of the user's first message or, without a chat template, of the prompt,
    with the hf engine. Returns the path of the compacted context's file, which is in memory (memfd) until this process
    ends, also after exec. `window` is the context length of the model in tokens, if known.
    """
    try:
        text = read_text(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {unread(error)}", "--context") from error
    tokenizer = load_tokenizer(model)
    prompt: Prompt = [{"role": "user", "content": text}] if tokenizer.chat_template else text
    tokens, first, prompts = _tokens(prompt, text, tokenizer)
    if window is not None and len(tokens) >= window:
        wrong = f"{file} has {len(tokens)} tokens, but the model can read only {window}, answer included"
        raise UserError(f"{wrong}; shorten it", "--context")
    engine: Any = make_engine("hf", model=model, policy="full", dtype=dtype, progress=True)
    print(f"context: {len(tokens)} tokens of {file}", flush=True)
    context = engine.compact(tokens, replace(config, first=config.first + first), prompts)
    seconds = ", ".join(f"{stage} {taken:.0f} s" for stage, taken in context.seconds.items())
    print(f"context: {context.entries} entries left of {len(tokens)} ({seconds})", flush=True)
    descriptor = os.memfd_create("context", 0)  # the flags 0 keep the file open across exec
    with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder, open(descriptor, "wb", closefd=False) as memory:
        file = str(Path(folder) / "context.safetensors")
        save_context(file, context)
        with open(file, "rb") as written:
            shutil.copyfileobj(written, memory)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _tokens(prompt: Prompt, text: str, tokenizer: Any) -> tuple[list[int], int, ContextPrompts]:
    """Return the tokens with which all prompts that begin with the text begin, the number of tokens among them that the
    chat template puts before the text, and the prompts about the text.
    """

    def whole(continuation: str, thinking: bool | None = None) -> list[int]:
        return prompt_ids(with_context(prompt, text, text, continuation), tokenizer, thinking)

    same = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*map(whole, BEHIND), strict=False))
    first, common = split_prompt(prompt, text, tokenizer).first, [tokens[0] for tokens in same]
    if len(common) <= first:
        raise UserError("the text is too short: each of its tokens depends on the words that follow it", "--context")
    follow = lambda continuation: whole(continuation, thinking=False)[len(common) :]  # noqa: E731
    return common, first, ContextPrompts.of(tokenizer, follow, not isinstance(prompt, str))


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


def _one_line(error: Exception) -> str:
    message = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
    return " ".join(message.removeprefix("Value error, ").split())


def run(words: list[str]) -> NoReturn:
    status = main(words)
    remove_temporary_folder()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips Python's normal exit, in which Triton prints a long list of leaks
