"""Replay attention with FlexAttention: the cost is O(S x budget) for S tokens, and no S x S tensor is made.

The kv heads are folded into the batch, so that a row of FlexAttention is one kv head of one sequence. Tile lists are
made once for all query heads of a kv head, and a row's mask reads only the row's evict_at. Lengths are padded to a few
sizes, and data that differ between layers and steps are arguments of the compiled graph. So one graph serves all calls
with the same padded size and number of rows; a second graph serves such calls without gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from sparse_rl.attention.kernels.sdpa import computing_dtype
from sparse_rl.attention.kernels.tiles import TILE, make_tiles, segment_of

# Numbers of compiled graphs beyond which torch raises an error (under fullgraph=True). The defaults are too small.
LIMITS = {"recompile_limit": 4096, "accumulated_recompile_limit": 4096}
# Request Triton's kernels by name: by default torch may choose a backend whose gradients were found wrong on Hopper
# (flash-attention #2623). Fully masked rows are safe in Triton's kernels only while ROWS_GUARANTEED_SAFE is not set.
KERNEL_OPTIONS: Any = {"BACKEND": "TRITON"} if "BACKEND" in FlexKernelOptions.__annotations__ else {}


def padded(length: int) -> int:
    """Return the padded size of a length: a multiple of 128, with at most one size between consecutive powers of two.

    Tiles of padding are not visited. From 257 tokens on, padding enlarges the copies of the inputs at most 1.5 times,
    and the tile lists at most 2.25 times.
    """
    step = max(TILE, 1 << max(0, (length - 1).bit_length() - 2))
    return -(-length // step) * step


def flex_attend(
    evict_at: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    in_segments: bool,
    compiled: bool = True,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention under evict_at with FlexAttention, which visits only the tiles that are not empty.

    evict_at : int32 [B, Hkv, S], for each of S tokens, the first query that no longer sees the token
    query, key, value : [B, Hq, S, D], [B, Hkv, S, D] and [B, Hkv, S, E]; E may differ from D
    in_segments : True sorts keys by evict_at in segments; False keeps the natural order
    compiled : False uses torch's plain operator, for tests; it ignores the tiles and makes S x S scores. On a CPU the
        compiled operator has neither a backward pass nor the log-sum-exp

    Returns the output [B, Hq, S, E], and the log-sum-exp of each query's scaled scores, [B, Hq, S] (None without
    `want_lse`). Both are differentiable. The log-sum-exp is float32 (float64 for float64 inputs). For a query that sees
    no token (padding), the output is 0 and the log-sum-exp is -inf.
    """
    batch, q_heads, length, dim = query.shape
    rows, width = batch * key.shape[1], padded(length)
    wanted, dtype = value.dtype, computing_dtype(query, value)
    if compiled and dtype == torch.float64:
        dtype = torch.float32
    query, key, value = (x.to(dtype) for x in (query, key, value))
    tiles = make_tiles(evict_at.reshape(rows, length), width, segment_of(width) if in_segments else None)
    padding = (0, 0, 0, width - length)
    query = _padded(query.reshape(rows, q_heads * batch // rows, length, dim), padding)
    if tiles.order is None:
        key, value = (_padded(x.reshape(rows, 1, length, x.shape[-1]), padding) for x in (key, value))
    else:
        back = tiles.order.argsort(dim=-1)[:, :length]
        key, value = (_Reordered.apply(x, tiles.order.clamp(max=length - 1), back)[:, None] for x in (key, value))
    lists = tiles.partial_count, tiles.partial, tiles.full_count, tiles.full
    inputs = query, key, value, tiles.position, tiles.evict_at, scaling, want_lse, *lists
    if compiled:
        with torch._dynamo.config.patch(LIMITS):
            out, lse = _compiled()(*inputs)
    else:
        out, lse = _attend(*inputs)
    out = out[:, :, :length].reshape(batch, q_heads, length, value.shape[-1]).to(wanted)
    return out, None if lse is None else lse[:, :, :length].reshape(batch, q_heads, length)


def _padded(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """Pad a tensor and make it contiguous; other strides would need another compiled graph."""
    return torch.nn.functional.pad(x, padding).contiguous()


def block_mask(position: Tensor, evict_at: Tensor, *lists: Tensor) -> BlockMask:

    def visible(row: Tensor, _: Tensor, q: Tensor, slot: Tensor) -> Tensor:
        return (position[row, slot] <= q) & (q < evict_at[row, slot])

    return tile_mask(visible, position.shape[-1], lists)


def tile_mask(visible: Any, size: int, lists: tuple[Any, ...]) -> BlockMask:
    """Return the BlockMask of the lists (see `Tiles`) for `size` padded tokens; `visible` masks the partial tiles."""
    options: Any = {"BLOCK_SIZE": TILE, "mask_mod": visible, "seq_lengths": (size, size)}
    return BlockMask.from_kv_blocks(*lists, **options)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    evict_at: Tensor,
    scaling: float,
    want_lse: bool,
    *lists: Tensor,
) -> tuple[Tensor, Tensor | None]:
    mask = block_mask(position, evict_at, *lists)
    options: Any = {"block_mask": mask, "scale": scaling, "enable_gqa": True, "kernel_options": dict(KERNEL_OPTIONS)}
    if not want_lse:
        return flex_attention(query, key, value, **options), None
    out, aux = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@cache
def _compiled() -> Any:
    """Compile on first use, because torch's compiler takes seconds to import."""
    return torch.compile(_attend, dynamic=False, fullgraph=True)


class _Reordered(torch.autograd.Function):
    """Reorder x [B, Hkv, S, D] to [B * Hkv, N, D]; the backward pass gathers by the inverse order, without scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.shape = x.shape
        row = torch.arange(len(order), device=x.device)[:, None]
        return x[row // x.shape[1], row % x.shape[1], order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        row = torch.arange(len(back), device=back.device)[:, None]
        return grads[0][row, back].view(ctx.shape), None, None


def tiles_bytes(sequences: int, kv_heads: int, length: int) -> int:
    """Return the bytes of one layer's tiles: positions, evict_at, the keys' order and its inverse, four tile lists."""
    width = padded(length)
    count = width // TILE
    return sequences * kv_heads * (width * (4 + 4 + 8) + length * 8 + 4 * 4 * (count + count**2))
