"""Redundancy of cache entries: the mean similarity of an entry's key to the other keys.

For entry j of N entries, the mean similarity is

    mean_j = 1 / N  sum_i sim(i, j)                                                            R-KV eqs. 4-5

sim(i, j) is the cosine of keys i and j. It is set to 0 in three cases: if i = j; if the cosine is below 0.5; and if j
is the most recent of all entries that are similar to i, because that entry may stay in place of the others. The
similarities are computed in tiles. The torch implementation is the reference; redundancy_triton.py computes the same
for half-precision keys on a GPU, up to the rounding of a cosine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_rl.kernels.parity import Errors, Parity, distance, judged

Total = Callable[[Tensor, Tensor, Tensor], Tensor]
UNDER = 0.5 - 2**-25  # the float32 just below 0.5; a greater cosine counts as similar
SIMILARITIES = 2**20  # number of similarities of one kv head that are computed at a time (or up to twice this number)
AT_ONCE = {"cuda": 2**25, "cpu": 2**20}  # similarities at a time for several sequences; on a CPU they fit its cache
LEAST_ROWS = 32  # minimum number of rows of a tile: a product of very few rows is summed in another order
ALLOWED = 3e-5  # allowed relative error of a sum in the check; a wrong decision changes a sum by 0.5 or more
CHECKED = 500  # number of entries in the check


def mean_similarity(
    keys: Tensor, positions: Tensor, lengths: Tensor, kernel: Literal["torch", "triton"] | None = None
) -> Tensor:
    """Return the mean similarity of each entry to the other entries of its kv head, as defined above.

    keys : [R, Hkv, N, D] of any float dtype, for R rows, Hkv kv heads and N slots
    positions : int64 [R, Hkv, N], distinct within a kv head, in any order
    lengths : int64 [R], the number of entries of each row, by which sums are divided; the slots after the entries are
        padding
    kernel : the implementation to use; None means triton for half-precision keys on a GPU if it passed the check, else
        torch

    Returns float32 [R, Hkv, N]: -inf for padding, and NaN at least for the entries whose keys are not finite.
    """
    if kernel is None:
        passed = keys.is_cuda and check_redundancy(keys.dtype, keys.shape[-1]).failure is None
        kernel = "triton" if passed else "torch"
    padding = torch.arange(positions.shape[-1], device=keys.device) >= lengths[:, None, None]
    if kernel == "triton":
        return (_triton_form()(keys, positions, lengths) / lengths[:, None, None]).masked_fill_(padding, float("-inf"))
    order = positions.masked_fill(padding, torch.iinfo(torch.int64).max).argsort(-1)
    mean = torch.full(order.shape, float("-inf"), device=order.device)
    row_lengths = lengths.tolist()
    for length in dict.fromkeys(row_lengths):
        rows_of_length = [row for row, other in enumerate(row_lengths) if other == length]
        for rows in _rows_at_once(rows_of_length, order.shape[1], length, AT_ONCE[order.device.type]):
            similar = total_similarity(keys[rows, :, :length].float(), order[rows, :, :length])
            mean[rows, :, :length] = similar / length
    return mean


def _rows_at_once(rows: Sequence[int], heads: int, entries: int, most: int) -> Iterator[Any]:
    """Yield parts of the rows, with at most `most` similarities each; a part is a slice if its rows are contiguous."""
    largest = max(last - first for first, last in similarity_tiles(entries))
    count = max(1, most // (heads * largest * entries))
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        contiguous = part[-1] - part[0] + 1 == len(part)
        yield slice(part[0], part[-1] + 1) if contiguous else list(part)


def similarity_tiles(entries: int) -> list[tuple[int, int]]:
    """Return the row ranges [first, last) into which the entries x entries similarities are divided for computation."""
    count = max(entries // max(SIMILARITIES // entries, LEAST_ROWS), 1)
    edges = [entries * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def total_similarity(keys: Tensor, order: Tensor) -> Tensor:
    """Return, for each of N entries, the sum of its similarities to the other entries: [..., Hkv, N].

    The sum is the same to the last bit for every tiling: a similarity is 0 or a multiple of 2**-24 between 0.5 and 1
    (up to rounding), so float64 can add 2**28 similarities exactly.

    `keys` is [..., Hkv, N, D], and `order`, int64 [..., Hkv, N], has the slots of the entries, oldest first.
    """
    unit = keys / keys.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-8)
    age = torch.arange(1, keys.shape[-2] + 1, device=keys.device, dtype=keys.dtype).expand(order.shape)
    rank = torch.empty_like(age).scatter_(-1, order, age)[..., None, :]
    total = torch.zeros(order.shape, device=keys.device, dtype=torch.float64)
    for first, last in similarity_tiles(keys.shape[-2]):
        similarity = unit[..., first:last, :] @ unit.transpose(-1, -2)
        similarity.diagonal(first, dim1=-2, dim2=-1).zero_()
        torch.threshold_(similarity, UNDER, 0.0)
        most_recent = similarity.sign().mul_(rank).amax(-1).long() - 1  # -1 if no key is similar
        slot = order.gather(-1, most_recent.clamp(min=0))
        total += similarity.scatter_(-1, slot[..., None], 0.0).sum(dim=-2, dtype=torch.float64)
    return total.float()


# ---- the check -----------------------------------------------------------------------------------------------------


@cache
def check_redundancy(dtype: torch.dtype, head_dim: int, device: str = "cuda") -> Parity:
    """Compare the Triton implementation with the reference; it accepts only keys in half precision.

    Two rows are compared, the second with padding. The first is also computed alone, and must not depend on the second.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return Parity("triton", failure=f"the keys are {str(dtype).removeprefix('torch.')}")

    def compared() -> Errors:
        form, (keys, positions, lengths) = _triton_form(), (part.to(device) for part in drawn_entries(dtype, head_dim))
        totals, worst = form(keys, positions, lengths), 0.0
        for row, length in enumerate(lengths.tolist()):
            wanted = total_similarity(keys[row, :, :length].double(), positions[row, :, :length].argsort(-1))
            error = (totals[row, :, :length] - wanted).abs() / wanted.clamp(min=1.0)
            worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))
        alone = form(keys[:1], positions[:1], lengths[:1])[0]
        return {"sum": (worst, ALLOWED), "row alone": (distance(alone, totals[0]), 0.0)}

    return judged("triton", device, compared)


def drawn_entries(dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random keys [2, 2, CHECKED, head_dim], positions and lengths, the inputs of the check.

    Rounding cannot decide whether a cosine reaches 0.5: in the first head, the numbers of a key are 1, -1 and 0, of
    which a power of 4 are not 0, so that the cosines are exact in any precision; many are 0.5. In the second head, keys
    lie close to a few orthogonal directions, so no cosine is near 0.5.
    """
    generator = torch.Generator().manual_seed(0)
    few = 4 ** ((head_dim.bit_length() - 1) // 2)
    signs = torch.randn(2, 3, few, generator=generator).sign()
    cluster = torch.randint(3, (2, 2, CHECKED), generator=generator)
    keys = torch.zeros(2, 2, CHECKED, head_dim)
    flipped = torch.rand(2, CHECKED, few, generator=generator) < 0.15
    keys[:, 0, :, :few] = signs.gather(1, cluster[:, 0, :, None].expand(-1, -1, few)) * torch.where(flipped, -1.0, 1.0)
    noise = torch.nn.functional.normalize(torch.randn(2, CHECKED, head_dim, generator=generator), dim=-1)
    near_axis = torch.nn.functional.one_hot(cluster[:, 1], head_dim) + 0.2 * noise  # at most 11 degrees from the axis
    keys[:, 1] = near_axis * torch.randn(2, CHECKED, 1, generator=generator).exp()
    lengths = torch.tensor([CHECKED, CHECKED * 2 // 3])
    keys[1, :, lengths[1] :] = float("nan")  # padding must not be read
    positions = 3 * torch.rand(2, 2, CHECKED, generator=generator).argsort(-1)
    return keys.to(dtype), positions, lengths


def _triton_form() -> Total:
    from sparse_rl.kernels.redundancy_triton import total_similarity as form

    return form
