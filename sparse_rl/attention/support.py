"""Log-probs of drawn tokens among the tokens that their draws kept, after min-p, top-k and top-p.

A draw of token y from the kept tokens K, whose scores z are the logits divided by the temperature, has the log-prob

    log p(y | K) = z_y - log sum_{j in K} exp(z_j)

Which tokens a draw kept is a decision: the sampler records it, and it is replayed. The scores are numbers: the model's
head makes them again. One product of the head for each tile of draws gives scores over the whole vocabulary, of which
only those of kept tokens are held, and have gradients:

    d log p(y | K) / dz_j = 1[j = y] - p_j        d entropy / dz_j = -p_j (log p_j + entropy)        for j in K
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 2**25  # scores of a tile, float32


class DrawScores(NamedTuple):
    """Scores of N drawn tokens, float32 [N] each.

    kept : log-prob among the kept tokens, with gradients
    whole : log-prob over the whole vocabulary, without gradients
    entropy : entropy of the distribution over the kept tokens in nats, with gradients
    """

    kept: Tensor
    whole: Tensor
    entropy: Tensor


def score_draws(
    hidden: Tensor,
    head: Any,
    labels: Tensor,
    sizes: Tensor,
    ids: Tensor,
    scale: float = 1.0,
    gathered: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> DrawScores:
    """Score N drawn tokens. The head computes in autocast's dtype if autocast is on, else in the dtype of `hidden`.

    hidden : the last hidden states from which the tokens were drawn, float [N, hidden size]
    head : the model's output embedding, with `weight` [vocabulary, hidden size], and `bias` [vocabulary] or None
    labels : the drawn tokens, int64 [N]
    sizes : number of tokens that each draw kept, int64 [N]; 0 means the whole vocabulary
    ids : the kept tokens, draw by draw, integers [sum of the sizes]. A draw whose own token is missing gets -inf
    scale : factor of the logits: 1 / temperature, and what the model's own forward multiplies them by
    gathered : context in which the head's parameters are whole, also in the backward pass (ZeRO-3)
    """
    with gathered():
        if bool((sizes == 0).any()):
            every = torch.arange(len(head.weight), dtype=ids.dtype, device=ids.device)
            ids = torch.cat([part if len(part) else every for part in ids.split(sizes.tolist())])
            sizes = sizes.where(sizes > 0, len(every))
        return DrawScores(*_DrawScores.apply(hidden, head.weight, head.bias, labels, sizes, ids, scale, gathered))


class _DrawScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        sizes: Tensor,
        ids: Tensor,
        scale: float,
        gathered: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        device, kind = hidden.device, hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        matrix, offset = weight.to(dtype), None if bias is None else bias.to(dtype)
        draw = torch.arange(len(sizes), device=device).repeat_interleave(sizes, output_size=len(ids))
        logp = torch.empty(len(ids), dtype=torch.float64, device=device)  # float32 sums of thousands err by 1e-6
        whole = torch.empty(len(sizes), device=device)
        rows, ends = max(1, TILE // len(weight)), [0, *sizes.cumsum(0).tolist()]
        for first in range(0, len(sizes), rows):
            last = min(first + rows, len(sizes))
            scores = F.linear(hidden[first:last].to(dtype), matrix, offset).float() * scale
            part = slice(ends[first], ends[last])
            logp[part] = scores[draw[part] - first, ids[part]].double()
            whole[first:last] = scores.log_softmax(-1).gather(-1, labels[first:last, None])[:, 0]

        def over_draws(values: Tensor, reduction: str) -> Tensor:
            return torch.segment_reduce(values, reduction, lengths=sizes, unsafe=True)

        logp -= over_draws(logp, "max")[draw]
        logp -= over_draws(logp.exp(), "sum").log()[draw]
        own = ids == labels[draw]
        kept, entropy = over_draws(logp.masked_fill(~own, -torch.inf), "max"), -over_draws(logp.exp() * logp, "sum")
        ctx.save_for_backward(hidden, weight, bias, sizes, ids, draw, own, logp, entropy)
        ctx.scale, ctx.gathered = scale, gathered
        ctx.mark_non_differentiable(whole)
        return kept.float(), whole, entropy.float()

    @staticmethod
    def backward(ctx: Any, by_kept: Tensor, _: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, sizes, ids, draw, own, logp, entropy = ctx.saved_tensors
        p = logp.exp()
        slope = by_kept[draw] * (own.double() - p) - by_entropy[draw] * p * (logp + entropy[draw])
        slope, ids = ctx.scale * slope, ids.long()
        to_hidden = to_weight = to_bias = None
        with ctx.gathered():
            if ctx.needs_input_grad[0]:
                to_hidden = _sums(weight, ids, sizes.cumsum(0) - sizes, slope).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                order = ids.argsort(stable=True)
                starts = torch.searchsorted(ids[order], torch.arange(len(weight), device=ids.device))
                to_weight = _sums(hidden, draw[order], starts, slope[order]).to(weight.dtype)
            if bias is not None and ctx.needs_input_grad[2]:
                to_bias = torch.zeros_like(bias, dtype=slope.dtype).index_add_(0, ids, slope).to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None, None, None, None


def _sums(values: Tensor, rows: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the rows of `values` in each bag, float [bags, size]. starts : of bags"""
    return F.embedding_bag(rows, values, starts, mode="sum", per_sample_weights=weights.to(values.dtype))
