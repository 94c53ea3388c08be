"""Sampling: compactions of a 7B model, and what `sparse-rl bench` measures.

Weights are random, so speeds and memory are real and texts are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.kernels import compared, seconds
from benchmarks.gpu.stages import config_of, sizes
from benchmarks.gpu.worker import FAILURE, HOUSE, Options, Row, attempt
from benchmarks.speed import entries
from sparse_rl.attention.families import cache_shape
from sparse_rl.policies import make_policy
from sparse_rl.policies.cache import ITEMSIZE

BLOCK = 32  # tokens of a block of vLLM's cache
HIDDEN = ("model", "engine", "parameters", "runs", "speeds", "memory", "spread", "settings")  # keys of rows of bench


def caches(cache: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return name -> block of a recipe. KVpop, which decides at every token, holds what the others do at their peak."""
    size = {"budget": cache["budget"], "period": cache["period"]}
    peak, window = cache["budget"] + cache["period"], min(64, cache["budget"] // 4)
    return {
        "streaming": {"policy": "streaming", **size},
        "gkv": {"policy": "gkv", **cache},
        "am": {"policy": "am", **cache},
        "kvpop": {"policy": "kvpop", "budget": peak, "window": window, "scorer": {"name": "mlp"}},
    }


def compaction(options: Options) -> Iterator[Row]:
    """Yield a row for each policy and number of requests: a compaction of all layers, batched as in our vLLM engine."""
    for requests in sizes(options).requests:
        for name, block in caches(sizes(options).cache).items():
            keys = {"requests": requests, "cache": name}
            if name != "kvpop" and not options.measured(**keys):
                yield attempt(keys, partial(compacted, requests, block, options))


def compacted(requests: int, block: dict[str, Any], options: Options) -> Row:
    from rollout.vllm import state

    config, policy = config_of(sizes(options).large_model), make_policy(block)
    layers, kv_heads, dim = cache_shape(config)
    held = policy.schedule.peak
    assert held is not None
    elements, cuda = held * kv_heads * dim, options.device == "cuda"
    folded = min(requests, max(1, state.MOST // elements))  # (request, layer) pairs that one call compacts
    folded *= min(layers, max(1, state.AT_ONCE[options.device] // (folded * elements)))
    shape = kv_heads, config.num_attention_heads // kv_heads, dim
    given = entries(policy, held, min(folded, layers * requests), shape, options.device, getattr(torch, options.dtype))
    calls = -(-layers * requests // folded)

    @torch.no_grad()
    def work() -> None:
        for _ in range(calls):
            policy.compact(0, given)

    row = compared({"compaction": work}, sizes(options).runs, reference="compaction")["compaction"]
    if FAILURE in row:
        return row
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * cuda)]
    with profile(activities=activities) as profiled:
        before = torch.cuda.memory_allocated() if cuda else 0
        seconds(work)
    events, wanted = profiled.events() or [], torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    row["launches" if cuda else "operators"] = sum(event.device_type == wanted for event in events)
    if cuda:
        row["temporary GB"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return {**row, "calls": calls, "ms per token of a sequence": row["ms"] / (held - policy.schedule.left(0, 0))}


def bench(options: Options, shape: dict[str, Any], mark: Row, **keys: Any) -> Iterator[Row]:
    """Yield the rows of `sparse-rl bench` as they come, with random weights, each measured once.

    mark : what tells these rows from other rows of the stage
    """
    blocks = caches(sizes(options).cache).values()
    if not (wanted := [block for block in blocks if not options.measured(policy=block["policy"], **mark)]):
        return
    recipe: Row = {"kind": "bench", "dtype": options.dtype, "random_weights": True, "repetitions": 1, **keys}
    with tempfile.TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        recipe |= {"model": folder, "output_dir": f"{folder}/out", "sweep": {"policy": wanted}}
        file, out, seen, ended = Path(folder, "recipe.yaml"), Path(folder, "out/bench.json"), 0, False
        file.write_text(json.dumps(recipe))
        process = subprocess.Popen([sys.executable, "-m", "sparse_rl.cli", "bench", str(file)], cwd=HOUSE)
        while not ended:
            time.sleep(0.5)
            ended = process.poll() is not None
            content = json.loads(out.read_text()) if out.exists() else {"rows": [], "contexts": []}
            rows = [*content["rows"], *content["contexts"]]
            for row in rows[seen:]:
                yield {**mark, **{key: value for key, value in row.items() if key not in HIDDEN}}
            seen = len(rows)
        if process.returncode and not seen:
            raise RuntimeError(f"sparse-rl bench ended with status {process.returncode}")


def decoding(options: Options) -> Iterator[Row]:
    """Yield a row for each cache and number of requests in the hf engine, with the share of compactions."""
    prompt, generated = sizes(options).decoded
    length, hf = prompt + generated, {"engine": "hf", "exact": False}
    for requests in sizes(options).requests:
        keys = {"batch": [requests], "prompt_tokens": prompt, "length": [length], "rollout": hf}
        yield from bench(options, sizes(options).large_model, {"batch": requests}, **keys)


def served(options: Options, shape: Row, batches: Sequence[int], lengths: Sequence[int], **more: Any) -> Iterator[Row]:
    """Yield a row for each cache, batch size and length in the vLLM engine."""
    rollout = {"engine": "vllm", "exact": False, **more}
    for length, batch in product(lengths, batches):
        prompt, mark = length - sizes(options).generated, {"batch": batch, "length": length, **more}
        keys = {"batch": [batch], "prompt_tokens": prompt, "length": [length], "rollout": rollout}
        yield from bench(options, shape, mark, **keys)


def modes(options: Options) -> Iterator[Row]:
    """Yield a row for each cache, with piecewise and with full CUDA graphs. tests/gpu compares their tokens."""
    size = sizes(options)
    for full in (False, True):
        yield from served(options, size.small_model, size.served[:1], size.lengths_served[:1], full_graphs=full)


def small_model(options: Options) -> Iterator[Row]:
    """Yield the rows of a 1.5B model."""
    yield from served(options, sizes(options).small_model, sizes(options).served, sizes(options).lengths_served)


def large_model(options: Options) -> Iterator[Row]:
    """Yield the rows of a 7B model."""
    yield from served(options, sizes(options).large_model, sizes(options).served, sizes(options).lengths_served)


def equal_memory(options: Options) -> Iterator[Row]:
    """Yield a row for each cache, with a pool of blocks for a quarter of the sequences without evictions."""
    size = sizes(options)
    batch, length = size.served[0], size.lengths_served[0]
    layers, heads, dim = cache_shape(config_of(size.small_model))
    blocks = max(3, batch // 4) * -(-length // BLOCK) + 1
    pool = blocks * BLOCK * 2 * layers * heads * dim * ITEMSIZE[options.dtype] / 2**30
    yield from served(options, size.small_model, [batch], [length], kv_cache_gb=pool)


def one_shot(options: Options) -> Iterator[Row]:
    """Yield a row for each way to select keys, with the seconds of each stage of the compaction of a long context."""
    context = sizes(options).context
    compactions = [{"queries": ["repeat"], "select": select, "ratio": [0.05]} for select in ("attention", "omp")]
    shape = {**sizes(options).small_model, "max_position_embeddings": 4 * context}
    contexts = {"length": [context], "compactions": compactions}
    yield from bench(options, shape, {}, length=[], contexts=contexts, rollout={"engine": "hf"})
