"""Limits on the entries that one call compacts, and the temporary bytes of a compaction. Does not import vLLM."""

from __future__ import annotations

from sparse_rl.kernels.redundancy import redundancy_bytes
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE

# Maximum key elements per call for several layers. On a CPU, this number of elements fits into a core's cache.
AT_ONCE = {"cuda": 2**27, "cpu": 2**17}
MOST = 2**27  # maximum key elements per call for one layer


def folded_rows(entries: int, requests: int, shape: tuple[int, int, int], device: str) -> int:
    """Return the number of (request, layer) pairs that one call compacts.

    entries : number of entries that each request holds
    requests : number of requests that are compacted after the same forward pass
    shape : (number of layers, kv heads per layer, head size)
    """
    layers, kv_heads, head_dim = shape
    elements = entries * kv_heads * head_dim
    requests = min(requests, max(1, MOST // elements))
    return requests * min(layers, max(1, AT_ONCE[device] // (requests * elements)))


def folded_bytes(
    policy: Policy, rows: int, entries: int, kv_heads: int, head_dim: int, group: int, dtype: str, device: str
) -> int:
    """Return the temporary bytes of one call that compacts `rows` (request, layer) pairs, or observes their queries,
    without the bytes of redundancy scores and of fits.

    entries : number of entries that each row holds
    group : query heads per kv head
    dtype : dtype of the cache

    The keys and values that a policy reads are copied once more to become contiguous. If the policy scores with
    queries, keys are converted to float32, and the logits of the last queries exist at the same time as their softmax.
    If the policy scores without queries, three float64 arrays of the keys' shape are assumed. A fit (Attention
    Matching) holds keys and values, and ordered copies of both. If a policy reads nothing, only the entries that move
    are read. Each entry also takes the bytes of its position and of a few more numbers.
    """
    itemsize = ITEMSIZE[dtype]
    keys, window = itemsize * head_dim, policy.last_queries or int(policy.every_query)
    reads = max(len(policy.score_reads), len(policy.observe_reads) if policy.every_query else 0)
    state = 8 + 4 * len(policy.entry_memory)
    if policy.bias is not None:
        queries, per_entry = itemsize, 4 * keys + 32 + state
    elif window:
        queries, logits = 4 + itemsize, 4 * group * window
        converted = 4 * head_dim if itemsize < 4 else 0
        read = reads * keys
        per_entry = max(read + keys, read + converted + logits, read + 2 * logits) + state
    elif reads:
        queries, per_entry = 0, reads * keys + 24 * head_dim + state
    else:
        budget = policy.schedule.budget
        moved = max(min(budget, entries - budget), 0) / entries
        queries, per_entry = 0, int((keys + 48) * moved) + 24
    largest = rows * kv_heads * (entries * per_entry + group * window * head_dim * queries)
    similar = redundancy_bytes(entries, kv_heads, head_dim, rows, device, dtype) if policy.compares_keys else 0
    # similarities are computed while the keys are in memory
    return max(largest - similar, rows * kv_heads * entries * (keys + 16 + state)) if similar else largest
