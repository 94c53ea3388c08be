"""Transposed attention with FlexAttention: the attention that each key receives, instead of the output of each query.

FlexAttention is called with keys in the place of queries, and queries in the place of keys. The log-sum-exp of a query
is subtracted from the query's scores, which makes the scores log-probabilities. The log-sum-exp that FlexAttention then
returns for a key is the log of the attention that the key receives. No tensor of tokens x tokens is made. One compiled
graph serves all layers and steps: the data that differ are its arguments. attention/future.py has a plain form.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from sparse_rl.attention.kernels.flex import KERNEL_OPTIONS, LIMITS, padded, tile_mask
from sparse_rl.attention.kernels.tiles import listed, tile_tests

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
    first, last = (torch.nn.functional.pad(x.clamp(max=length), (0, padding)).int() for x in (first, last))
    key, queries = (torch.nn.functional.pad(x, (0, 0, 0, padding)).contiguous() for x in (key, query))
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)  # FlexAttention groups the heads of queries only
    log_sum_exp = torch.nn.functional.pad(log_sum_exp, (0, padding)).contiguous()
    values = queries.new_zeros(*queries.shape[:3], VALUE_DIM)
    inputs: Any = keys, queries, values, log_sum_exp, first, last, *transposed_tiles(first, last), scaling, largest
    if not compiled:
        return _log_mass(*inputs)[..., :length]
    with torch._dynamo.config.patch(LIMITS):
        return _compiled()(*inputs)[..., :length]


def transposed_tiles(first: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    """Return two pairs made by `listed`: for each tile of keys, the query tiles that count in part, and in full.

    `first` and `last` are int32 [B, N]: for key t, the queries first[t] <= d < last[t] count.
    """
    # made contiguous, because the kernels ignore the strides of a list
    some, full = (tiles.transpose(1, 2).contiguous() for tiles in tile_tests(first, last))
    return *listed(some & ~full), *listed(full)


def transposed_options(log_sum_exp: Tensor, first: Tensor, last: Tensor, *rest: Any) -> dict[str, Any]:
    """Return the options of the FlexAttention call; `rest` is the two pairs of tile lists, scaling, and largest."""
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
    """Compile on first use, because torch's compiler takes seconds to import."""
    return torch.compile(_log_mass, dynamic=False, fullgraph=True)
