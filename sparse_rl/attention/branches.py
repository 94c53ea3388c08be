"""Conversations whose turns were prefilled, one row each: what the turns share is computed once.

Turn k was sampled after a dense prefill of all P_k tokens before it, under evictions of its own. The prefill of a later
turn begins with that of an earlier one. So a row holds one dense stream, and each turn only as a branch:

    [ stream: tokens 0 .. P_K - 1 ] [ branch 1: token P_1 - 1 and what was sampled ] ... [ branch K ]

The first token of a branch is the prompt's last one, which predicts the first sampled token. Under the trace of turn k,
the queries of branch k see the stream's first P_k - 1 tokens and their own branch. A row has fewer than twice the
conversation's tokens, where a row for each turn would have all prefixes.

In the attention of a layer, all branches of all rows form a batch of their own, aligned at their first tokens: each has
its part of the stream before it, and evict_at says what its queries see. So every kernel computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparse_rl.attention.interface import KVView
from sparse_rl.attention.views import LayerMap, ReplayView, make_view
from sparse_rl.trace import EvictionTrace, TraceError

Turns = Sequence[tuple[int, EvictionTrace]]  # of one conversation: (prompt tokens, trace) of each turn


class BranchedView(KVView):
    """A `kv_view` of rows with branches, laid out by `branched_rows`.

    stream, branches : views of the streams, and of the branches with the keys before them
    keys : column of each key of a branch, among all columns of all rows, int64 [branches, width]
    queries : column of each query of a branch, likewise, int64 [branches, longest branch]
    back : for each column after the streams, its query among those of all branches, int64 [rows, columns]
    """

    def __init__(self, stream: LayerMap, branches: LayerMap, keys: Tensor, queries: Tensor, back: Tensor) -> None:
        self.stream, self.branches = stream, branches
        self.keys, self.queries, self.back = keys, queries, back

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        width = query.shape[2] - self.back.shape[1]  # of the streams
        own = query[:, :, :width], key[:, :, :width], value[:, :, :width]
        streams = self.stream.attend(layer, *own, scaling)
        asked, keys, values = _taken(query, self.queries), _taken(key, self.keys), _taken(value, self.keys)
        branches = self.branches.attend(layer, asked, keys, values, scaling)
        return torch.cat([streams, _taken(branches, self.back)], dim=2)


def _taken(x: Tensor, columns: Tensor) -> Tensor:
    """Return the columns of x [B, H, S, D], counted over all rows, int64 [R, N], as [R, H, N, D]."""
    return x.transpose(1, 2).flatten(0, 1)[columns].transpose(1, 2)


@dataclass
class BranchedRows:
    """Rows with branches, for a forward pass.

    tokens : position of each column's token in its conversation, int64 [rows, columns]; 0 in padding
    scored : True for the columns whose tokens were sampled, bool [rows, columns]; the column before has the query
    """

    view: BranchedView
    tokens: Tensor
    scored: Tensor


def branched_rows(conversations: Sequence[Turns], device: torch.device | str, kernel: str = "gather") -> BranchedRows:
    """Lay conversations out as rows with branches. kernel : one of ATTENTION_KERNELS

    Raises TraceError if the traces record more than evictions.
    """
    traces = [trace for turns in conversations for _, trace in turns]
    if further := sorted({name for trace in traces for name in trace.further} - {"windowed"}):
        wrong = f"turns that were prefilled are replayed from evictions alone, but the traces have {further[0]}"
        raise TraceError(f"{wrong}; keep the cache between turns, or use rows of one turn")
    streams = [turns[-1][0] for turns in conversations]  # a trace does not say what its last query sees: one more
    lengths = [[len(trace) - prompt + 1 for prompt, trace in turns] for turns in conversations]
    rows, ahead = len(conversations), max(streams)
    width, longest = ahead + max(map(sum, lengths)), max(map(max, lengths))
    before = max(prompt for turns in conversations for prompt, _ in turns) - 1
    tokens, scored = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.bool)
    keys, queries = (torch.zeros(len(traces), size, dtype=torch.long) for size in (before + longest, longest))
    back, starts = torch.zeros(rows, width - ahead, dtype=torch.long), list[int]()
    for row, turns in enumerate(conversations):
        tokens[row, : streams[row]] = torch.arange(streams[row])
        column = ahead
        for (prompt, _), length in zip(turns, lengths[row], strict=True):
            branch, own = len(starts), torch.arange(column, column + length)
            starts.append(before - prompt + 1)
            keys[branch, starts[-1] : before] = row * width + torch.arange(prompt - 1)
            keys[branch, before : before + length] = queries[branch, :length] = row * width + own
            back[row, own - ahead] = branch * longest + torch.arange(length)
            tokens[row, own] = torch.arange(prompt - 1, prompt - 1 + length)
            scored[row, own[1:]] = True
            column += length
    first = traces[0]
    dense = [EvictionTrace.dense(first.layers, first.kv_heads, length, first.windows) for length in streams]
    stream = make_view(dense, [0] * rows, ahead, device, kernel)
    branches = make_view(traces, starts, before + longest, device, kernel)
    for part in {id(part): part for part, _ in branches.of_layer.values()}.values():
        assert isinstance(part, ReplayView)  # it replays evictions alone
        part.begin_at(before)
    view = BranchedView(stream, branches, *(x.to(device) for x in (keys, queries, back)))
    return BranchedRows(view, tokens.to(device), scored.to(device))
