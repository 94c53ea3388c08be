"""How much is compacted at once in vLLM, and the bytes that this takes for a moment; without vLLM."""

from __future__ import annotations

from sparse_rl.kernels.redundancy import redundancy_bytes
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE

AT_ONCE = {"cuda": 2**27, "cpu": 2**17}  # elements of keys of several layers; on a CPU they are to stay in its cache
MOST = 2**27  # of the requests of one layer that are compacted at once


def folded_rows(entries: int, requests: int, shape: tuple[int, int, int], device: str) -> int:
    """How many (request, layer) pairs vllm compacts in one call, of requests that are due together.

    entries : that each holds in a kv head; shape : (layers, kv heads, head dim)
    """
    layers, kv_heads, head_dim = shape
    one = entries * kv_heads * head_dim
    requests = min(requests, max(1, MOST // one))
    return requests * min(layers, max(1, AT_ONCE[device] // (requests * one)))


def folded_bytes(
    policy: Policy, rows: int, entries: int, kv_heads: int, head_dim: int, group: int, dtype: str, device: str
) -> int:
    """The transient of vllm's compaction of `folded_rows`, or of H2O's observation, beside redundancy and fits.

    group : query heads of a kv head; dtype : of the cache

    What a policy declares that it reads, of keys and values, is copied once more as it becomes one run of memory. Where
    queries score, keys are converted to float32, and logits of the window's queries stand beside their softmax. Where
    none do, the score is taken to make three arrays like the keys in float64. A fit has keys and values beside copies
    of them in order. A policy that declares nothing reads only the entries that move, and their places. And of each
    entry its position and a few more numbers.
    """
    itemsize = ITEMSIZE[dtype]
    keys, window = itemsize * head_dim, policy.last_queries or int(policy.every_query)
    reads = max(len(policy.score_reads), len(policy.observe_reads) if policy.every_query else 0)
    remembered = 8 + 4 * len(policy.entry_memory)
    if policy.bias is not None:
        queries, each = itemsize, 4 * keys + 32 + remembered
    elif window:
        queries, logits = 4 + itemsize, 4 * group * window
        converted = 4 * head_dim if itemsize < 4 else 0
        read = reads * keys
        each = max(read + keys, read + converted + logits, read + 2 * logits) + remembered
    elif reads:
        queries, each = 0, reads * keys + 24 * head_dim + remembered
    else:
        left = policy.schedule.budget
        moved = max(min(left, entries - left), 0) / entries
        queries, each = 0, int((keys + 48) * moved) + 24
    largest = rows * kv_heads * (entries * each + group * window * head_dim * queries)
    similar = redundancy_bytes(entries, kv_heads, head_dim, rows, device, dtype) if policy.compares_keys else 0
    # similarities are made while the keys are there
    return max(largest - similar, rows * kv_heads * entries * (keys + 16 + remembered)) if similar else largest
