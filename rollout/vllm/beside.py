"""Bytes that a worker holds in addition to weights, cache and vLLM's own forward pass. Does not import vLLM.

vLLM gives its share of a GPU, minus the memory of its own forward pass and sampler, to the cache. vLLM does not count
the buffers of state.py and the float64 sampler of rollout/sampling.py. So vLLM gets a share from which the bytes of
these buffers and of this sampler were subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.vllm.folded import wide_head
from sparse_rl.attention.families import cache_shape
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE, cache_bytes

BLOCK = {"cuda": 16, "cpu": 32}  # tokens in a block of vLLM's cache
LOGIT = 2 * 4 + 8  # bytes per logit in sampling: float32 log-probs before and after top-k, and a float64 number


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
        """Return the share of a GPU with `total` bytes to give to vLLM, so that vLLM and our buffers fit into `share`.

        Raises UserError if `share` leaves no memory for vLLM.
        """
        vllm_share = (share - (self.requests + self.sampler) / total) / (1 + self.per_byte)
        if vllm_share <= 0:
            need = (self.requests + self.sampler) / 2**30
            raise UserError(
                f"{share:g} of {total / 2**30:.0f} GiB is too little: max_batch sequences need {need:.1f} GiB in "
                "addition to the cache; raise gpu_memory_utilization, or lower max_batch",
                "gpu_memory_utilization",
            )
        return vllm_share


def beside_cache(policy: Policy, config: Any, *, itemsize: int, max_batch: int, tensor_parallel: int = 1) -> Beside:
    """Compute the memory that each worker holds in addition to its cache.

    config : configuration of the model
    itemsize : bytes of a number in the cache
    """
    layers, kv_heads, head_dim = cache_shape(config)
    per_entry = 4 * (1 + len(policy.entry_memory)) if policy.schedule.evicts or policy.bias is not None else 0
    memory = policy.sequence_memory(kv_heads // tensor_parallel, head_dim).values()
    stored = policy.last_queries or int(policy.every_query)  # queries of each request
    queries = stored * (config.num_attention_heads // tensor_parallel) * head_dim * itemsize
    return Beside(
        per_byte=per_entry / (2 * head_dim * itemsize),
        requests=layers * (max_batch + 1) * (queries + sum(value.nbytes for value in memory)),  # 1: row for padding
        sampler=LOGIT * max_batch * config.vocab_size,
    )


def held_head(policy: Policy, head_dim: int, exact: bool, cuda: bool) -> int:
    """Return the head size of vLLM's cache, which is larger than the model's if the heads store a bias (folded.py).

    exact : True if attention is computed in float64
    """
    if policy.bias is None or exact:
        return head_dim
    return wide_head(head_dim, on_cpu=not cuda)


def pool_bytes(policy: Policy, given: dict[str, Any], config: Any, cuda: bool) -> int:
    """Return the bytes of one worker's cache for max_batch sequences of maximum length and one block for vLLM itself.

    given : options of `make_engine`
    config : configuration of the model
    """
    layers, kv_heads, head_dim = cache_shape(config)
    longest = given["max_model_len"] or config.max_position_embeddings
    block = BLOCK["cuda" if cuda else "cpu"]
    blocks = -(-policy.schedule.most_held(given["max_prompt"] or longest, longest) // block)
    exact = given["exact"] and given["dtype"] == "float32" and not cuda
    head, entries = held_head(policy, head_dim, exact, cuda), (given["max_batch"] * blocks + 1) * block
    return cache_bytes(entries, layers, kv_heads // given["tensor_parallel"], head, ITEMSIZE[given["dtype"]])
