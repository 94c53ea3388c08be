"""Attention of recorded sequences, for analyses: the model runs under the trace, and hands out its queries and keys.

`hand_out` hands each layer's queries and keys to a function while the layer runs, so that those of a single layer are
in memory. `window_scores` and `attention_cells` reduce them to raw scores: softmax(q . k) over the tokens that the
trace lets a query see. They know nothing of fitted biases (Attention Matching) and of summaries (pages).

Sizes in shapes: Hq query heads, Hkv kv heads with G query heads each, S fed tokens, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.engine import Rollout
from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.views import make_view
from sparse_rl.errors import UserError

CHUNK = 512  # queries at a time


@dataclass(frozen=True)
class LayerAttention:
    """Queries and keys of one layer for one sequence, after RoPE. The last sampled token is never fed, so not among S.

    index : the layer's index in the model
    query, key : [Hq, S, D], [Hkv, S, D]
    evict_at : int32 [Hkv, S], on the device of the keys; query q sees token t if t <= q < evict_at[t]
    scaling : the factor on q . k
    """

    index: int
    query: Tensor
    key: Tensor
    evict_at: Tensor
    scaling: float

    @property
    def group(self) -> int:
        """G, number of query heads that share a kv head."""
        return len(self.query) // len(self.key)


Take = Callable[[LayerAttention], None]


@torch.no_grad()
def hand_out(model: Any, rollout: Rollout, take: Take) -> None:
    """Run the model over a rollout under its trace, and call `take` with each layer that has no sliding window."""
    tokens, trace = [*rollout.prompt_ids, *rollout.completion_ids], rollout.trace
    needed = (*cache_shape(model.config)[:2], len(tokens))
    if trace.shape != needed:
        wrong = f"a trace with layers x kv heads x tokens {list(trace.shape)} does not fit the model and the sequence"
        raise UserError(f"{wrong}, which have {list(needed)}")
    trace.check(len(rollout.prompt_ids))
    device = next(model.parameters()).device
    view, fed, taken = make_view([trace], [0], len(tokens), device), len(trace) - 1, set(trace.global_layers)

    def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        if layer in taken:
            evict_at = trace.evict_at[layer, :, :fed].to(key.device)
            take(LayerAttention(layer, query[0, :, :fed], key[0, :, :fed], evict_at, scaling))

    view.observe = observe
    ids = torch.tensor([tokens], device=device)
    adopt(model)(
        input_ids=ids, attention_mask=NO_MASK.to(device), kv_view=view, use_cache=False, logits_to_keep=1
    )  # the logits of all tokens of a long sequence may not fit into memory


def window_scores(layer: LayerAttention, first: int, last: int) -> Tensor:
    """Return the score of each token before the window of queries first, ..., last - 1: float32 [Hkv, first] (G-KV
    section 3, eqs. 1 and 2).

    The score is the attention of the window's queries: the maximum over the G query heads of a kv head, and the mean
    over the queries. The softmax runs over all tokens that a query sees, also inside the window. A token that the first
    query of the window does not see has the score 0.
    """
    heads, width = layer.key.shape[0], last - first
    scores = torch.zeros(heads, first, device=layer.key.device)
    now = torch.arange(first, last, device=scores.device)[:, None]
    causal = torch.ones(width, width, dtype=torch.bool, device=scores.device).tril()
    buffers = scores.new_empty(3, width * last)  # new tensors for each query head would double the time on a CPU
    for head in range(heads):
        leaves = layer.evict_at[head, :last]
        held = (leaves > first).nonzero()[:, 0]  # has the window's own tokens, and `before` earlier tokens
        before, leaves = len(held) - width, leaves[held]
        keys = layer.key[head, held].float().T
        logits, probabilities, largest = (x[: width * len(held)].view(width, -1) for x in buffers)
        largest.zero_()
        evicted_inside = bool((leaves < last).any())
        for query in layer.query[head * layer.group : (head + 1) * layer.group, first:last].float() * layer.scaling:
            torch.mm(query, keys, out=logits)
            logits[:, before:].masked_fill_(~causal, float("-inf"))
            if evicted_inside:
                logits.masked_fill_(now >= leaves, float("-inf"))
            torch.softmax(logits, -1, out=probabilities)
            torch.maximum(largest, probabilities, out=largest)
        scores[head, held[:before]] = largest[:, :before].mean(0)
    return scores


def attention_cells(layer: LayerAttention, heads: Sequence[int], most: int) -> Tensor:
    """Return a map of attention, the mean over query heads of one kv head: float32 [rows, columns], both <= `most`.

    A cell covers `cell_size` consecutive queries (rows) and tokens (columns). Its value is the largest attention of one
    of its queries to one of its tokens; NaN if none of its queries sees any of its tokens.

    heads : indices of query heads that share a kv head
    most : maximum number of rows and columns
    """
    fed, size = layer.key.shape[1], cell_size(layer.key.shape[1], most)
    (kv_head,) = {head // layer.group for head in heads}
    key, leaves = layer.key[kv_head].float(), layer.evict_at[kv_head]
    token = torch.arange(fed, device=key.device)
    columns, step = -(-fed // size), size * max(CHUNK // size, 1)
    buffers, rows = key.new_empty(3, step * fed), []
    for start in range(0, fed, step):
        end = min(start + step, fed)
        logits, probabilities, total = (x[: (end - start) * end].view(end - start, end) for x in buffers)
        hidden = (token[:end] > token[start:end, None]) | (token[start:end, None] >= leaves[:end])
        total.zero_()
        for head in heads:
            torch.mm(layer.query[head, start:end].float() * layer.scaling, key[:end].T, out=logits)
            total += torch.softmax(logits.masked_fill_(hidden, float("-inf")), -1, out=probabilities)
        total.div_(len(heads)).masked_fill_(hidden, -1.0)
        padded = F.pad(total, (0, columns * size - end, 0, -(end - start) % size), value=-1.0)
        rows.append(padded.unflatten(0, (-1, size)).amax(1).unflatten(1, (-1, size)).amax(2).cpu())
    whole = torch.cat(rows)
    return whole.masked_fill(whole < 0, float("nan"))


def cell_size(length: int, most: int) -> int:
    """Return the number of queries, and of tokens, that a cell of a map of a sequence covers."""
    return -(-length // most)
