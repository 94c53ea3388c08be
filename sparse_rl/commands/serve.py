"""`sparse-rl serve`: run vLLM's OpenAI server with the cache policy saved with a model."""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import Any, NoReturn

from rollout.config import MOST_GIB
from sparse_rl.commands.arguments import file_name, number, positive
from sparse_rl.commands.console import Session, quiet_loading

ABOUT = "Serve a model with vLLM (OpenAI API) under the cache policy that it carries."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Options after -- are passed to vLLM's own server: sparse-rl serve MODEL -- --tensor-parallel-size 2"
    )
    parser.add_argument(
        "model", metavar="MODEL", type=file_name, help="the directory of a model (with its tokenizer) or of a run"
    )
    parser.add_argument(
        "--cache",
        metavar="KEY=VALUE,...",
        action="append",
        default=[],
        help="another policy (policy=gkv,budget=512), or a changed parameter of the model's policy (budget=256); "
        "default: the policy in its cache_policy.json, else a full cache",
    )
    parser.add_argument(
        "--context",
        metavar="FILE",
        type=file_name,
        help="a text that is compacted once; user messages that begin with it continue from the compacted cache",
    )
    parser.add_argument(
        "--prompt-cache",
        metavar="KEY=VALUE,...",
        action="append",
        default=[],
        help="settings for compacting the context, as in a recipe: ratio=0.05",
    )
    parser.add_argument(
        "--host",
        metavar="HOST",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 accepts connections from everywhere",
    )
    parser.add_argument("--port", metavar="N", type=positive, default=8000)
    parser.add_argument(
        "--allowed-hosts",
        metavar="NAME,...",
        type=names,
        default=[],
        help="additional host names that clients may use for the server; *: any. Default: only the address of --host",
    )
    parser.add_argument(
        "--allowed-origins",
        metavar="URL,...",
        type=names,
        default=[],
        help="web origins that may use the server, such as https://example.com; *: any. Default: only its own",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's own, as in vLLM"
    )
    parser.add_argument(
        "--max-batch", metavar="N", type=positive, default=64, help="maximum number of sequences at a time"
    )
    parser.add_argument("--max-model-len", metavar="N", type=positive, help="maximum length of prompt + completion")
    parser.add_argument(
        "--kv-cache-gb",
        metavar="GIB",
        type=partial(number, most=MOST_GIB),
        help="size of the KV cache; default: most of the GPU, or 1 on a CPU",
    )
    parser.add_argument(
        "--kept-gb",
        metavar="GIB",
        type=partial(number, most=MOST_GIB, zero=True),
        help="host memory for the caches of conversations, from which their next turns go on, if the policy evicts and "
        "its turns are kept; default: 4; 0: each turn is prefilled",
    )
    parser.add_argument(
        "--full-graphs", action="store_true", help="run each decode step as one CUDA graph; not yet tested on a GPU"
    )
    parser.add_argument(
        "--rollouts",
        action="store_true",
        help="also sample for trainings (rollout.engine: server), record evictions, and let them replace the weights",
    )


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def run(options: argparse.Namespace, session: Session) -> NoReturn:
    from rollout.vllm.serve import serve
    from sparse_rl.models.directory import model_directory
    from sparse_rl.recipe.yaml_text import apply_overrides

    quiet_loading(session.verbose)
    cache, prompt_cache = dict[str, Any](), dict[str, Any]()
    for values, pairs in ((cache, options.cache), (prompt_cache, options.prompt_cache)):
        apply_overrides(values, [pair for text in pairs for pair in re.split(r",(?![^\[]*\])", text)])
    options.verbose = session.verbose
    serve(model_directory(options.model), cache, prompt_cache, options)
