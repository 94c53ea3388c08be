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

By default, one program of the GPU computes the gradients of a tile of keys for all G query heads that share the keys.
Most queries visit the first tiles of a segment, so their programs would end long after all others. Keys expanded to
the query heads (no copy) give each program one head; the gradients of the G heads, [R, G, N, head_dim], are then
summed. tests/attention/test_flex_costs.py has the schedule.

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

    There are four lists: for each query tile, the key tiles that are partly visible (visited with a mask), and those
    that are fully visible (visited without); for each key tile, such query tiles, which the backward pass visits. A
    list has the number of tiles, and the indices of all, of which the first ones are valid.
    """

    position: Tensor  # int32 [R, N], of the key in each slot
    evict_at: Tensor  # int32 [R, N], likewise; evict_at <= position means that no query sees the key
    order: Tensor | None  # int64 [2, R, N], the key in each slot, and the slot of each key; None means natural order
    counts: Tensor  # int32 [4, R, n]
    indices: Tensor  # int32 [4, R, n, n]

    @property
    def visited(self) -> float:
        return float(self.counts[:2].sum()) / self.indices[0].numel()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values() if tensor is not None)

    @property
    def lists(self) -> list[Tensor]:
        """The lists as BlockMask takes them: the counts [R, 1, n] and the indices [R, 1, n, n] of each list."""
        return [x[:, None] for pair in zip(self.counts, self.indices, strict=True) for x in pair]

    def layer(self, index: int, rows: int) -> Tiles:
        """Return the tiles of a layer, if the rows are those of several layers with `rows` rows each."""
        own = slice(index * rows, (index + 1) * rows)
        order = None if self.order is None else self.order[:, own]
        return Tiles(self.position[own], self.evict_at[own], order, self.counts[:, own], self.indices[:, own])


def tiles_bytes(rows: int, width: int) -> int:
    """Return the `nbytes` of the tiles of `rows` rows of `width` sorted keys."""
    return rows * (24 * width + 16 * (width // TILE) * (width // TILE + 1))


def segment_of(length: int) -> int | None:
    """Return the number of tokens to sort together, about the one that leaves the fewest tiles; None: do not sort."""
    return None if length < 1536 else 512 if length <= 8192 else 1024 if length <= 32768 else 2048


def tiles_of(evict_at: Tensor, in_segments: bool, before: int = 0) -> Tiles:
    """Return the tiles under evict_at, int32 [..., S]; False for `in_segments` keeps the natural order of long rows.
    before : position of the first query that counts"""
    width = padded(evict_at.shape[-1])
    return make_tiles(evict_at.flatten(0, -2), width, segment_of(width) if in_segments else None, before)


def make_tiles(evict_at: Tensor, width: int, segment: int | None = None, before: int = 0) -> Tiles:
    """Return the tiles to visit under evict_at, int32 [R, S].

    width : N, the padded number of tokens, a multiple of 128 and of `segment`
    segment : number of tokens of a segment, in which keys are sorted by evict_at, largest first; None: natural order
    before : position of the first query that counts; tiles of earlier queries alone are not visited
    """
    rows, length = evict_at.shape
    step, device = segment or TILE, evict_at.device
    assert width % step == 0 and width >= length, f"width {width}: not a multiple of {step}, or below {length} tokens"
    position = torch.arange(width, dtype=torch.int32, device=device).expand(rows, -1)
    evict_at = F.pad(evict_at, (0, width - length))
    # No query comes after a row's last real token; evict_at is limited to that point, so that no tile of padding is
    # visited.
    evict_at = torch.minimum(evict_at, ((evict_at > position) * (position + 1)).amax(-1, keepdim=True))
    order, position = None, position.contiguous()
    if segment is not None:
        evict_at, within = evict_at.view(rows, -1, segment).sort(dim=-1, descending=True, stable=True)
        keys = (within + torch.arange(0, width, segment, device=device)[:, None]).flatten(1)
        slots = torch.empty_like(keys).scatter_(-1, keys, torch.arange(width, device=device).expand(rows, -1))
        evict_at, position, order = evict_at.flatten(1), keys.int(), torch.stack([keys.clamp(max=length - 1), slots])
    visited, full = tile_tests(position, evict_at)
    if before >= TILE:
        visited[:, : before // TILE], full[:, : before // TILE] = False, False
    partial = visited ^ full
    return Tiles(position, evict_at, order, *listed(partial, full, partial.mT, full.mT))


def tile_tests(position: Tensor, evict_at: Tensor) -> tuple[Tensor, Tensor]:
    """Return two masks of the n x n tiles, bool [R, n, n], from int32 [R, N]: those not empty, and full ones."""
    tiled = len(position), 1, position.shape[-1] // TILE, TILE
    first = torch.arange(0, position.shape[-1], TILE, dtype=torch.int32, device=evict_at.device)[:, None]
    end = first + TILE  # of the queries of each tile
    unseen = evict_at <= position
    seen_from = position.masked_fill(unseen, FAR).view(tiled).amin(-1)
    shortest, longest = evict_at.masked_fill(unseen, -1).view(tiled).aminmax(dim=-1)
    visited = (seen_from < end) & (longest > first)
    full = visited & (position.view(tiled).amax(-1) <= first) & (shortest >= end)
    return visited, full


def listed(*masks: Tensor) -> tuple[Tensor, Tensor]:
    """Convert K masks of tiles, bool [R, n, n], to lists (see `Tiles`): int32 [K, R, n] and int32 [K, R, n, n]."""
    mask = torch.stack(masks)
    return mask.sum(-1, dtype=torch.int32), mask.view(torch.int8).argsort(dim=-1, descending=True, stable=True).int()


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
    evict_at: Tensor | Tiles,
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

    evict_at : int32 [B, Hkv, S], for each of S tokens, the first query that no longer sees the token; or its tiles
    query : [B, Hq, T, D], the queries of the last T of S tokens
    key, value : [B, Hkv, S, D] and [B, Hkv, S, E]; E may differ from D
    in_segments : True sorts keys by evict_at in segments if rows are long, and if no tiles are given
    compiled : False uses torch's plain operator, for tests; it ignores the tiles and makes S x S scores. On a CPU the
        compiled operator has neither a backward pass nor the log-sum-exp

    Returns the output [B, Hq, T, E], and the log-sum-exp of each query's scaled scores, [B, Hq, T] (None without
    `want_lse`). Both are differentiable. The log-sum-exp is float32 (float64 for float64 inputs). For a query that sees
    no token (padding), the output is 0 and the log-sum-exp is -inf.
    """
    batch, q_heads, length = *query.shape[:2], key.shape[2]
    rows, before = batch * key.shape[1], length - query.shape[2]
    wanted, dtype = value.dtype, computing_dtype(query, value)
    if compiled and dtype == torch.float64:
        dtype = torch.float32
    tiles = evict_at if isinstance(evict_at, Tiles) else tiles_of(evict_at, in_segments, before)
    width = tiles.position.shape[-1]
    query, key, value = (x.to(dtype) for x in (F.pad(query, (0, 0, before, 0)) if before else query, key, value))
    if tiles.order is not None:
        order, back = tiles.order.view(2, *key.shape[:2], width, 1)
        key, value = (_Reordered.apply(x, order, back[:, :, :length]) for x in (key, value))
    query, key, value = (_padded(x, width).view(rows, -1, width, x.shape[-1]) for x in (query, key, value))
    inputs: Any = query, key, value, tiles.position, tiles.evict_at, scaling, want_lse, *tiles.lists
    if compiled:
        with torch._dynamo.config.patch(LIMITS):
            out, lse = _compiled(_attend)(*inputs)
    else:
        out, lse = _attend(*inputs)
    out = out[:, :, before:length].reshape(batch, q_heads, -1, value.shape[-1]).to(wanted)
    return out, None if lse is None else lse[:, :, before:length].reshape(batch, q_heads, -1)


def _padded(x: Tensor, width: int) -> Tensor:
    """Pad [B, H, S, D] to [B, H, width, D] and make it contiguous; other strides would need another compiled graph."""
    return (x if x.shape[2] == width else F.pad(x, (0, 0, 0, width - x.shape[2]))).contiguous()


def block_mask(position: Tensor, evict_at: Tensor, *lists: Tensor) -> BlockMask:
    def visible(row: Tensor, _: Tensor, q: Tensor, slot: Tensor) -> Tensor:
        return (position[row, slot] <= q) & (q < evict_at[row, slot])

    return tile_mask(visible, position.shape[-1], lists)


def tile_mask(visible: Any, size: int, lists: tuple[Any, ...]) -> BlockMask:
    """Return the BlockMask of `Tiles.lists`, or of the first two for a forward pass; `visible` masks partial tiles."""
    options: Any = {"BLOCK_SIZE": (TILE, TILE), "mask_mod": visible}
    return BlockMask((size, size), *lists, *(None,) * (8 - len(lists)), **options)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, position: Tensor, evict_at: Tensor, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    scaling, want_lse, *lists = rest
    mask = block_mask(position, evict_at, *lists)
    key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    options: Any = {"block_mask": mask, "scale": scaling, "kernel_options": dict(KERNEL_OPTIONS)}
    if not want_lse:
        return flex_attention(query, key, value, **options), None
    out, aux = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    """Compile on first use, because torch's compiler takes seconds to import."""
    return torch.compile(function, dynamic=False, fullgraph=True)


class _Reordered(torch.autograd.Function):
    """Gather x [B, Hkv, S, D] by order [B, Hkv, N, 1]; the backward pass gathers by the inverse, back [B, Hkv, S, 1],
    without scatters.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.gather(2, order.expand(-1, -1, -1, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0].gather(2, back.expand(-1, -1, -1, grads[0].shape[-1])), None, None


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


def transposed_tiles(first: Tensor, last: Tensor) -> list[Tensor]:
    """Return two lists as in `Tiles.lists`: for each tile of keys, the query tiles that count in part, and in full."""
    some, full = (tiles.mT for tiles in tile_tests(first, last))
    return [x[:, None] for pair in zip(*listed(some ^ full, full), strict=True) for x in pair]


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
