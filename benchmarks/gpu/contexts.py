"""The one-time compaction of a long context: prefill, reference queries, and compaction by two ways to select keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.shapes import config_of, dtype_name, dummy_model, random_prompts, sizes
from benchmarks.gpu.worker import FAILURE, Options, Row, attempt
from rollout import make_engine
from rollout.context import PromptCacheConfig

RATIO = 0.05


def one_shot(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each stage: its seconds, and the peak of GPU memory so far."""
    size = sizes(small)
    config = config_of(size.small_model, max_position_embeddings=4 * size.context)
    keys = {"tokens": size.context, "layers": config.num_hidden_layers, "dtype": dtype_name(device)}
    engine: Any = make_engine("hf", model=dummy_model(config, device, dtype_name(device)), policy="full")
    (tokens,) = random_prompts(1, size.context)
    studied: list[Any] = []

    def study() -> Row:
        studied.append(engine.study(tokens, _config("attention", size.context_queries)))
        return {**{f"{name} s": seconds for name, seconds in studied[0].seconds.items()}, **_memory(device)}

    first = attempt({**keys, "stage": "prefill and repeat"}, study)
    yield first
    if FAILURE in first:
        return
    for select in ("attention", "omp"):
        part = studied[0].parts[0][1] if hasattr(studied[0], "parts") else studied[0]
        row = {**keys, "stage": f"compaction, {select}", "queries": part.queries[0].shape[2]}
        yield attempt(row, partial(_compacted, studied[0], _config(select, size.context_queries), device))


def _config(select: str, queries: int) -> PromptCacheConfig:
    return PromptCacheConfig(ratio=RATIO, select=select, most_queries=queries)  # type: ignore[arg-type]


@torch.no_grad()
def _compacted(studied: Any, config: PromptCacheConfig, device: str) -> Row:
    context = studied.compacted(config)
    return {"compaction s": context.seconds["compaction"], "kept entries": context.entries, **_memory(device)}


def _memory(device: str) -> Row:
    return {"peak GB": torch.cuda.max_memory_allocated() / 1e9} if device == "cuda" else {}
