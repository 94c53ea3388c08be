"""Compactions on a 7B model's shape: their time and kernel launches, and their share of decoding in the hf engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.shapes import config_of, dtype_name, dummy_model, random_prompts, sizes
from benchmarks.gpu.timing import interleaved
from benchmarks.gpu.worker import Options, Row, attempt
from benchmarks.matching import entries
from rollout import SamplingConfig
from rollout.hf import HFEngine
from rollout.timing.sampling import time_sampling
from rollout.vllm.compacting import folded_rows
from sparse_rl.attention.families import cache_shape
from sparse_rl.models.random_weights import attach_random_scorers
from sparse_rl.policies import make_policy

REPETITIONS = 2


def caches(cache: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return name -> the recipe's block of each cache that is compared.

    cache : budget, period and window; KVpop, which decides at every token, holds as many entries as the others do at
        their peak
    """
    size = {"budget": cache["budget"], "period": cache["period"]}
    scored = {**size, "window": cache["window"]}
    peak, window = cache["budget"] + cache["period"], min(64, cache["budget"] // 4)
    return {
        "full": {"policy": "full"},
        "streaming": {"policy": "streaming", **size},
        "gkv": {"policy": "gkv", **scored},
        "gkv, no redundancy": {"policy": "gkv", "redundancy": False, **scored},
        "am": {"policy": "am", **scored},
        "kvpop": {"policy": "kvpop", "budget": peak, "window": window, "scorer": {"name": "mlp"}},
    }


def compaction(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each policy and number of requests: a compaction of all layers, batched as in our vLLM engine."""
    size = sizes(small)
    config = config_of(size.large_model)
    for requests in size.requests:
        for name, block in caches(size.cache).items():
            keys = {"requests": requests, "cache": name}
            if name not in ("full", "kvpop") and not options.measured(**keys):
                yield attempt(keys, partial(_compaction, requests, block, config, device, size.runs))


def _compaction(requests: int, block: dict[str, Any], config: Any, device: str, runs: int) -> Row:
    policy, shape = make_policy(block), cache_shape(config)
    layers, kv_heads, dim = shape
    held = policy.schedule.peak
    assert held is not None
    at_once = min(folded_rows(held, requests, shape, device), layers * requests)
    group = config.num_attention_heads // kv_heads
    given = entries(policy, held, at_once, (kv_heads, group, dim), device, getattr(torch, dtype_name(device)))
    calls = -(-layers * requests // at_once)

    @torch.no_grad()
    def work() -> None:
        for _ in range(calls):
            policy.compact(0, given)

    times = interleaved({"compaction": work}, device, runs)["compaction"]
    if isinstance(times, str):
        raise RuntimeError(times)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    launches = _launches(work, device)
    median = statistics.median(times)
    row = {"ms": median, "spread": (max(times) - min(times)) / median, "calls": calls, **launches}
    if device == "cuda":
        row["temporary GB"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return {**row, "ms per token of a sequence": median / (held - policy.schedule.left(0, 0)), "held": held}


def _launches(work: Callable[[], Any], device: str) -> dict[str, int]:
    """Count the kernels that a GPU runs for `work`; on a CPU, the operators."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * (device == "cuda"))]
    with profile(activities=activities) as profiled:
        work()
        if device == "cuda":
            torch.cuda.synchronize()
    events = profiled.events() or []
    if device == "cuda":
        return {"kernel launches": sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events)}
    return {"operators": sum(event.name.startswith("aten::") and event.cpu_parent is None for event in events)}


def decoding(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each policy and number of requests: tokens/s of decoding, and compaction's share of the time."""
    size = sizes(small)
    config = config_of(size.large_model)
    model = dummy_model(config, device, dtype_name(device))
    for requests in size.requests:
        named = caches(size.cache)
        if all(options.measured(requests=requests, cache=name) for name in named):
            continue
        runs: dict[str, list[Row]] = {name: [] for name in named}
        failures: dict[str, Row] = {}
        for repetition in range(REPETITIONS + 1):  # the first is a warm-up
            for name, block in named.items():
                if name not in failures:
                    row = attempt({}, partial(_decoded, model, block, requests, size.decoded))
                    if "failure" in row:
                        failures[name] = row
                    elif repetition:
                        runs[name].append(row)
        yield from _summed(requests, runs, failures)


def _decoded(model: Any, block: dict[str, Any], requests: int, lengths: tuple[int, int]) -> Row:
    """Sample after random prompts. The times do not include the reading of the prompts."""
    prompt, generated = lengths
    policy = make_policy(block)
    attach_random_scorers(model, policy)
    engine = HFEngine(model, policy, max_batch=requests)
    sample = partial(
        engine.generate, random_prompts(requests, prompt), SamplingConfig(generated, seed=0, ignore_eos=True)
    )
    (measured,) = time_sampling(sample, requests, prompt, [prompt + generated])
    seconds = measured.decode_seconds
    return {
        "tokens/s": measured.decode_tokens / seconds, "ms per step": seconds / measured.decode_steps * 1e3,
        "share of compaction": measured.parts.get("compaction", 0.0) / seconds, "cache MB": measured.cache_bytes / 1e6,
    }  # fmt: skip


def _summed(requests: int, runs: dict[str, list[Row]], failures: dict[str, Row]) -> Iterator[Row]:
    """Yield the medians of each cache, and the median ratio of its speed to the full cache's in the same repetition."""
    for name, own in runs.items():
        keys = {"requests": requests, "cache": name}
        if name in failures or not own:
            yield {**keys, **failures.get(name, {})}
            continue
        row = {key: statistics.median(run[key] for run in own) for key in own[0]}
        speeds = [run["tokens/s"] for run in own]
        row["spread"] = (max(speeds) - min(speeds)) / row["tokens/s"]
        if len(runs["full"]) == len(own):
            pairs = zip(own, runs["full"], strict=True)
            row["ratio to full"] = statistics.median(run["tokens/s"] / full["tokens/s"] for run, full in pairs)
        yield {**keys, **row}
