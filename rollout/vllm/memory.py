"""Bytes that a worker holds in addition to weights, cache and vLLM's own forward pass. Does not import vLLM.

vLLM gives its share of a GPU, minus the memory of its own forward pass and sampler, to the cache. It does not count the
buffers of state.py and the float64 sampler of rollout/sampling.py, whose bytes are subtracted from that share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.engine import CPU_HEAD_SIZES
from rollout.sampling import Request
from sparse_rl.attention.families import cache_shape
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE, cache_bytes
from sparse_rl.trace.support import HELD

BLOCK = {"cuda": 16, "cpu": 32}  # tokens in a block of vLLM's cache
STEP = 8  # kernels on GPUs support head sizes that are multiples of STEP
# bytes per logit in top-p: a float32 log-prob, what a GPU sorts twice (value and index), and bits of recorded supports
LOGIT = 4 + 2 * (4 + 8) + HELD // 8


@dataclass(frozen=True)
class Beside:
    """GPU memory that one worker holds in addition to vLLM's cache.

    per_byte : bytes per byte of the cache, for the positions of its entries and the policy's state of each entry
    requests : bytes for the last queries of all requests, and for the policy's state of each request
    sampler : bytes while the next tokens of all requests are sampled
    """

    per_byte: float
    requests: int
    sampler: int

    def share(self, share: float, total: int) -> float:
        """Return the share of a GPU with `total` bytes for vLLM alone, so that it and our buffers fit into `share`."""
        need = self.requests + self.sampler
        vllm_share = (share - need / total) / (1 + self.per_byte)
        if vllm_share <= 0:
            wrong = f"max_batch sequences need {need / 2**30:.1f} GiB in addition to the cache"
            wrong = f"{share:g} of {total / 2**30:.0f} GiB is too little: {wrong}"
            raise UserError(f"{wrong}; raise gpu_memory_utilization, or lower max_batch", "gpu_memory_utilization")
        return vllm_share


def most_holders(policy: Policy, max_batch: int) -> int:
    """Return the maximum number of prompts that are held for groups (`Holder` in scheduler.py), beside `max_batch`
    sequences.
    """
    return -(-max_batch // 8) if policy.schedule.evicts else 0


def prompt_groups(requests: Sequence[Request], policy: Policy, vllm_config: Any) -> Iterable[list[Request]]:
    """Return requests in groups whose prompt is prefilled once. A cache that evicts must have room for the prompt and
    two samples. A full cache needs no groups: vLLM's prefix caching finds equal prompts.
    """
    if not policy.schedule.evicts:
        return [[request] for request in requests]
    groups: dict[Any, list[Request]] = {}
    cache, longest = vllm_config.cache_config, vllm_config.model_config.max_model_len
    for request in requests:
        prompt = len(request.tokens)
        held = policy.schedule.most_held(prompt, longest)
        blocks = -(-(prompt - 1) // cache.block_size) + 2 * -(-held // cache.block_size)
        fits = prompt > 1 and blocks < cache.num_gpu_blocks  # one block is vLLM's own
        fits = fits and request.held is None
        groups.setdefault(tuple(request.tokens) if fits else request.place, []).append(request)
    return groups.values()


def beside_cache(policy: Policy, config: Any, *, itemsize: int, max_batch: int, tensor_parallel: int = 1) -> Beside:
    """Compute the memory that each worker holds in addition to its cache, for numbers of `itemsize` bytes."""
    _, _, head_dim = cache_shape(config)
    rows = max_batch + most_holders(policy, max_batch) + 1  # 1: for padding
    return Beside(
        per_byte=_per_entry(policy) / (2 * head_dim * itemsize),
        requests=rows * _per_request(policy, config, itemsize, tensor_parallel),
        sampler=LOGIT * max_batch * config.vocab_size,
    )


def _per_entry(policy: Policy) -> int:
    """Return the bytes of an entry's position and state."""
    return 4 * (1 + len(policy.entry_memory)) if policy.schedule.evicts or policy.bias is not None else 0


def _per_request(policy: Policy, config: Any, itemsize: int, tensor_parallel: int = 1) -> int:
    """Return the bytes of a request's last queries, and of the policy's state of the request."""
    layers, kv_heads, head_dim = cache_shape(config)
    memory = policy.sequence_memory(kv_heads // tensor_parallel, head_dim).values()
    stored = policy.last_queries or int(policy.every_query)
    queries = stored * (config.num_attention_heads // tensor_parallel) * head_dim * itemsize
    return layers * (queries + sum(value.nbytes for value in memory))


def kept_bytes(policy: Policy, config: Any, conversations: int, *, itemsize: int, cuda: bool) -> int:
    """Return the bytes of host memory, in all workers together, of kept conversations. While a turn is sampled, the
    workers have the entries over which it is sampled, and those that it leaves.
    """
    if (peak := policy.schedule.peak) is None or not policy.schedule.evicts:  # vLLM refuses a cache without a peak
        return 0
    block = BLOCK["cuda" if cuda else "cpu"]
    return 2 * conversations * conversation_bytes(policy, config, peak - 1, itemsize=itemsize, block=block)


def conversation_bytes(policy: Policy, config: Any, entries: int, *, itemsize: int, block: int) -> int:
    """Return the bytes of host memory, in all workers together, of a kept conversation with `entries` per kv head."""
    layers, kv_heads, head_dim = cache_shape(config)
    entries = -(-entries // block) * block
    unit = cache_bytes(entries, layers, kv_heads, head_dim, itemsize) + layers * kv_heads * entries * _per_entry(policy)
    return unit + _per_request(policy, config, itemsize)


def wide_head(head_dim: int, on_cpu: bool) -> int:
    """Return the smallest supported head size above `head_dim`. Raises UserError if there is none."""
    if not on_cpu:
        return (head_dim // STEP + 1) * STEP
    if head_dim >= CPU_HEAD_SIZES[-1]:
        wrong = f"this policy stores biases in wider heads, and vLLM on a CPU has no head size above {head_dim}"
        raise UserError(f"{wrong}; choose another policy, or the hf engine", "cache.policy")
    return next(size for size in CPU_HEAD_SIZES if size > head_dim)


def held_head(policy: Policy, head_dim: int, exact: bool, cuda: bool) -> int:
    """Return the head size of vLLM's cache, wider than the model's if the heads store a bias (compat/paged.py), which
    they do not if attention is computed in float64 (`exact`).
    """
    return head_dim if policy.bias is None or exact else wide_head(head_dim, on_cpu=not cuda)


def pool_bytes(policy: Policy, given: dict[str, Any], config: Any, cuda: bool) -> int:
    """Return the bytes of one worker's cache for max_batch sequences of maximum length, under a policy that evicts a
    prompt that is held for a group, and one block for vLLM itself, with the options `given` to `make_engine`.
    """
    layers, kv_heads, head_dim = cache_shape(config)
    longest = given["max_model_len"] or config.max_position_embeddings
    block = BLOCK["cuda" if cuda else "cpu"]
    blocks = -(-policy.schedule.most_held(given["max_prompt"] or longest, longest) // block)
    exact = given["exact"] and given["dtype"] == "float32" and not cuda
    sequences, head = given["max_batch"] + policy.schedule.evicts, held_head(policy, head_dim, exact, cuda)
    entries = (sequences * blocks + 1) * block
    return cache_bytes(entries, layers, kv_heads // given["tensor_parallel"], head, ITEMSIZE[given["dtype"]])
