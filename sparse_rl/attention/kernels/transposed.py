"""What flows into a key instead of what a query reads: a transposed attention, by FlexAttention.

FlexAttention is called with keys as its queries, and queries as its keys. Each key has an interval of queries that
count. The log-sum-exp of a query is taken off each of its scores, which makes it the log of a probability. What
FlexAttention returns as the log-sum-exp of a key is then the log of the attention that the key gets. The plain form is
in attention/future.py. As in flex.py no S x S tensor is made, and all that differs between layers and steps is an
argument of one compiled graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from sparse_rl.attention.kernels.flex import KERNEL_OPTIONS, LIMITS, padded, tile_mask
from sparse_rl.attention.kernels.tiles import listed, tile_tests

VALUE_DIM = 16  # of the values, which nobody reads: the smallest that FlexAttention's kernels take


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
    """The attention that each key t gets: log of the sum over first[t] <= d < last[t] of exp(min(q_d . k_t scaling -
    lse_d, largest)).

    query, key : [B, Hq, S, D] and [B, Hkv, S, D]
    log_sum_exp : float32 [B, Hq, S]
    first, last : int64 [B, S]
    scaling : the factor on q . k; largest : no log-probability counts for more
    compiled : False is torch's plain operator, which ignores the tiles and makes S x S scores: for tests

    Returns float32 [B, Hq, S] (float64 of float64 by the plain operator); -inf where no query counts.
    """
    length, width = query.shape[2], padded(query.shape[2])
    behind = width - length
    first, last = (torch.nn.functional.pad(x.clamp(max=length), (0, behind)).int() for x in (first, last))
    key, queries = (torch.nn.functional.pad(x, (0, 0, 0, behind)).contiguous() for x in (key, query))
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)  # FlexAttention groups the heads of queries only
    log_sum_exp = torch.nn.functional.pad(log_sum_exp, (0, behind)).contiguous()
    values = queries.new_zeros(*queries.shape[:3], VALUE_DIM)
    inputs: Any = keys, queries, values, log_sum_exp, first, last, *transposed_tiles(first, last), scaling, largest
    if not compiled:
        return _log_mass(*inputs)[..., :length]
    with torch._dynamo.config.patch(LIMITS):
        return _compiled()(*inputs)[..., :length]


def transposed_tiles(first: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    """The tiles of queries that count for each tile of keys, n = N / 128; see `mass_by_flex`.

    first, last : int32 [B, N]

    Returns how many count in part, and which; how many count as a whole, and which: int32 [B, 1, n] and [B, 1, n, n],
    twice.
    """
    # contiguous: a kernel walks along a list, whatever its strides
    some, full = (tiles.transpose(1, 2).contiguous() for tiles in tile_tests(first, last))
    return *listed(some & ~full), *listed(full)


def transposed_options(log_sum_exp: Tensor, first: Tensor, last: Tensor, *rest: Any) -> dict[str, Any]:
    """FlexAttention's own words for all that, beside keys and queries.

    rest : the lists of `transposed_tiles`, scaling and largest
    """
    *lists, scaling, largest = rest

    def counts(row: Tensor, _: Tensor, t: Tensor, d: Tensor) -> Tensor:
        return (first[row, t] <= d) & (d < last[row, t])

    def log_probability(score: Tensor, row: Any, head: Any, _: Tensor, d: Tensor) -> Tensor:
        return (score - log_sum_exp[row, head, d]).clamp(max=largest)

    mask = tile_mask(counts, first.shape[-1], tuple(lists))
    options: dict[str, Any] = {"block_mask": mask, "score_mod": log_probability, "scale": scaling}
    return options | {"kernel_options": dict(KERNEL_OPTIONS)}


def _log_mass(keys: Tensor, queries: Tensor, values: Tensor, *rest: Any) -> Tensor:
    _, aux = flex_attention(keys, queries, values, **transposed_options(*rest), return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return aux.lse


@cache
def _compiled() -> Any:
    """When it is first needed: torch's compiler takes seconds to import."""
    return torch.compile(_log_mass, dynamic=False, fullgraph=True)
