"""The attention function that models run with, in training and in the reference engine.

transformers calls the function under the name ATTENTION. The forward keyword `kv_view` determines which tokens a query
sees: in training a view from `make_view` (views/), in sampling an `EvictingCache` (methods/eviction/). Without
`kv_view`, the function is plain causal SDPA. `kv_view` is a keyword because gradient checkpointing captures keywords
and passes them to the recomputed forward pass. A context variable or a module attribute would silently give wrong
gradients.

Sizes in shapes: B rows, Hq query heads, Hkv kv heads, T queries of the call, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from sparse_rl.attention.families import check_replayable
from sparse_rl.errors import UserError
from sparse_rl.experts.routing import attach
from sparse_rl.trace import TraceError

ATTENTION = "sparse_rl"

NO_MASK = torch.empty(1, 1, 1, 1, dtype=torch.bool)
"""The `attention_mask` to pass with a `kv_view`. Transformers takes a 4D tensor as a finished mask, and therefore
builds no mask of tokens x tokens.
"""


class KVView(Protocol):
    """Type of the forward keyword `kv_view`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute the attention of one layer over the tokens that the queries see. Returns the output [B, Hq, T, D].

        layer : index of the layer in the model, from 0
        query : [B, Hq, T, D], after RoPE
        key, value : [B, Hkv, T, D] of the same tokens, keys after RoPE; a cache adds them to its entries
        scaling : the factor on q . k
        """
        ...


@dataclass(frozen=True)
class Replayed:
    """Sizes that determine the memory of a replay.

    rows, length : number of sequences, and of tokens in each; the first `prompt` tokens are the prompt
    layers : number of layers whose attention keeps tensors for the backward pass at the same time
    kernel : one of ATTENTION_KERNELS, or auto
    itemsize, model_itemsize : bytes per number in the attention, and in the rest of the model's forward pass
    """

    rows: int
    prompt: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    kernel: str
    itemsize: int
    model_itemsize: int
    cuda: bool


class TraceView:
    """Base class of the training views, which replay the traces of B padded sequences. `make_view` chooses a subclass.

    batch : the trace sections by name, from `batch_traces`, in host memory
    through : True if gradients flow through fitted biases and values to the entries from which they were fitted
    replays, requires : sections that a batch may have, and sections that it must have; other batches raise TraceError
    losses : an attribute only of views that compute a loss of their method: layer -> loss, after a forward pass. GRPO
        adds the mean over layers to its own loss
    """

    replays: ClassVar[frozenset[str]]
    requires: ClassVar[frozenset[str]]

    def __init__(
        self, batch: Mapping[str, Tensor], device: torch.device | str, kernel: str = "gather", through: bool = True
    ) -> None:
        check_sections(type(self), batch)
        self.device, self.kernel, self.through = torch.device(device), kernel, through
        self.prepare(batch)

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        """Store the data that all layers share, from the trace sections `batch`."""
        raise NotImplementedError

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        raise NotImplementedError

    @classmethod
    def holds(cls, config: Any, replayed: Replayed) -> list[tuple[str, int, str]]:
        """Return the memory that a replay takes besides queries, keys and values: a list of (name, bytes, note)."""
        raise NotImplementedError


def check_sections(view: Any, sections: Iterable[str]) -> None:
    """Raise TraceError if a trace has a section that the view class does not replay, or lacks a required section."""
    if unsupported := [name for name in sections if name not in view.replays]:
        supported = ", ".join(sorted(view.replays))
        raise TraceError(
            f"{view.__name__} cannot replay the section {unsupported[0]!r} of a trace; it replays {supported}"
        )
    if missing := sorted(view.requires - set(sections)):
        raise TraceError(f"{view.__name__} cannot replay a trace without the section {missing[0]!r}")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    kv_view: KVView | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention by `kv_view`, or by plain SDPA if it is None; transformers defines the signature.

    query : [B, Hq, T, D], after RoPE
    key, value : [B, Hkv, T, D], keys after RoPE

    Returns the output [B, T, Hq, D], and None instead of attention weights. Raises UserError for dropout with a view.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if kv_view is not None:
        if dropout:
            raise UserError(f"attention dropout {dropout} cannot be replayed; set attention_dropout to 0 in the model")
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


def adopt(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a model to our attention function, so that its forward accepts `kv_view`; return the same model.

    The routers of a mixture of experts are connected to `kv_view`, too (sparse_rl/experts/routing.py). A second call
    changes nothing. Raises UserError if the model's attention cannot be replayed (`check_replayable`).
    """
    check_replayable(model.config)
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    attach(model)
    return model


def refuse_reentrant_checkpointing(model: nn.Module) -> None:
    """Raise UserError if the model uses reentrant gradient checkpointing, which drops losses that a layer adds."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and checkpoint is not None:
            if getattr(checkpoint, "keywords", {}).get("use_reentrant", True) is not False:  # torch's default is True
                raise UserError(
                    "reentrant gradient checkpointing is not supported; "
                    'use gradient_checkpointing_kwargs={"use_reentrant": False}'
                )
            return
