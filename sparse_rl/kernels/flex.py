"""Replay attention with FlexAttention: the cost is O(S x budget) for S tokens, and no S x S tensor is made.

The kv heads are folded into the batch, so that a row is one kv head of one sequence, with S tokens. Lengths are padded
to a few sizes, and data that differ between layers and steps are arguments of the compiled graph. So one graph serves
all calls with the same padded size and number of rows; a second graph serves such calls without gradients.

Only the 128 x 128 tiles that are not empty are visited. They are found from evict_at. The key in slot j of the row's
key order is visible to the queries position[j] <= q < evict_at[j]. So a tile of the queries q_lo to q_hi and 128 keys,
over which min and max are taken, is

    not empty   if  min position <= q_hi  and  max evict_at > q_lo
    full        if  max position <= q_lo  and  min evict_at > q_hi

In natural order of the keys, both tests are exact. But evictions are scattered, so almost every tile has some visible
key. Softmax does not depend on the order of keys, so keys may be sorted by evict_at within segments. Then the keys that
a later query sees are a prefix of each past segment, and the tiles after the prefix are empty. With sorted keys, the
first test may fail to recognise an empty tile, but only if its queries and keys belong to the same segment.

`mass_by_flex` is attention transposed: the attention that each key receives. FlexAttention is called with keys in the
place of queries, and queries in the place of keys. The log-sum-exp of a query is subtracted from the query's scores,
which makes the scores log-probabilities; the log-sum-exp that FlexAttention then returns for a key is the log of the
attention that the key receives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from sparse_rl.kernels.exact import computing_dtype

TILE = 128
FAR = 2**31 - 1  # larger than any position


@dataclass
class Tiles:
    """The tiles to visit for R rows of N queries and N keys, n x n tiles with n = N / 128, as FlexAttention reads them.

    The lists have, for each query tile, the key tiles that are partly visible (visited with a mask), and those that are
    fully visible (visited without): their number, and the indices of all key tiles, of which the first ones are valid.
    """

    position: Tensor  # int32 [R, N], of the key in each slot
    evict_at: Tensor  # int32 [R, N], likewise; evict_at <= position means that no query sees the key
    order: Tensor | None  # int64 [R, N], the key in each slot; None means natural order
    partial_count: Tensor  # int32 [R, 1, n]
    partial: Tensor  # int32 [R, 1, n, n]
    full_count: Tensor
    full: Tensor

    @property
    def visited(self) -> float:
        count = self.partial_count.sum() + self.full_count.sum()
        return float(count) / (len(self.position) * self.partial.shape[-1] ** 2)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, and of the transposed lists that the backward pass makes."""
        tensors = (self.position, self.evict_at, self.order)
        lists = (self.partial_count, self.partial, self.full_count, self.full)
        return sum(t.nbytes for t in tensors if t is not None) + 2 * sum(t.nbytes for t in lists)  # forward, backward


def segment_of(length: int) -> int:
    """Return the number of tokens to sort together: about the power of two that leaves the fewest tiles."""
    return 512 if length <= 8192 else 1024 if length <= 32768 else 2048


def make_tiles(evict_at: Tensor, width: int, segment: int | None = None) -> Tiles:
    """Return the tiles to visit under evict_at, int32 [R, S].

    width : N, the padded number of tokens, a multiple of 128
    segment : number of tokens of a segment, in which keys are sorted by evict_at, largest first; None: natural order
    """
    rows, length = evict_at.shape
    assert width % TILE == 0 and width >= length, f"width {width}: not a multiple of {TILE}, or below {length} tokens"
    position = torch.arange(width, dtype=torch.int32, device=evict_at.device).expand(rows, -1)
    evict_at = F.pad(evict_at, (0, width - length))
    # No query comes after a row's last real token; evict_at is limited to that point, so that no tile of padding is
    # visited.
    end = ((evict_at > position) * (position + 1)).amax(-1, keepdim=True)
    evict_at = torch.minimum(evict_at, end.to(evict_at.dtype))
    order = None
    if segment is not None:
        order = ((position // segment).long() * (width + 1) + (width - evict_at)).argsort(dim=-1, stable=True)
        position, evict_at = position.gather(-1, order), evict_at.gather(-1, order)
    position, evict_at = position.contiguous(), evict_at.contiguous()

    visited, full = tile_tests(position, evict_at)
    return Tiles(position, evict_at, order, *listed(visited & ~full), *listed(full))


def tile_tests(position: Tensor, evict_at: Tensor) -> tuple[Tensor, Tensor]:
    """Return two masks of the n x n tiles, bool [R, n, n], from int32 [R, N]: those not empty, and full ones."""
    rows, count = len(position), position.shape[-1] // TILE
    first = torch.arange(count, dtype=torch.int32, device=evict_at.device)[:, None] * TILE  # first query of each tile
    last = first + TILE - 1
    unseen = evict_at <= position
    seen_from = position.masked_fill(unseen, FAR).view(rows, 1, count, TILE).amin(-1)
    seen_until = evict_at.masked_fill(unseen, -1).view(rows, 1, count, TILE)
    visited = (seen_from <= last) & (seen_until.amax(-1) > first)
    full = visited & (position.view(rows, 1, count, TILE).amax(-1) <= first) & (seen_until.amin(-1) > last)
    return visited, full


def listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a mask of tiles, bool [R, n, n], to lists (see `Tiles`): int32 [R, 1, n] and int32 [R, 1, n, n]."""
    indices = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return mask.sum(-1, dtype=torch.int32)[:, None], indices[:, None].int()


def visible_share(evict_at: Tensor) -> float:
    """Return the share of query-key pairs that are visible under evict_at, int32 [R, S]; more pairs are visited."""
    length = evict_at.shape[-1]
    position = torch.arange(length, device=evict_at.device)
    return float((evict_at.clamp(max=length) - position).clamp(min=0).sum() / (evict_at.numel() * length))


# Numbers of compiled graphs beyond which torch raises an error (under fullgraph=True). The defaults are too small.
LIMITS = {"recompile_limit": 4096, "accumulated_recompile_limit": 4096}
# Request Triton's kernels by name: by default torch may choose a backend whose gradients were found wrong on Hopper
# (flash-attention #2623). Fully masked rows are safe in Triton's kernels only while ROWS_GUARANTEED_SAFE is not set.
KERNEL_OPTIONS: Any = {"BACKEND": "TRITON"} if "BACKEND" in FlexKernelOptions.__annotations__ else {}


def padded(length: int) -> int:
    """Return the padded size of a length: a multiple of 128, with at most one size between powers of two."""
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
            out, lse = _compiled(_attend)(*inputs)
    else:
        out, lse = _attend(*inputs)
    out = out[:, :, :length].reshape(batch, q_heads, length, value.shape[-1]).to(wanted)
    return out, None if lse is None else lse[:, :, :length].reshape(batch, q_heads, length)


def _padded(x: Tensor, padding: tuple[int, ...]) -> Tensor:
    """Pad a tensor and make it contiguous; other strides would need another compiled graph."""
    return F.pad(x, padding).contiguous()


def block_mask(position: Tensor, evict_at: Tensor, *lists: Tensor) -> BlockMask:
    def visible(row: Tensor, _: Tensor, q: Tensor, slot: Tensor) -> Tensor:
        return (position[row, slot] <= q) & (q < evict_at[row, slot])

    return tile_mask(visible, position.shape[-1], lists)


def tile_mask(visible: Any, size: int, lists: tuple[Any, ...]) -> BlockMask:
    """Return the BlockMask of the lists (see `Tiles`) for `size` padded tokens; `visible` masks the partial tiles."""
    options: Any = {"BLOCK_SIZE": TILE, "mask_mod": visible, "seq_lengths": (size, size)}
    return BlockMask.from_kv_blocks(*lists, **options)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, evict_at: Tensor, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    scaling, want_lse, *lists = rest
    mask = block_mask(position, evict_at, *lists)
    options: Any = {"block_mask": mask, "scale": scaling, "enable_gqa": True, "kernel_options": dict(KERNEL_OPTIONS)}
    if not want_lse:
        return flex_attention(query, key, value, **options), None
    out, aux = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    """Compile on first use, because torch's compiler takes seconds to import."""
    return torch.compile(function, dynamic=False, fullgraph=True)


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


VALUE_DIM = 16  # dimension of the unused values: the smallest that FlexAttention's kernels accept


def mass_by_flex(
    query: Tensor,
    key: Tensor,
    log_sum_exp: Tensor,
    first: Tensor,
    last: Tensor,
    scaling: float,
    largest: float,
    *,
    compiled: bool = True,
) -> Tensor:
    """Return the log of the attention that each key receives from the queries that count.

    For key t, this is the log of the sum of exp(min(q_d . k_t scaling - lse_d, largest)) over the queries first[t] <= d
    < last[t], where lse_d is the log-sum-exp of query d.

    query, key : [B, Hq, S, D] and [B, Hkv, S, D]
    log_sum_exp, first, last : float32 [B, Hq, S], int64 [B, S] and int64 [B, S]
    compiled : False uses torch's plain operator, for tests; it ignores the tiles and makes S x S scores

    Returns float32 [B, Hq, S] (the plain operator returns float64 for float64 input); -inf if no query counts.
    """
    length, width = query.shape[2], padded(query.shape[2])
    padding = width - length
    first, last = (F.pad(x.clamp(max=length), (0, padding)).int() for x in (first, last))
    key, queries = (F.pad(x, (0, 0, 0, padding)).contiguous() for x in (key, query))
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)  # FlexAttention groups the heads of queries only
    log_sum_exp = F.pad(log_sum_exp, (0, padding)).contiguous()
    values = queries.new_zeros(*queries.shape[:3], VALUE_DIM)
    inputs: Any = keys, queries, values, log_sum_exp, first, last, *transposed_tiles(first, last), scaling, largest
    if not compiled:
        return _log_mass(*inputs)[..., :length]
    with torch._dynamo.config.patch(LIMITS):
        return _compiled(_log_mass)(*inputs)[..., :length]


def transposed_tiles(first: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    """Return two pairs made by `listed`: for each tile of keys, the query tiles that count in part, and in full."""
    # made contiguous, because the kernels ignore the strides of a list
    some, full = (tiles.transpose(1, 2).contiguous() for tiles in tile_tests(first, last))
    return *listed(some & ~full), *listed(full)


def transposed_options(log_sum_exp: Tensor, first: Tensor, last: Tensor, *rest: Any) -> dict[str, Any]:
    *lists, scaling, largest = rest

    def counts(row: Tensor, _: Tensor, t: Tensor, d: Tensor) -> Tensor:
        return (first[row, t] <= d) & (d < last[row, t])

    def log_probability(score: Tensor, row: Any, head: Any, _: Tensor, d: Tensor) -> Tensor:
        return (score - log_sum_exp[row, head, d]).clamp(max=largest)

    mask = tile_mask(counts, first.shape[-1], tuple(lists))
    kernel_options = dict(KERNEL_OPTIONS)
    return {"block_mask": mask, "score_mod": log_probability, "scale": scaling, "kernel_options": kernel_options}


def _log_mass(keys: Tensor, queries: Tensor, values: Tensor, *rest: Any) -> Tensor:
    _, aux = flex_attention(keys, queries, values, **transposed_options(*rest), return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return aux.lse
