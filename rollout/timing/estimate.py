"""About how long sampling and compactions will take on this machine, from short measurements of the machine.

The estimate counts the bytes and operations of weights, keys and values, and the overhead of a layer and of a step. It
does not count the policies' own computations. It is meant to tell minutes from hours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import Qwen3Config

from rollout.config import SamplingConfig
from rollout.context.config import PromptCacheConfig
from rollout.context.memory import reference_queries
from rollout.hf import HFEngine
from rollout.timing.sampling import now, time_sampling
from sparse_rl.attention.families import policy_shape, windows_of
from sparse_rl.models.random_weights import random_model
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE, cache_bytes, window_bytes
from sparse_rl.policies.registry import make_policy

STEPS = 24  # decode steps of a tiny model
EXACT = 6  # times as many bytes are moved if float32 attention is computed in float64 (read 4, write 8, read 8 + 4)
START = 8.0  # seconds to start vLLM
QUERY_PASSES = {"repeat": 3, "self_study": 1}  # attention of a kind of queries, in units of half a T x T product


@dataclass(frozen=True)
class Machine:
    """Speed of a machine: operations/s of a matrix product, and bytes/s of memory; and the seconds that a decode step
    of the hf engine takes in addition to its arithmetic, for each layer and for the whole step.
    """

    operations: float
    bandwidth: float
    layer: float
    step: float


def measured_machine(dtype: str, device: str) -> Machine:
    """Measure this machine, which takes a few seconds."""
    size = 4096 if device == "cuda" else 768
    square = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
    large = torch.ones(2**26 if device == "cuda" else 2**23, device=device)
    product = _fastest(lambda: square @ square)
    copy = _fastest(lambda: large.clone())
    few, many = _step_seconds(2, device), _step_seconds(6, device)
    layer = max(many - few, 0.0) / 4
    return Machine(2 * size**3 / product, 2 * large.nbytes / copy, layer, max(few - 2 * layer, 0.0))


def _step_seconds(layers: int, device: str) -> float:
    """Return the seconds of a decode step of a tiny model with some layers."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    engine = HFEngine(random_model(config, "float32", 0, device), make_policy("full"))
    sampling = SamplingConfig(STEPS, seed=0, ignore_eos=True)
    (measured,) = time_sampling(partial(engine.generate, [[1]], sampling), 1, 1, [1 + STEPS])
    return measured.decode_seconds / measured.decode_steps


def _fastest(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(4):  # the first is a warm-up
        start = now()
        work()
        seconds.append(now() - start)
    return min(seconds[1:])


def sampling_seconds(
    machine: Machine, config: Any, parameters: int, policy: Policy, batch: int, prompt: int, length: int,
    dtype: str, exact: bool,
) -> float:  # fmt: skip
    """Estimate the seconds in which `batch` sequences are sampled up to `length` tokens.

    parameters : number of the model's parameters
    exact : True if float32 attention is computed in float64
    """
    layers, kv_heads, dim = policy_shape(config)
    itemsize, steps = ITEMSIZE[dtype], length - prompt
    mean = (prompt + length) / 2
    peak = policy.schedule.peak
    held = mean if peak is None else min(mean, peak)
    of_sequence = cache_bytes(round(held), layers, kv_heads, dim, itemsize)
    of_sequence += window_bytes(config, round(mean), itemsize)
    moved = batch * of_sequence * (EXACT if exact else 1)
    weights = max(parameters * itemsize / machine.bandwidth, 2 * parameters * batch / machine.operations)
    step = weights + moved / machine.bandwidth + config.num_hidden_layers * machine.layer + machine.step
    return 2 * parameters * batch * prompt / machine.operations + steps * step


def context_seconds(
    machine: Machine, config: Any, parameters: int, compaction: PromptCacheConfig, tokens: int
) -> float:
    """Estimate the seconds in which a context of `tokens` tokens is read and compacted."""
    layers, kv_heads, dim = policy_shape(config)
    heads = config.num_attention_heads
    readings = 1 + ("repeat" in compaction.queries) * compaction.chooses
    part = -(-tokens // len(compaction.parts(tokens)))
    passes = sum(QUERY_PASSES.get(kind, 0) for kind in compaction.queries) * compaction.chooses
    pairs = tokens * (tokens + passes * part)
    pairs_in_windows = (1 + passes) * tokens * sum(min(2 * window, tokens) for window in windows_of(config))
    read = 2 * parameters * tokens * readings + heads * 2 * dim * (layers * pairs + pairs_in_windows)
    if not compaction.chooses:
        return read / machine.operations
    queries = min(reference_queries(compaction, tokens, heads // kv_heads), compaction.most_queries)
    kept = compaction.kept(tokens)
    fit = 6 * queries * tokens * dim + 4 * queries * kept * min(kept, part)
    fit += 30 * 8 * queries * tokens  # passes over the logits
    if compaction.pursues:
        fit += 2 * queries * kept * part
    return (read + 2 * layers * kv_heads * fit) / machine.operations  # twice: float64
