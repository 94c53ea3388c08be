"""The references of replay: one sequence under dense masks. They also replay Attention Matching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention import NO_MASK, adopt
from sparse_rl.attention.interface import KVView
from sparse_rl.attention.views import LayerMap, places
from sparse_rl.experts import RouterReplay
from sparse_rl.kernels.masked import dense_attention
from sparse_rl.methods.am.match import Block, refit
from sparse_rl.methods.am.sections import ContextRecord, Record, fitted_parts
from sparse_rl.states.mixers import Sequences
from sparse_rl.trace import EvictionTrace, policy_part


def dense_logprobs(
    model: Any,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    trace: EvictionTrace,
    temperature: float = 1.0,
) -> Tensor:
    """Return the log-probabilities of one completion under its trace, with dense masks: float32 [completion tokens]."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt_ids, *completion_ids]], device=device)
    adopt(model)
    part = policy_part(trace.sections)
    further = {name: values for name, values in part.items() if name != "evict_at"}
    of_policy = DenseMatchedView(EvictionTrace(part["evict_at"], further, validate=trace.validate), device)
    windows, of_windows = trace.windows or [0] * trace.layers, None
    if any(windows):
        layers = [layer for layer, window in enumerate(windows) if window]
        of_windows = DenseView(EvictionTrace(trace.evict_at[layers], validate=trace.validate), device)
    view = LayerMap(of_policy, places(of_policy, of_windows, windows))
    view.states = Sequences.right_padded([ids.shape[1]])
    if "routed" in trace.further:
        view.routers = RouterReplay(trace.further["routed"][:, None], device)
    logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
    logits = logits[0, len(prompt_ids) - 1 : -1].float() / (temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]


class DenseView(KVView):
    """A `kv_view` that replays the evictions of one unpadded sequence. It keeps a dense mask for each layer."""

    def __init__(self, trace: EvictionTrace, device: torch.device | str = "cpu") -> None:
        self.masks = [trace.visible(layer)[None].to(device) for layer in range(trace.layers)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return dense_attention(query, key, value, self.masks[layer], scaling)


class DenseMatchedView(DenseView):
    """Replays the trace of one unpadded sequence under any policy but clustered.

    Under Attention Matching, each compaction makes a new fitted entry for every token that it fits. Queries see the
    token's own entry until the token's first fit, and each fitted entry until the next compaction. One masked attention
    call covers all these entries. After a context that Attention Matching compacted once, the same holds for the only
    compaction.
    """

    def __init__(self, trace: EvictionTrace, device: torch.device | str = "cpu") -> None:
        super().__init__(trace, device)
        self.evict_at = trace.evict_at.to(device)
        self.times = trace.further["refit_at"].tolist() if "refit_at" in trace.further else []
        self.record = Record.read(trace.further["refit_with"]) if self.times else None
        self.context = trace.further if "compacted_at" in trace.further else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if self.record is None and self.context is None:
            return super().attend(layer, query, key, value, scaling)
        heads, group = key.shape[1], query.shape[1] // key.shape[1]
        out = []
        for head in range(heads):  # kv heads keep different tokens
            queries = query[:, head * group : (head + 1) * group]
            kv = slice(head, head + 1)
            attend = self._attend_head if self.context is None else self._attend_after_context
            out.append(attend(self.evict_at[layer, head], queries, key[:, kv], value[:, kv], scaling))
        return torch.cat(out, dim=1)

    def _attend_after_context(
        self, evict_at: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Return one kv head's output, as `_attend_head` does, if the context was compacted once."""
        length, (now,) = key.shape[2], self.context["compacted_at"].tolist()
        fit = ContextRecord.read(self.context["compacted_with"]).fit
        token = torch.arange(length, device=key.device)
        seen_until = torch.full_like(token, length)
        indices, biases, fitted_values = [token], [value.new_zeros(1, 1, length, dtype=torch.float32)], [value]
        for part in fitted_parts(self.context["compacted_parts"], self.context["compacted_queries"], query.shape[1]):
            own = token[part.start : part.end]
            seen_until[own] = now
            stays = (evict_at[own] > now).nonzero()[:, 0]
            if len(stays):
                block = Block(
                    keys=key[:, :, own],
                    values=value[:, :, own],
                    queries=query[:, part.heads.to(key.device), part.tokens.to(key.device)][:, None],
                    bias=value.new_zeros(1, 1, len(own), dtype=torch.float32),
                    competing=torch.ones(1, 1, len(own), dtype=torch.bool, device=key.device),
                    scaling=scaling,
                )
                bias, values = refit(block, stays[None, None], fit)
                indices, biases, fitted_values = [*indices, own[stays]], [*biases, bias], [*fitted_values, values]
        index = torch.cat(indices)
        position, entry = token[:, None], torch.arange(len(index), device=key.device)
        seen_from = torch.where(entry < length, index, now)
        seen_until = torch.cat([seen_until, seen_until.new_full((len(index) - length,), length)])
        visible = (seen_from <= position) & (position < seen_until)
        return dense_attention(
            query,
            key[:, :, index],
            torch.cat(fitted_values, dim=2),
            visible[None, None],
            scaling,
            torch.cat(biases, dim=2),
        )

    def _attend_head(self, evict_at: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Return one kv head's output, [1, G, S, D] for G query heads; key and value are [1, 1, S, D]."""
        length, record = key.shape[2], self.record
        token = torch.arange(length, device=key.device)
        seen_from, seen_until = [token], [torch.full_like(token, length)]
        keys, values, biases = [key], [value], [value.new_zeros(1, 1, length, dtype=torch.float32)]
        # Tokens that the previous compaction fitted, with their biases and values.
        fitted, bias, fitted_values = token[:0], biases[0][..., :0], value[:, :, :0]
        since = record.sinks
        for now, following in zip(self.times, [*self.times[1:], length], strict=True):
            raw = token[since : now - record.window]
            seen_until[0][raw] = now
            block_tokens = torch.cat([fitted, raw])
            reference_queries = query[:, :, now - record.reference_queries : now]
            block = Block(
                keys=key[:, :, block_tokens],
                values=torch.cat([fitted_values, value[:, :, raw]], dim=2),
                queries=reference_queries.reshape(1, 1, -1, reference_queries.shape[-1]),
                bias=torch.cat([bias, bias.new_zeros(1, 1, len(raw))], dim=2),
                competing=torch.ones(1, 1, len(block_tokens), dtype=torch.bool, device=key.device),
                scaling=scaling,
            )
            stays = (evict_at[block_tokens] > now).nonzero()[:, 0]
            bias, fitted_values = refit(block, stays[None, None], record.fit)
            fitted, since = block_tokens[stays], now - record.window
            keys, values, biases = [*keys, key[:, :, fitted]], [*values, fitted_values], [*biases, bias]
            seen_from, seen_until = (
                [*seen_from, torch.full_like(fitted, now)],
                [*seen_until, torch.full_like(fitted, following)],
            )
        position = token[:, None]
        visible = (torch.cat(seen_from) <= position) & (position < torch.cat(seen_until))
        return dense_attention(
            query,
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
            visible[None, None],
            scaling,
            torch.cat(biases, dim=2),
        )
