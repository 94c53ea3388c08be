"""The paged cache of a layer: its layout in memory, attention over it as the trainer computes it, and its biases.

*Exact attention* (float32 on a CPU): vLLM's CPU kernel is exact to about 1e-7 per layer, but a trained model amplifies
that to more than 1e-5 in log-probs. `sparse_rl.kernels.exact` computes in float64. Other dtypes use vLLM's kernel.

*Biases in kernels that do not support them*: an additional coordinate of each key holds its bias. For a query q, a key
k, a value v, the bias b of the key, the factor `scale` on the logits and a constant c:

    q' = [q, c, 0 ...],    k' = [k, b / (c scale), 0 ...],    v' = [v, 0 ...]:    q' . k' scale = q . k scale + b

So the kernels and their cache have wider heads than the model; policies see the model's own heads. With c = 1 / scale,
the additional coordinate of k' is the bias itself, rounded to the cache's dtype. The only other rounding is that of c.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.vllm.compat.arguments import on_cpu
from sparse_rl.kernels.exact import sdpa

NOBODYS = 0  # vLLM's null block, which no request ever owns: padding is written to it
ELEMENTS = 2**18  # key elements that exact attention gathers at a time: 2 MiB in float64, which fit into a core's cache


def live_state() -> Any:
    """Return the CacheState of this process's engine; None if the engine uses vLLM's own full cache."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "state", None) if has_kv_transfer_group() else None


def attention_layers(vllm_config: Any, names: Iterable[str]) -> dict[str, Any]:
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    return get_layers_from_vllm_config(vllm_config, Attention, sorted(names, key=extract_layer_index))


def keys_are_transposed() -> bool:
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
    """Return a copy [R, Hkv, n x block size, ...] of the blocks [R, n] of R requests of `paged` [number of blocks, Hkv,
    block size, ...], in contiguous runs: transposed keys stay transposed in memory.
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


def own_heads(count: int) -> slice:
    """Return the slice of this tensor-parallel rank's `count` kv heads among those of all ranks."""
    from vllm.distributed import get_tensor_model_parallel_rank

    first = get_tensor_model_parallel_rank() * count
    return slice(first, first + count)


def mean_over_ranks(value: Tensor) -> Tensor:
    from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

    ranks = get_tensor_model_parallel_world_size()
    return value if ranks == 1 else tensor_model_parallel_all_reduce(value.contiguous()) / ranks


def widened(x: Tensor, width: int, coordinate: float = 0.0) -> Tensor:
    """Return [T, H, width]: the D coordinates of each head of x [T, H, D], then `coordinate`, then zeros."""
    wide = F.pad(x, (0, width - x.shape[-1]))
    if coordinate:
        wide[..., x.shape[-1]] = coordinate
    return wide


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor,
    lengths: Tensor,
    starts: Tensor,
    scale: float,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Compute causal attention for B requests with different numbers of queries, and write it to `out`.

    query, out : [T, Hq, D], queries of one request after the other, and their attention output
    keys, values : [number of blocks, Hkv, block size, D], the paged cache
    blocks : int [B, max blocks], blocks of each request
    lengths : int [B], number of entries that each request holds; the last entry is that of the last query's token
    starts : int [B + 1], index of each request's first query, then T
    bias : float32 [number of blocks, Hkv, block size], added to the logits, except for requests whose entries are all
        new
    """
    counts = starts[1:] - starts[:-1]
    single = (counts == 1).nonzero()[:, 0]
    _, heads, size, dim = keys.shape
    for rows in _pieces(single, lengths, heads * dim):
        held = lengths[rows]
        longest = int(held.max())
        table, place = blocks[rows, : -(-longest // size)].long(), starts[rows].long()
        # blocks after those of a request may hold NaN, and 0 x NaN is NaN
        table.masked_fill_(torch.arange(0, longest, size) >= held[:, None], NOBODYS)
        key, value = (read_blocks(paged, table)[:, :, :longest] for paged in (keys, values))
        mask = (torch.arange(longest) < held[:, None])[:, None, None]
        if bias is not None:
            mask = read_blocks(bias, table)[:, :, None, :longest].masked_fill(~mask, float("-inf"))
        grouped = query[place].unflatten(1, (heads, -1))  # the G query heads of a kv head, as G queries of one head
        out[place] = sdpa(grouped, key, value, scale, mask).flatten(1, 2)
    for row in (counts > 1).nonzero()[:, 0].tolist():
        first, count, length = int(starts[row]), int(counts[row]), int(lengths[row])
        table = blocks[row : row + 1, : -(-length // size)].long()
        # contiguous, because torch has no fused kernel for transposed keys, and would allocate all logits
        key, value = (read_blocks(paged, table)[:, :, :length].contiguous() for paged in (keys, values))
        part, whole = query[first : first + count].transpose(0, 1)[None], count == length
        later = None if whole else torch.arange(length) <= torch.arange(length - count, length)[:, None]
        if bias is not None and later is not None:
            added = read_blocks(bias, table)[:, :, None, :length].masked_fill(~later, float("-inf"))
            later = added.repeat_interleave(query.shape[1] // heads, dim=1)
        out[first : first + count] = sdpa(part, key, value, scale, later, causal=whole)[0].transpose(0, 1)


def _pieces(rows: Tensor, lengths: Tensor, elements: int) -> Iterator[Tensor]:
    """Yield pieces of `rows`, each with about ELEMENTS key elements, `elements` an entry, in rows of similar length."""
    rows = rows[lengths[rows].argsort(descending=True)]
    while len(rows):
        count = max(1, ELEMENTS // (elements * int(lengths[rows[0]])))
        yield rows[:count]
        rows = rows[count:]
