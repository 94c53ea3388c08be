"""Memory layout of a layer's paged cache, and other data that a worker reads from vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rollout.vllm.compat.arguments import on_cpu


def live_state() -> Any:
    """Return the CacheState of this process's engine; None if the engine uses vLLM's own full cache."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "state", None) if has_kv_transfer_group() else None


def attention_layers(vllm_config: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return name -> attention layer, in the model's order."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    return get_layers_from_vllm_config(vllm_config, Attention, sorted(names, key=extract_layer_index))


def keys_are_transposed() -> bool:
    """Return True if this platform's kernels store transposed keys (see `key_value_views`)."""
    return on_cpu()


def key_value_views(cache: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return keys and values of a layer's cache as writable views [number of blocks, Hkv, block size, D].

    cache : [number of blocks, Hkv, block size, 2 D], in any order in memory
    transposed : True if each kv head in each block holds keys [D, block size], then values [block size, D], as on the
        CPU (isa "vec"); False if a token's key and value are next to each other, as in FlashAttention and Triton
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
    """Return a copy [R, Hkv, n x block size, ...] of the blocks [R, n] of R requests.

    Memory is copied in contiguous runs, and transposed keys stay transposed in memory.

    paged : [number of blocks, Hkv, block size, ...], keys or values of `key_value_views`, or a buffer of ours
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
    """Return the weights of the scorers stored with the model, by name."""
    from sparse_rl.models import directory

    return directory.stored_scorers(vllm_config.model_config.model)


def own_heads(count: int) -> slice:
    """Return the slice of this tensor-parallel rank's `count` kv heads among those of all ranks."""
    from vllm.distributed import get_tensor_model_parallel_rank

    first = get_tensor_model_parallel_rank() * count
    return slice(first, first + count)


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean over the tensor-parallel ranks."""
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

    ranks = get_tensor_model_parallel_world_size()
    return value if ranks == 1 else tensor_model_parallel_all_reduce(value.contiguous()) / ranks
