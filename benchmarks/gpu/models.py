"""Whole models: compactions and sampling as `sparse-rl bench` measures them, GRPO by the product's own command, and the
passes of a model under evictions.

Weights are random, so speeds and memory are real and texts are not.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.kernels import compared, let_flex_train, seconds
from benchmarks.gpu.stages import FAILURE, HOUSE, Options, Row, attempt
from benchmarks.speed import entries, evictions, passes
from sparse_rl.attention.families import cache_shape
from sparse_rl.models.random_weights import random_model
from sparse_rl.policies import make_policy
from sparse_rl.policies.cache import ITEMSIZE
from sparse_rl.temporary import temporary_folder

BLOCK = 32  # tokens of a block of vLLM's cache
HIDDEN = ("model", "engine", "parameters", "runs", "speeds", "memory", "spread")  # keys of rows of bench
QUICKSTART = HOUSE / "recipes/quickstart/model"
PARTS = ("sync", "generate", "rewards", "logprobs", "update", "step")
VLLM = ("vllm",) if importlib.util.find_spec("vllm") else ()


def caches(cache: dict[str, int]) -> list[Row]:
    """Return blocks of a recipe. KVpop, which decides at every token, holds what the others do at their peak."""
    size = {"budget": cache["budget"], "period": cache["period"]}
    peak, window = cache["budget"] + cache["period"], min(64, cache["budget"] // 4)
    kvpop = {"policy": "kvpop", "budget": peak, "window": window, "scorer": {"name": "mlp"}}
    return [{"policy": "streaming", **size}, {"policy": "gkv", **cache}, {"policy": "am", **cache}, kvpop]


def config_of(shape: Row, **changes: Any) -> Any:
    """Return the configuration of a shape. Attention logits of random weights have a deviation of about 2."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**shape, "initializer_range": (2.24 / shape["hidden_size"]) ** 0.5, **changes})


# ---- sampling -------------------------------------------------------------------------------------------------------


def compaction(options: Options) -> Iterator[Row]:
    """Yield a row for each policy and number of requests: a compaction of all layers, batched as in our vLLM engine."""
    for requests, block in product(options.sizes.requests, caches(options.sizes.cache)[:-1]):
        keys = {"requests": requests, "cache": block["policy"]}
        if not options.measured(**keys):
            yield attempt(keys, partial(compacted, requests, block, options))


def compacted(requests: int, block: Row, options: Options) -> Row:
    from rollout.vllm import state

    config, policy = config_of(options.sizes.large_model), make_policy(block)
    layers, kv_heads, dim = cache_shape(config)
    held = policy.schedule.peak
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

    row = compared({"compaction": work}, options.sizes.runs, reference="compaction")["compaction"]
    if FAILURE in row:
        return row
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * cuda)]) as profiled:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds(work)
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    row["launches" if cuda else "operators"] = sum(event.device_type == kind for event in profiled.events() or [])
    if cuda:
        row["temporary GB"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return {**row, "calls": calls, "ms per token of a sequence": row["ms"] / (held - policy.schedule.left(0, 0))}


def bench(options: Options, shape: Row, recipe: Row, **mark: Any) -> Iterator[Row]:
    """Yield the rows of `sparse-rl bench` as they come, with random weights, each measured once.

    mark : what tells these rows from other rows of the stage
    """
    from sparse_rl.commands.bench_runs import prepare_benches
    from sparse_rl.progress import stage
    from sparse_rl.recipe import BenchRecipe, make_recipe

    def measured(policy: str, batch: int) -> bool:
        return options.measured(policy=policy, batch=batch, **mark)

    blocks, batches = caches(options.sizes.cache), recipe.get("batch", [1])
    wanted = [block for block in blocks if not all(measured(block["policy"], batch) for batch in batches)]
    folder = tempfile.mkdtemp(dir=temporary_folder())
    config_of(shape).save_pretrained(folder)
    keys = {"kind": "bench", "model": folder, "output_dir": folder, "dtype": options.dtype, "repetitions": 1}
    keys |= {"random_weights": True, "sweep": {"policy": wanted}, **recipe}
    with stage("timing", shown=False) as shown:
        for one in prepare_benches(make_recipe(keys, [], "bench").expect(BenchRecipe)) if wanted else ():
            for row in (row for _, rows in one.run(shown) for row in rows):
                if "policy" not in row or not measured(row["policy"], row["batch"]):
                    yield mark | {key: value for key, value in row.items() if key not in HIDDEN}


def decoding(options: Options) -> Iterator[Row]:
    """Yield a row for each cache and number of requests in the hf engine, with the share of compactions."""
    prompt, generated = options.sizes.decoded
    recipe = {"batch": [*options.sizes.requests], "prompt_tokens": prompt, "length": [prompt + generated]}
    yield from bench(options, options.sizes.large_model, {**recipe, "rollout": {"engine": "hf", "exact": False}})


def served(options: Options, shape: Row, batches: Sequence[int], lengths: Sequence[int], **more: Any) -> Iterator[Row]:
    """Yield a row for each length, cache and batch size in the vLLM engine."""
    for length in lengths:
        recipe = {"batch": [*batches], "prompt_tokens": length - options.sizes.generated, "length": [length]}
        recipe["rollout"] = {"engine": "vllm", "exact": False, **more}
        yield from bench(options, shape, recipe, length=length, **more)


def modes(options: Options) -> Iterator[Row]:
    """Yield a row for each cache, with piecewise and with full CUDA graphs. tests/gpu compares their tokens."""
    size = options.sizes
    for full in (False, True):
        yield from served(options, size.small_model, size.served[:1], size.lengths_served[:1], full_graphs=full)


def throughput(options: Options, model: str) -> Iterator[Row]:
    """Yield a row for each cache, batch size and length with a model of SIZES."""
    yield from served(options, getattr(options.sizes, model), options.sizes.served, options.sizes.lengths_served)


def equal_memory(options: Options) -> Iterator[Row]:
    """Yield a row for each cache, with a pool of blocks for a quarter of the sequences without evictions."""
    size = options.sizes
    batch, length = size.served[0], size.lengths_served[0]
    layers, heads, dim = cache_shape(config_of(size.small_model))
    blocks = max(3, batch // 4) * -(-length // BLOCK) + 1
    pool = blocks * BLOCK * 2 * layers * heads * dim * ITEMSIZE[options.dtype] / 2**30
    yield from served(options, size.small_model, [batch], [length], kv_cache_gb=pool)


def one_shot(options: Options) -> Iterator[Row]:
    """Yield a row for each way to select keys, with the seconds of each stage of the compaction of a long context."""
    context = options.sizes.context
    compactions = [{"queries": ["repeat"], "select": select, "ratio": [0.05]} for select in ("attention", "omp")]
    shape = {**options.sizes.small_model, "max_position_embeddings": 4 * context}
    recipe = {"length": [], "contexts": {"length": [context], "compactions": compactions}, "rollout": {"engine": "hf"}}
    yield from bench(options, shape, recipe)


# ---- training -------------------------------------------------------------------------------------------------------


def grpo_quickstart(options: Options) -> Iterator[Row]:
    """Yield a row for each engine: times of a step's parts, the gap, and the memory beside `doctor`'s prediction."""
    for engine in ("hf", *VLLM):
        if not options.measured(engine=engine):
            yield attempt({"engine": engine}, partial(trained, options, str(QUICKSTART), engine, options.sizes.grpo))


def grpo_model(options: Options) -> Iterator[Row]:
    """Yield a row as `grpo_quickstart` does, with random weights and one engine (vLLM if installed). Rewards are 0."""
    size, folder = options.sizes, tempfile.mkdtemp(dir=temporary_folder())
    cache = {"policy": "gkv", "budget": 128, "window": 16, "period": 32}  # that of qwen2.5-1.5b/grpo
    tokens = json.loads((QUICKSTART / "config.json").read_text()).items()
    ends = {key: value for key, value in tokens if key.endswith("_token_id")}
    model = random_model(config_of(size.small_model, **ends), options.dtype, 0, options.device)
    model.save_pretrained(folder)
    for file in QUICKSTART.glob("tokenizer*"):
        shutil.copy(file, folder)
    del model
    # Only one engine: memory that a first training does not free would count in the peak of a second one.
    overrides = {**size.grpo, "cache": cache, "gradient_checkpointing": True, **size.grpo_model}
    yield {"engine": (engine := (*VLLM, "hf")[0]), **trained(options, folder, engine, overrides)}


def trained(options: Options, model: str, engine: str, overrides: Row) -> Row:
    from sparse_rl.commands.memory import OUTSIDE, device_memory, plan
    from sparse_rl.commands.train import run_training
    from sparse_rl.metrics import read_metrics
    from sparse_rl.recipe import TrainRecipe, load_recipe

    folder, cuda = tempfile.mkdtemp(dir=temporary_folder()), options.device == "cuda"
    keys = {"model": model, "output_dir": f"{folder}/run", "dtype": "bfloat16", "rollout.engine": engine, **overrides}
    words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    prepared = load_recipe("quickstart/grpo", words).expect(TrainRecipe).prepare_training()
    predicted = plan(prepared, device_memory())
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run_training(prepared, lambda trainer: None)
    metrics = [line for line in read_metrics(Path(folder, "run")) if "time/step" in line]
    measured = metrics[1:] or metrics  # the first step compiles and warms up
    row: Row = {f"{part} s": statistics.median(line[f"time/{part}"] for line in measured) for part in PARTS}
    row["tokens/s"] = statistics.median(line["time/tokens_per_second"] for line in measured)
    row["gap mean"] = statistics.median(line["replay/gap_mean"] for line in metrics)
    row["gap max"] = max(line["replay/gap_max"] for line in metrics)
    row["predicted GB"] = (predicted.device + (-OUTSIDE if cuda else predicted.host)) / 1e9
    peak = torch.cuda.max_memory_allocated() if cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**row, "peak GB": peak / 1e9}


def steps(options: Options) -> Iterator[Row]:
    """Yield a row for each attention kernel: forward and backward pass of a model over one long sequence."""
    let_flex_train(options)
    size = options.sizes
    config = config_of(size.small_model, max_position_embeddings=2 * size.trained)
    model = random_model(config, options.dtype, 0, options.device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    evict_at = evictions("uniform", size.trained, size.budget, heads, window=16).expand(layers, -1, -1)
    works = passes(model, evict_at.contiguous(), {name: (name, False) for name in ("flex_sorted", "gather")})
    for name, row in compared(works, 3, reference="causal SDPA").items():
        yield {"kernel": name, "S": size.trained, **row}
