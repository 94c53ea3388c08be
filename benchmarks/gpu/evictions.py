"""Evictions for the stages that replay a trace: from a user's trace, or recorded on this device with dummy weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from benchmarks.gpu.shapes import VOCABULARY, config_of, dtype_name, dummy_model, random_prompts, sizes
from benchmarks.gpu.worker import NotRunError, Options
from rollout import SamplingConfig, make_engine
from sparse_rl.trace import NEVER, EvictionTrace, load_traces

PROMPT, PERIOD, WINDOW = 128, 128, 16


def evictions(device: str, small: bool, options: Options, length: int) -> tuple[torch.Tensor, str]:
    """Return evict_at int32 [Hkv, length] of one layer, on the device, and the origin of the evictions in words.

    A shorter sequence gets the beginning of a longer trace, which is exact because evictions are causal.
    """
    trace, origin = _trace(device, small, options, length)
    evict_at = trace.evict_at[trace.layers // 2, :, :length]
    evict_at = evict_at.masked_fill(evict_at >= length - 1, NEVER)
    return evict_at.to(device).contiguous(), origin


def _trace(device: str, small: bool, options: Options, length: int) -> tuple[EvictionTrace, str]:
    if options.trace is None:
        size = sizes(small)
        file = options.folder / f"gkv_{size.budget}_{max(size.lengths)}.safetensors"
        if not file.exists():
            _record(device, small, max(size.lengths), file)
        return EvictionTrace.load(file), f"synthetic: gkv, budget {size.budget}, dummy weights"
    files = sorted(options.trace.rglob("*.safetensors"))
    traces = [(trace, file.name) for file in files for trace in load_traces(file)]
    long_enough = [(trace, name) for trace, name in traces if len(trace) >= length]
    if not long_enough:
        longest = max((len(trace) for trace, _ in traces), default=0)
        raise NotRunError(f"{options.trace} has no trace of {length} tokens; its longest trace has {longest}")
    return min(long_enough, key=lambda pair: len(pair[0]))


def _record(device: str, small: bool, length: int, file: Path) -> None:
    """Let the hf engine decode random tokens under gkv with one layer of the large model's attention."""
    size = sizes(small)
    heads, kv_heads, dim = size.heads
    config = config_of(
        size.large_model, num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim,
        intermediate_size=256, vocab_size=VOCABULARY, max_position_embeddings=2 ** math.ceil(math.log2(length)),
    )  # fmt: skip
    policy = {"policy": "gkv", "budget": size.budget, "window": WINDOW, "period": min(PERIOD, size.budget // 2)}
    engine = make_engine("hf", model=dummy_model(config, device, dtype_name(device)), policy=policy)
    (tokens,) = random_prompts(1, length)
    prompt = min(PROMPT, length // 2)
    with torch.no_grad():
        (rollout,) = engine.simulate([tokens[:prompt]], [tokens[prompt:]], SamplingConfig(1).temperature)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new.safetensors")
    rollout.trace.save(new)
    new.replace(file)
