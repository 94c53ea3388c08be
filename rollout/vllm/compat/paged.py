"""How a layer's paged cache lies in memory, and what else a worker reads of the vLLM around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rollout.vllm.compat.arguments import on_cpu


def live_state() -> Any:
    """The CacheState of this process's engine; None where it evicts nothing."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "state", None) if has_kv_transfer_group() else None


def attention_layers(vllm_config: Any, names: Iterable[str]) -> dict[str, Any]:
    """The attention layers in the order of the model."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    return get_layers_from_vllm_config(vllm_config, Attention, sorted(names, key=extract_layer_index))


def keys_are_transposed() -> bool:
    """How this platform's kernels lay a cache out: see key_value_views."""
    return on_cpu()


def key_value_views(cache: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """A layer's cache as keys and values [blocks, Hkv, block size, D]: views, to read and to write.

    The cache is [blocks, Hkv, block size, 2 D], in any order in memory. FlashAttention and Triton hold key and value of
    a token side by side. `transposed`: a (block, head) is contiguous, and holds keys [D, block size], then values
    [block size, D], as on the CPU (isa "vec").
    """
    blocks, heads, size, double = cache.shape
    dim = double // 2
    if not transposed:
        keys, values = cache.split(dim, dim=-1)
        return keys, values
    flat = cache.view(blocks, heads, 2 * size * dim)
    keys, values = flat.split(size * dim, dim=-1)
    return keys.unflatten(-1, (dim, size)).transpose(-1, -2), values.unflatten(-1, (size, dim))


def read_blocks(paged: Tensor, blocks: Tensor) -> Tensor:
    """[blocks, Hkv, block size, ...] at int64 [R, n] -> [R, Hkv, n * block size, ...], copied in whole runs of memory.

    paged : keys or values of `key_value_views`, or what stands beside them. Transposed keys stay transposed.
    """
    rows, count = blocks.shape
    if paged.stride(-1) == 1:
        read = paged.index_select(0, blocks.flatten()).unflatten(0, (rows, count))
        return read.transpose(1, 2).flatten(2, 3)
    total, heads, size, dim = paged.shape
    per_block, per_head = paged.stride(0) // size, paged.stride(1) // size
    runs = paged.as_strided(((total - 1) * per_block + (heads - 1) * per_head + dim, size), (size, 1))
    head, row = torch.arange(heads, device=blocks.device), torch.arange(dim, device=blocks.device)
    at = blocks[:, None, None] * per_block + head[:, None, None] * per_head + row[:, None]  # [R, Hkv, D, n]
    return runs.index_select(0, at.flatten()).view(rows, heads, dim, -1).transpose(-1, -2)


def stored_scorers(vllm_config: Any) -> dict[str, Tensor]:
    """The scorers that the model's directory carries, by name."""
    from sparse_rl.models import directory

    return directory.stored_scorers(vllm_config.model_config.model)


def own_heads(count: int) -> slice:
    """The kv heads of this tensor-parallel rank, which has `count`, among those of all ranks."""
    from vllm.distributed import get_tensor_model_parallel_rank

    first = get_tensor_model_parallel_rank() * count
    return slice(first, first + count)


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean over tensor-parallel ranks, which hold equally many heads each."""
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

    ranks = get_tensor_model_parallel_world_size()
    return value if ranks == 1 else tensor_model_parallel_all_reduce(value.contiguous()) / ranks
