"""The specification: attention under an explicit S x S boolean mask, plain and slow.

Every fast path is compared with this file. Nothing here is meant to be run at size: all layers' masks are alive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.trace import EvictionTrace


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scaling: float
) -> torch.Tensor:
    """softmax(q K^T scaling) V over the visible keys, one query head at a time, in float64.

    query [B, Hq, S, D]; key, value [B, Hkv, S, D]; visible bool [B, Hkv, S (query), S (key)]. Returns [B, Hq, S, D].
    """
    dtype, group = query.dtype, query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double(), value.double()
    heads = []
    for head in range(query.shape[1]):
        kv = head // group
        logits = query[:, head] @ key[:, kv].transpose(-1, -2) * scaling
        weights = logits.masked_fill(~visible[:, kv], float("-inf")).softmax(-1)
        heads.append(weights @ value[:, kv])
    return torch.stack(heads, dim=1).to(dtype)


class DenseView:
    """A `kv_view` of one unpadded sequence: its trace as dense masks, all layers at once."""

    def __init__(self, trace: EvictionTrace, device: torch.device | str = "cpu") -> None:
        self.masks = [trace.visible(layer)[None].to(device) for layer in range(trace.layers)]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return dense_attention(query, key, value, self.masks[layer], scaling)


def dense_logprobs(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    trace: EvictionTrace,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probs of one completion's tokens under its trace, one sequence at a time: float [completion]."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt_ids, *completion_ids]], device=device)
    adopt(model)
    logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=DenseView(trace, device), use_cache=False).logits
    logits = logits[0, len(prompt_ids) - 1 : -1].float() / (temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]
