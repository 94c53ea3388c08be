"""The 128 x 128 tiles that are not empty in a replayed attention, found from evict_at without an S x S tensor.

A row is one kv head of one sequence, with S tokens. The key in slot j of the row's key order is visible to the queries
position[j] <= q < evict_at[j]. So a tile of the queries q_lo to q_hi and 128 keys, over which min and max are taken, is

    not empty   if  min position <= q_hi  and  max evict_at > q_lo
    full        if  max position <= q_lo  and  min evict_at > q_hi

In natural order of the keys, both tests are exact. But evictions are scattered, so almost every tile has some visible
key. Softmax does not depend on the order of keys, so keys may be sorted by evict_at within segments. Then the keys that
a later query sees are a prefix of each past segment, and the tiles after the prefix are empty. With sorted keys, the
first test may fail to recognise an empty tile, but only if its queries and keys belong to the same segment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128
FAR = 2**31 - 1  # larger than any position


@dataclass
class Tiles:
    """The tiles to visit for R rows of N queries and N keys, n x n tiles with n = N / 128. FlexAttention reads them.

    position, evict_at : int32 [R, N], of the key in each slot; evict_at <= position means that no query sees the key
    order : int64 [R, N], the key in each slot; None means natural order
    partial_count, full_count : int32 [R, 1, n], for each query tile, the number of key tiles that are partly visible
        (visited with a mask), and of those that are fully visible (visited without)
    partial, full : int32 [R, 1, n, n], indices of these key tiles; only the first partial_count or full_count are valid
    """

    position: Tensor
    evict_at: Tensor
    order: Tensor | None
    partial_count: Tensor
    partial: Tensor
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
    evict_at = torch.nn.functional.pad(evict_at, (0, width - length))
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
    """Return two masks of the n x n tiles, bool [R, n, n]: tiles that are not empty, and tiles that are full.

    `position` and `evict_at` are int32 [R, N], with N a multiple of 128 and n = N / 128.
    """
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
    """Convert a mask of tiles, bool [R, n, n], to lists for each query tile.

    Returns the number of key tiles that are True, int32 [R, 1, n], and the indices of all key tiles with the True ones
    first, int32 [R, 1, n, n].
    """
    indices = mask.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return mask.sum(-1, dtype=torch.int32)[:, None], indices[:, None].int()


def visible_share(evict_at: Tensor) -> float:
    """Return the share of query-key pairs that are visible under evict_at, int32 [R, S]; more pairs are visited."""
    length = evict_at.shape[-1]
    position = torch.arange(length, device=evict_at.device)
    return float((evict_at.clamp(max=length) - position).clamp(min=0).sum() / (evict_at.numel() * length))
