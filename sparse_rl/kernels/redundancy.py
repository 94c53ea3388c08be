"""How much each entry of a cache repeats the others: the mean of its similarities, without N x N of them in memory.

    mean_j = 1 / N  sum_i sim(i, j)                                                            R-KV eqs. 4-5

sim(i, j) is the cosine of keys i and j. It is set to 0 where i = j, where it is under 0.5, and for each i at the most
recent j that is similar to i: this one may stay for the others. The torch form is the reference; redundancy_triton.py
computes it of keys in half precision on a GPU, up to the rounding of a cosine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from sparse_rl.kernels.choice import Choice, choose

Total = Callable[[Tensor, Tensor, Tensor], Tensor]
UNDER = 0.5 - 2**-25  # the float32 before 0.5: what exceeds it is similar
SIMILARITIES = 2**20  # of a kv head that are made at a time (or up to twice as many),
AT_ONCE = {"cuda": 2**25, "cpu": 2**20}  # similarities of several sequences; on a CPU they are to stay in its cache
LEAST_ROWS = 32  # but never of fewer rows: a product of very few rows is summed in another order
ALLOWED = 3e-5  # of a sum of similarities, in the check; another decision changes it by 0.5 or more
CHECKED = 500  # entries of the check


def mean_similarity(
    keys: Tensor, positions: Tensor, lengths: Tensor, kernel: Literal["torch", "triton"] | None = None
) -> Tensor:
    """How much each entry repeats the others, 1 / N sum_i sim(i, j) (R-KV eqs. 4-5): float32 [R, Hkv, N].

    N counts the entries of a row; padding gets -inf. See the module for sim.

    keys : [R, Hkv, N, D] of any float
    positions : int64 [R, Hkv, N], those of a kv head all different, in any order
    lengths : int64 [R], the entries of each row; what stands behind is padding
    kernel : who computes it; None: triton for keys in half precision on a GPU, where it has been found right
    """
    if kernel is None:
        kernel = redundancy_choice(keys.dtype, keys.shape[-1]).kernel if keys.is_cuda else "torch"
    padding = torch.arange(positions.shape[-1], device=keys.device) >= lengths[:, None, None]
    if kernel == "triton":
        return (_triton_form()(keys, positions, lengths) / lengths[:, None, None]).masked_fill_(padding, float("-inf"))
    order = positions.masked_fill(padding, torch.iinfo(torch.int64).max).argsort(-1)
    mean = torch.full(order.shape, float("-inf"), device=order.device)
    held = lengths.tolist()
    for length in dict.fromkeys(held):
        of_length = [row for row, other in enumerate(held) if other == length]
        for rows in _rows_at_once(of_length, order.shape[1], length, AT_ONCE[order.device.type]):
            similar = total_similarity(keys[rows, :, :length].float(), order[rows, :, :length])
            mean[rows, :, :length] = similar / length
    return mean


def _rows_at_once(rows: Sequence[int], heads: int, entries: int, most: int) -> Iterator[Any]:
    """Rows of so many entries in parts of at most so many similarities; a slice where they follow one another."""
    largest = max(last - first for first, last in similarity_tiles(entries))
    count = max(1, most // (heads * largest * entries))
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        together = part[-1] - part[0] + 1 == len(part)
        yield slice(part[0], part[-1] + 1) if together else list(part)


def similarity_tiles(entries: int) -> list[tuple[int, int]]:
    """The rows [first, last) of N x N similarities that are made at a time."""
    count = max(entries // max(SIMILARITIES // entries, LEAST_ROWS), 1)
    edges = [entries * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def total_similarity(keys: Tensor, order: Tensor) -> Tensor:
    """Per entry, the sum of its similarities to the others: [..., Hkv, N].

    keys [..., Hkv, N, D]; order int64 [..., Hkv, N]: slots, oldest first

    However the rows are tiled the sum is the same, to the last bit: a similarity is 0 or a multiple of 2**-24 between
    0.5 and 1 (and rounding), so that float64 adds 2**28 of them without any rounding.
    """
    unit = keys / keys.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-8)
    age = torch.arange(1, keys.shape[-2] + 1, device=keys.device, dtype=keys.dtype).expand(order.shape)
    rank = torch.empty_like(age).scatter_(-1, order, age)[..., None, :]
    total = torch.zeros(order.shape, device=keys.device, dtype=torch.float64)
    for first, last in similarity_tiles(keys.shape[-2]):
        similarity = unit[..., first:last, :] @ unit.transpose(-1, -2)
        similarity.diagonal(first, dim1=-2, dim2=-1).zero_()
        torch.threshold_(similarity, UNDER, 0.0)
        most_recent = similarity.sign().mul_(rank).amax(-1).long() - 1  # -1: nothing is similar
        slot = order.gather(-1, most_recent.clamp(min=0))
        total += similarity.scatter_(-1, slot[..., None], 0.0).sum(dim=-2, dtype=torch.float64)
    return total.float()


# ---- which form ----------------------------------------------------------------------------------------------------


@cache
def redundancy_choice(dtype: torch.dtype, head_dim: int) -> Choice:
    """Who computes it of such keys on this process's GPU."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Choice("torch", f"the keys are {str(dtype).removeprefix('torch.')}")
    return check_redundancy(_triton_form, dtype, head_dim, "cuda")


def check_redundancy(load: Callable[[], Total], dtype: torch.dtype, head_dim: int, device: str) -> Choice:
    """Compare with the reference: two rows of `CHECKED` entries, one of them padded, the other also alone."""

    def judge(form: Total) -> tuple[bool, str]:
        given = [part.to(device) for part in drawn_entries(dtype, head_dim)]
        found, (keys, positions, lengths) = form(*given), given
        worst = 0.0
        for row, length in enumerate(lengths.tolist()):
            wanted = total_similarity(keys[row, :, :length].double(), positions[row, :, :length].argsort(-1))
            error = (found[row, :, :length] - wanted).abs() / wanted.clamp(min=1.0)
            worst = max(worst, float(error.nan_to_num(nan=float("inf")).max()))
        finding = f"error / allowed: {worst:.1e} / {ALLOWED:.1e}"
        if not torch.equal(form(*(part[:1] for part in given))[0], found[0]):
            return False, f"a row depends on the batch; {finding}"
        return worst <= ALLOWED, finding

    return choose(load, judge)


def drawn_entries(dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(keys [2, 2, N, D], positions, lengths) without a cosine that rounding could bring to the other side of 0.5.

    One head's keys are of 1 and -1 (a power of 4 of them, the rest 0): their cosines, many of which are 0.5, are exact
    in any precision. Those of the other lie around a few directions, near to one another or far.
    """
    generator = torch.Generator().manual_seed(0)
    few = 4 ** ((head_dim.bit_length() - 1) // 2)
    signs = torch.randn(2, 3, few, generator=generator).sign()
    which = torch.randint(3, (2, 2, CHECKED), generator=generator)
    keys = torch.zeros(2, 2, CHECKED, head_dim)
    flipped = torch.rand(2, CHECKED, few, generator=generator) < 0.15
    keys[:, 0, :, :few] = signs.gather(1, which[:, 0, :, None].expand(-1, -1, few)) * torch.where(flipped, -1.0, 1.0)
    noise = torch.nn.functional.normalize(torch.randn(2, CHECKED, head_dim, generator=generator), dim=-1)
    along = torch.nn.functional.one_hot(which[:, 1], head_dim) + 0.2 * noise  # 11 degrees away, at most
    keys[:, 1] = along * torch.randn(2, CHECKED, 1, generator=generator).exp()
    lengths = torch.tensor([CHECKED, CHECKED * 2 // 3])
    keys[1, :, lengths[1] :] = float("nan")  # nobody reads padding
    positions = 3 * torch.rand(2, 2, CHECKED, generator=generator).argsort(-1)
    return keys.to(dtype), positions, lengths


def _triton_form() -> Total:
    from sparse_rl.kernels.redundancy_triton import total_similarity as form

    return form


def redundancy_bytes(
    entries: int, kv_heads: int, head_dim: int, sequences: int = 1, device: str = "cpu", dtype: str = "float32"
) -> int:
    """The transient of `mean_similarity`, for as many of the sequences as are taken at a time.

    A tile of similarities in float32, and again in float64; three arrays of keys in float32; a few numbers per entry.
    Triton's kernel, where it is taken for keys of this dtype: of all sequences a copy of the keys, and a few numbers.
    """
    if device == "cuda" and redundancy_choice(getattr(torch, dtype), head_dim).kernel == "triton":
        return sequences * kv_heads * entries * (2 * head_dim + 24)
    rows = max(last - first for first, last in similarity_tiles(entries))
    at_once = min(sequences, max(1, AT_ONCE[device] // (kv_heads * rows * entries)))
    return at_once * kv_heads * entries * (12 * rows + 12 * head_dim + 64)
