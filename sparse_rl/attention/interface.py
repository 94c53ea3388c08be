"""The one attention function that a model runs under, in training and in the reference engine.

It is registered with transformers as ATTENTION. What a query may see travels as the forward keyword `kv_view`, an
opaque record that only the attention looks into:

    ReplayView (replay.py)      training: evict_at, one layer's slice at a time
    EvictingCache (rollout/)    sampling: the physical cache, compacted by its policy

A keyword, because it is captured by gradient checkpointing and seen again in the recomputed forward; a context variable
or a module attribute silently gives wrong gradients there. Without `kv_view` the function is plain causal SDPA.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

ATTENTION = "sparse_rl"
FAMILIES = ("qwen2", "qwen3", "llama")

# Given as `attention_mask`, a 4D tensor is taken as already prepared: transformers builds no S x S mask of its own.
NO_MASK = torch.empty(1, 1, 1, 1, dtype=torch.bool)


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Attention of [B, Hq, T, D] over [B, Hkv, N, D], the one kernel call of both the engine and the replay."""
    dtype = value.dtype
    wanted = computing_dtype(query, value)
    query, key, value = query.to(wanted), key.to(wanted), value.to(wanted)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    return out.to(dtype)


def computing_dtype(query: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """What attention is computed in.

    Autocast's dtype, where it is on: RoPE has left queries and keys in float32. For float32 on a CPU float64: the
    engine sums over a compacted cache, the trainer over a masked row, and a trained model can amplify the difference of
    two summation orders a hundredfold.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.float64 if value.dtype == torch.float32 and device == "cpu" else value.dtype


class KVView(Protocol):
    """What travels in the forward keyword `kv_view`."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [B, Hq, T, D] over key, value [B, Hkv, T, D] (after RoPE) and what the view holds: [B, Hq, T, D]."""
        ...


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    kv_view: KVView | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [B, Hq, T, D] in, ([B, T, Hq, D], None) out."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if kv_view is not None:
        if dropout:
            raise ValueError(f"attention dropout {dropout} cannot be replayed; set attention_dropout to 0 in the model")
        out = kv_view.attend(cast(int, module.layer_idx), query, key, value, scaling)
    else:
        causal = attention_mask is None and query.shape[2] > 1
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scaling,
            enable_gqa=True,
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def cache_shape(config: Any) -> tuple[int, int, int]:
    """(layers, kv heads, head dim) of a model's KV cache."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim


def adopt(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model run under ATTENTION; a second call changes nothing.

    Raises
    ------
    ValueError
        A model whose attention cannot be replayed: another family, sliding-window layers, attention dropout.
    """
    config = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(f"model type {config.model_type!r} is not supported; the families are {', '.join(FAMILIES)}")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        raise ValueError("models with sliding-window layers are not supported: they evict by themselves")
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError("attention_dropout must be 0: a dropped weight cannot be replayed")
    if config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    return model


def refuse_reentrant_checkpointing(model: nn.Module) -> None:
    """Raise ValueError where gradient checkpointing is reentrant (it loses what a recomputed layer adds)."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and checkpoint is not None:
            if getattr(checkpoint, "keywords", {}).get("use_reentrant", True) is not False:  # torch's default is True
                raise ValueError(
                    "reentrant gradient checkpointing is not supported; "
                    'use gradient_checkpointing_kwargs={"use_reentrant": False}'
                )
            return
