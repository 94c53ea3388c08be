"""The vLLM engine: tokens/s under full and small caches, with and without CUDA graphs, and at equal memory."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.compaction import caches
from benchmarks.gpu.shapes import config_of, dtype_name, random_prompts, sizes
from benchmarks.gpu.worker import FAILURE, Options, Row, attempt
from rollout import SamplingConfig, make_engine
from rollout.timing.sampling import time_sampling
from rollout.vllm.observed import observed
from sparse_rl.attention.families import cache_shape
from sparse_rl.models.random_weights import random_model, save_random_model
from sparse_rl.policies import make_policy
from sparse_rl.policies.cache import ITEMSIZE

CACHES = ("full", "gkv", "streaming", "kvpop", "am")
MODES = ("eager", "piecewise", "full graphs")
GREEDY_REQUESTS, GREEDY_PROMPT = 16, 200
BLOCK = 32  # tokens of a block of the cache


def throughput_small_model(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield the rows of the smaller model; see `_throughput`."""
    yield from _throughput(sizes(small).small_model, device, small, options)


def throughput_large_model(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield the rows of the larger model; see `_throughput`."""
    yield from _throughput(sizes(small).large_model, device, small, options)


def _throughput(shape: dict[str, Any], device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each cache, batch size and sequence length. The prompt is the sequence without sampled tokens.

    A later call measures the full cache again, because it may run on another machine.
    """
    size = sizes(small)
    named = caches(size.cache)
    cells = [(batch, length) for length in size.contexts for batch in size.served]
    cells.sort(key=lambda cell: cell[0] * cell[1])
    full: dict[tuple[int, int], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(shape, max_position_embeddings=max(size.contexts) * 2)
        for name in CACHES:
            wanted = [cell for cell in cells if not options.measured(cache=name, batch=cell[0], tokens=cell[1])]
            if name == "full" and _others_are_missing(options, cells):
                wanted = cells
            if not wanted:
                continue
            work = partial(_of_cache, config, name, named[name], wanted, device, small, Path(folder))
            for row in work():
                batch, length, speed = row.get("batch"), row.get("tokens"), row.get("decoding tokens/s")
                if name == "full" and speed is not None:
                    full[batch, length] = speed
                if speed is not None and (batch, length) in full:
                    row["ratio to full"] = speed / full[batch, length]
                if not options.measured(cache=name, batch=batch, tokens=length):
                    yield row
            free(device)


def _of_cache(
    config: Any, name: str, block: dict[str, Any], cells: list[tuple[int, int]], device: str, small: bool, folder: Path
) -> Iterator[Row]:
    """Yield the rows of one cache from one engine. When the generator has ended, nothing refers to the engine."""
    opened = attempt({}, partial(_opened, config, block, device, small, folder))
    if FAILURE in opened:
        yield {"cache": name, **opened}
        return
    engine = opened["engine"]
    try:
        for batch, length in cells:
            work = partial(_timed, engine, batch, length - sizes(small).generated, length)
            yield attempt({"cache": name, "batch": batch, "tokens": length}, work)
    finally:
        engine.close()


def free(device: str) -> None:
    """Give the memory of a closed engine back, so that the next engine finds it free."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _others_are_missing(options: Options, cells: list[tuple[int, int]]) -> bool:
    return any(
        not options.measured(cache=name, batch=batch, tokens=length) for name in CACHES[1:] for batch, length in cells
    )


def _opened(config: Any, block: dict[str, Any], device: str, small: bool, folder: Path) -> Row:
    """Return an engine for the largest batch and the longest sequence, after a warm-up."""
    size = sizes(small)
    engine = _engine(config, block, device, folder, max(size.served), max(size.contexts))
    engine.generate(random_prompts(2, 16), SamplingConfig(8, seed=0, ignore_eos=True))
    return {"engine": engine}


def _engine(
    config: Any, block: dict[str, Any], device: str, folder: Path, requests: int, length: int, **options: Any
) -> Any:
    """Return a vLLM engine with dummy weights. All caches without scorers share the weights, written to `folder`."""
    dtype, policy = dtype_name(device), make_policy(block)
    model = save_random_model(partial(random_model, config, dtype, 0, device), policy, folder)
    if device == "cuda":
        torch.cuda.empty_cache()
        options = {"gpu_memory_utilization": 0.85, **options}
    elif "blocks" not in options:
        options["kv_cache_gb"] = 0.1
    if (blocks := options.pop("blocks", None)) is not None:
        layers, heads, dim = cache_shape(config)
        options["kv_cache_gb"] = (blocks + 1) * BLOCK * 2 * layers * heads * dim * ITEMSIZE[dtype] / 2**30
    return make_engine(
        "vllm", model=str(model), policy=policy, dtype=dtype, max_batch=requests, max_model_len=length,
        block_size=BLOCK, exact=False, **options,
    )  # fmt: skip


def _timed(engine: Any, batch: int, prompt: int, length: int) -> Row:
    """Sample `batch` sequences up to `length` tokens. The speed of decoding is left out unless all ran at once and no
    prompt was read meanwhile. `at once` is a mean, `in flight` the maximum. The share of compaction is that of the time
    of decoding.
    """
    generated, counts = length - prompt, dict[str, int]()
    sample = partial(engine.generate, random_prompts(batch, prompt), SamplingConfig(generated, seed=0, ignore_eos=True))
    (measured,) = time_sampling(sample, batch, prompt, [length], observed=_counted(engine.llm, counts))
    row: Row = {"tokens/s": batch * generated / measured.seconds}
    all_at_once = counts["in flight"] == batch and not counts["preempted"]
    if all_at_once and 0 < measured.decode_steps < generated:  # more steps would read prompts
        row["decoding tokens/s"] = measured.decode_tokens / measured.decode_seconds
    row |= {**counts, "cache GB": measured.cache_bytes / 1e9, "at once": measured.at_once}
    if measured.decode_steps:
        row["share of compaction"] = measured.parts.get("compaction", 0.0) / measured.decode_seconds
    return row


@contextmanager
def _counted(llm: Any, counts: dict[str, int]) -> Iterator[None]:
    """Report the engine's steps to the running clock. Write the maximum number of used blocks and of running requests,
    and the number of preemptions, to `counts`.
    """
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free, preempted = pool.get_num_free_blocks(), set[tuple[str, int]]()
    counts |= {"peak blocks": 0, "in flight": 0, "preempted": 0}
    with observed(llm):
        reported_step = engine.step

        def step() -> Any:
            outputs = reported_step()
            preempted.update((one.request_id, one.num_preemptions) for one in scheduler.waiting if one.num_preemptions)
            counts["peak blocks"] = max(counts["peak blocks"], free - pool.get_num_free_blocks())
            counts["in flight"] = max(counts["in flight"], len(scheduler.running))
            counts["preempted"] = len(preempted)
            return outputs

        engine.step = step  # `observed` removes it
        yield


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


def modes(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each cache and mode: tokens/s, and the share of greedy tokens that come before the first
    difference from eager mode. On a CPU vLLM has no graphs, so the three modes are the same.
    """
    size = sizes(small)
    batch, length = size.served[0], size.contexts[0]
    config = config_of(size.small_model, max_position_embeddings=2 * length)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("gkv", "streaming", "kvpop"):
            if all(options.measured(cache=name, mode=mode) for mode in MODES):
                continue
            eager: list[list[int]] = []
            for mode in MODES:
                work = partial(_mode, config, caches(size.cache)[name], mode, device, Path(folder), size, eager)
                yield attempt({"cache": name, "mode": mode, "batch": batch, "tokens": length}, work)
                free(device)


def _mode(
    config: Any, block: dict[str, Any], mode: str, device: str, folder: Path, size: Any, eager: list[list[int]]
) -> Row:
    """Measure a mode. The first mode, eager, writes its greedy tokens to `eager`, for comparison with other modes."""
    from rollout.vllm.compat import arguments

    batch, length = size.served[0], size.contexts[0]
    plain = arguments.engine_arguments
    if mode == "eager":
        arguments.engine_arguments = lambda *given, **named: {**plain(*given, **named), "enforce_eager": True}
    try:
        engine = _engine(config, block, device, folder, batch, length, full_graphs=mode == "full graphs")
    finally:
        arguments.engine_arguments = plain
    try:
        compiled = engine.llm.llm_engine.vllm_config.compilation_config
        graphs = getattr(compiled.cudagraph_mode, "name", str(compiled.cudagraph_mode))
        greedy = SamplingConfig(size.generated, temperature=0, ignore_eos=True)
        prompts = random_prompts(min(GREEDY_REQUESTS, batch), min(GREEDY_PROMPT, length - size.generated))
        tokens = [rollout.completion_ids for rollout in engine.generate(prompts, greedy)]
        result = _timed(engine, batch, length - size.generated, length)
    finally:
        engine.close()
    if mode == MODES[0]:
        eager[:] = tokens
    row: Row = {"graphs": graphs, **result}
    if eager:
        row["same sequences"] = statistics.mean(ours == theirs for ours, theirs in zip(tokens, eager, strict=True))
        row["same tokens"] = statistics.mean(
            _common_prefix(ours, theirs) / len(theirs) for ours, theirs in zip(tokens, eager, strict=True)
        )
    return row


def _common_prefix(ours: list[int], theirs: list[int]) -> int:
    """Return the number of tokens before the first one that differs."""
    pairs = zip(ours, theirs, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(theirs))


# ---- equal memory ---------------------------------------------------------------------------------------------------


def equal_memory(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each cache: tokens/s with a pool of blocks for a quarter of the sequences without evictions."""
    size = sizes(small)
    batch, length = size.served[0], size.contexts[0] // (1 if small else 2)
    prompt = length // 8
    blocks = max(3, batch // 4) * -(-length // BLOCK)
    block_of = {key: value if key == "window" else value // 2 for key, value in size.cache.items()}
    full = None
    config = config_of(size.small_model, max_position_embeddings=2 * length)
    keys = {"requests": batch, "prompt": prompt, "tokens": length, "blocks of the pool": blocks}
    with tempfile.TemporaryDirectory() as folder:
        for name in CACHES:
            if options.measured(cache=name) and name != "full":
                continue
            block = caches(block_of)[name]
            work = partial(_filled, config, block, device, Path(folder), batch, (prompt, length), blocks)
            row = attempt({"cache": name, **keys}, work)
            full = row.get("tokens/s") if name == "full" else full
            if full and "tokens/s" in row:
                row["ratio to full"] = row["tokens/s"] / full
            if not options.measured(cache=name):
                yield row
            free(device)


def _filled(
    config: Any, block: dict[str, Any], device: str, folder: Path, batch: int, lengths: tuple[int, int], blocks: int
) -> Row:
    prompt, length = lengths
    engine = _engine(config, block, device, folder, batch, length, blocks=blocks)
    try:
        engine.generate(random_prompts(2, 16), SamplingConfig(8, seed=0, ignore_eos=True))
        return _timed(engine, batch, prompt, length)
    finally:
        engine.close()
