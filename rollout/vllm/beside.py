"""What a worker holds beside its weights, its cache and vLLM's own forward, in bytes; without torch and vLLM.

vLLM measures its own forward and sampler, and gives what is left of its share of a GPU to the cache. What stands beside
the cache (state.py) and the sampler in float64 (rollout/sampling.py) come on top. So they are taken off the share
before vLLM is told of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.vllm.folded import wide_head
from sparse_rl.attention.families import cache_shape
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE, cache_bytes

BLOCK = {"cuda": 16, "cpu": 32}  # tokens, of vllm's cache
LOGIT = 2 * 4 + 8  # while a token is drawn: a log-prob before and after top-k in float32, and a number in float64


@dataclass(frozen=True)
class Beside:
    """What one worker holds of a GPU's memory beside vLLM's cache.

    per_byte : of each byte of the cache: the positions of its entries, and the policy's memory
    requests : bytes of the last queries of all requests, and of what the policy remembers of them
    sampler : bytes while the next tokens of all requests are drawn
    """

    per_byte: float
    requests: int
    sampler: int

    def share(self, share: float, total: int) -> float:
        """The share of a GPU of `total` bytes that vLLM may plan with, for all of it to fit into `share`."""
        left = (share - (self.requests + self.sampler) / total) / (1 + self.per_byte)
        if left <= 0:
            need = (self.requests + self.sampler) / 2**30
            raise UserError(
                f"{share:g} of {total / 2**30:.0f} GiB is less than what max_batch sequences take beside the cache, "
                f"{need:.1f} GiB; raise it, or lower max_batch",
                "gpu_memory_utilization",
            )
        return left


def beside_cache(policy: Policy, config: Any, *, itemsize: int, max_batch: int, tensor_parallel: int = 1) -> Beside:
    """What stands beside the cache of each worker.

    config : the model's; itemsize : bytes of a number in the cache
    """
    layers, kv_heads, head_dim = cache_shape(config)
    per_entry = 4 * (1 + len(policy.entry_memory)) if policy.schedule.evicts or policy.bias is not None else 0
    own = policy.sequence_memory(kv_heads // tensor_parallel, head_dim).values()
    remembered = policy.last_queries or int(policy.every_query)  # queries of each request
    queries = remembered * (config.num_attention_heads // tensor_parallel) * head_dim * itemsize
    return Beside(
        per_byte=per_entry / (2 * head_dim * itemsize),
        requests=layers * (max_batch + 1) * (queries + sum(value.nbytes for value in own)),  # a row is nobody's
        sampler=LOGIT * max_batch * config.vocab_size,
    )


def held_head(policy: Policy, head_dim: int, exact: bool, cuda: bool) -> int:
    """The head size of vllm's cache: wider than the model's where a bias is stored in the heads (folded.py).

    exact : whether attention is computed in float64
    """
    if policy.bias is None or exact:
        return head_dim
    return wide_head(head_dim, on_cpu=not cuda)


def pool_bytes(policy: Policy, given: dict[str, Any], config: Any, cuda: bool) -> int:
    """The cache of one worker of vllm that all sequences can fill, each at its longest; one block is vLLM's own.

    given : what `make_engine` is given; config : the model's
    """
    layers, kv_heads, head_dim = cache_shape(config)
    longest = given["max_model_len"] or config.max_position_embeddings
    block = BLOCK["cuda" if cuda else "cpu"]
    blocks = -(-policy.schedule.most_held(given["max_prompt"] or longest, longest) // block)
    exact = given["exact"] and given["dtype"] == "float32" and not cuda
    head, entries = held_head(policy, head_dim, exact, cuda), (given["max_batch"] * blocks + 1) * block
    return cache_bytes(entries, layers, kv_heads // given["tensor_parallel"], head, ITEMSIZE[given["dtype"]])
