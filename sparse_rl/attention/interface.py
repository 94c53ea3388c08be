"""The one attention function that a model runs under, in training and in the reference engine.

It is registered with transformers as ATTENTION. What a query may see travels as the forward keyword `kv_view`, an
opaque record that only the attention looks into:

    what `make_view` makes (views/)    training: the traces of the rows, one layer's part at a time
    EvictingCache (rollout/)           sampling: the physical cache, compacted by its policy

A keyword, because it is captured by gradient checkpointing and seen again in the recomputed forward; a context variable
or a module attribute silently gives wrong gradients there. Without `kv_view` the function is plain causal SDPA.
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
from sparse_rl.trace import TraceError

ATTENTION = "sparse_rl"

NO_MASK = torch.empty(1, 1, 1, 1, dtype=torch.bool)
"""The `attention_mask` to give beside a `kv_view`: a 4D tensor counts as prepared, so that transformers builds no S x S
mask of its own."""


class KVView(Protocol):
    """What travels in the forward keyword `kv_view`; only attention looks inside."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """The attention of one layer over what its queries see: [B, Hq, T, D].

        layer : its place in the model, from 0
        query : [B, Hq, T, D], after RoPE
        key, value : [B, Hkv, T, D] of the same tokens, keys after RoPE; a cache stores them beside what it holds
        scaling : the factor on q . k
        """
        ...


@dataclass(frozen=True)
class Replayed:
    """What is replayed, as far as memory goes: `rows` sequences of `length` tokens, of which `prompt` are the prompt's.

    heads, kv_heads, head_dim : of a layer; layers : of which something is held until the backward pass
    kernel : of ATTENTION_KERNELS, or auto
    itemsize : bytes of a number in the attention; model_itemsize : in the model's forward
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
    """A `kv_view` for training, of the recorded traces of B padded sequences; `make_view` chooses one.

    Parameters
    ----------
    batch : from `batch_traces`, the sections by name; in host memory
    device : where the model runs
    kernel : one of ATTENTION_KERNELS
    through : whether gradients flow through what is made again to what it was made of

    replays : the trace sections that a class replays; it refuses a batch with any other
    requires : those of them that it cannot do without
    losses : where its method has a loss, by layer, once a forward is done: GRPO adds their mean to its own

    Raises TraceError where the batch has another section, or lacks one.
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
        """Make what all layers share."""
        raise NotImplementedError

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `KVView.attend`."""
        raise NotImplementedError

    @classmethod
    def holds(cls, config: Any, replayed: Replayed) -> list[tuple[str, int, str]]:
        """What replay under a policy's settings holds besides q, k and v: of each thing its name, bytes, and a note."""
        raise NotImplementedError


def check_sections(view: Any, sections: Iterable[str]) -> None:
    """Raise TraceError where a trace has a section that the class `view` does not replay, or lacks one it requires."""
    if beyond := [name for name in sections if name not in view.replays]:
        can = ", ".join(sorted(view.replays))
        raise TraceError(f"{view.__name__} cannot replay the section {beyond[0]!r} of a trace; it replays {can}")
    if lacking := sorted(view.requires - set(sections)):
        raise TraceError(f"{view.__name__} cannot replay a trace without the section {lacking[0]!r}")


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
    """transformers' attention interface: what a layer's queries, keys and values are handed to, and from there a view.

    query : [B, Hq, T, D]; key, value : [B, Hkv, T, D]; queries and keys after RoPE
    kv_view : what queries see; None: plain SDPA, causal or under `attention_mask`

    Returns ([B, T, Hq, D], None). Raises UserError for dropout beside a view.
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
    """Make a model run under our attention function, so that its forward takes `kv_view`; returns the model itself.

    A second call changes nothing. Raises UserError where its attention cannot be replayed (see `check_replayable`).
    """
    check_replayable(model.config)
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    return model


def refuse_reentrant_checkpointing(model: nn.Module) -> None:
    """Raise UserError where gradient checkpointing is reentrant (it loses what a recomputed layer adds)."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and checkpoint is not None:
            if getattr(checkpoint, "keywords", {}).get("use_reentrant", True) is not False:  # torch's default is True
                raise UserError(
                    "reentrant gradient checkpointing is not supported; "
                    'use gradient_checkpointing_kwargs={"use_reentrant": False}'
                )
            return
