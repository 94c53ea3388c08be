"""The attention function that models run with, in training and in the reference engine.

transformers calls the function under the name ATTENTION. The forward keyword `kv_view` determines which tokens a query
sees: in training a view from `make_view` (views.py), in sampling a cache (sparse_rl/policies/cache.py). Without it, the
function is transformers' SDPA. It is a keyword because gradient checkpointing passes keywords to the recomputed forward
pass; a context variable or a module attribute would silently give wrong gradients.

Sizes in shapes: B rows, Hq query heads, Hkv kv heads, T queries of the call, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sparse_rl.attention.families import check_length, check_noises, check_replayable, recorded_layers
from sparse_rl.errors import UserError
from sparse_rl.experts import attach
from sparse_rl.states import mixers
from sparse_rl.trace import TraceError

ATTENTION = "sparse_rl"

NO_MASK = torch.empty(1, 1, 1, 1, dtype=torch.bool)
"""The `attention_mask` to pass with a `kv_view`. Transformers takes a 4D tensor as a finished mask, and therefore
builds no mask of tokens x tokens.
"""


class KVView(Protocol):
    """Base class of the forward keyword `kv_view`, which computes the attention of each layer."""

    policy: Any = None  # the cache policy that decides; None if nothing is decided
    routers: Any = None  # records or replays the choices of the model's routers (sparse_rl/experts.py)
    states: Any = None  # calls the model's layers with a state (sparse_rl/states/mixers.py)
    # called with the arguments of `attend` before the attention of each layer
    observe: Callable[[int, Tensor, Tensor, Tensor, float], None] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute the attention of one layer over the tokens that the queries see. Returns the output [B, Hq, T, D].

        layer : index of the layer among those of the model that hold keys and values (`recorded_layers`), from 0
        query : [B, Hq, T, D], after RoPE
        key, value : [B, Hkv, T, D] of the same tokens, keys after RoPE; a cache adds them to its entries
        scaling : the factor on q . k
        """
        ...


class TraceView(KVView):
    """Base class of the training views, which replay the traces of B padded sequences. `make_view` chooses a subclass.

    batch : the trace sections by name, from `batch_traces`, in host memory
    through : True if gradients flow through fitted biases and values to the entries from which they were fitted
    """

    replays: ClassVar[frozenset[str]]  # sections that a batch may have; other batches raise TraceError
    requires: ClassVar[frozenset[str]]  # sections that a batch must have
    # layer -> loss of the method, after a forward pass, whose mean GRPO adds to its own loss; None without a loss
    losses: dict[int, Tensor] | None = None

    def __init__(
        self, batch: Mapping[str, Tensor], device: torch.device | str, kernel: str = "gather", through: bool = True
    ) -> None:
        name = type(self).__name__
        if unsupported := [section for section in batch if section not in self.replays]:
            supported = f"it replays {', '.join(sorted(self.replays))}"
            raise TraceError(f"{name} cannot replay the section {unsupported[0]!r} of a trace; {supported}")
        if missing := sorted(self.requires - set(batch)):
            raise TraceError(f"{name} cannot replay a trace without the section {missing[0]!r}")
        self.device, self.kernel, self.through = torch.device(device), kernel, through
        self.prepare(batch)

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        """Store the data that all layers share."""
        raise NotImplementedError


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    kv_view: KVView | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention by `kv_view`, or by transformers' SDPA if it is None, which also serves encoders.

    query : [B, Hq, T, D], after RoPE
    key, value : [B, Hkv, T, D], keys after RoPE

    Returns the output [B, T, Hq, D], and None instead of attention weights. Raises UserError for dropout with a view.
    """
    if kv_view is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    check_length(module.config, query.shape[2])
    if dropout:
        raise UserError(f"attention dropout {dropout} cannot be replayed; set attention_dropout to 0 in the model")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = recorded_layers(module.config).index(cast(int, module.layer_idx))
    arguments = layer, query, key, value, scaling
    if kv_view.observe is not None:
        kv_view.observe(*arguments)
    return kv_view.attend(*arguments).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def adopt(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a model to our attention function, so that its forward accepts `kv_view`; return the same model.

    The routers of a mixture of experts (sparse_rl/experts.py) and the layers with a state (sparse_rl/states/mixers.py)
    are connected to `kv_view`, too. A second call changes nothing. Raises UserError if the model's attention cannot be
    replayed (`check_replayable`).
    """
    check_replayable(model.config)
    check_noises(model.config)
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    attach(model)
    mixers.attach(model)
    return model


def refuse_reentrant_checkpointing(model: nn.Module) -> None:
    """Raise UserError if the model uses reentrant gradient checkpointing, which drops losses that a layer adds."""
    for module in model.modules():
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and checkpoint is not None:
            if getattr(checkpoint, "keywords", {}).get("use_reentrant", True) is not False:  # torch's default is True
                mend = 'use gradient_checkpointing_kwargs={"use_reentrant": False}'
                raise UserError(f"reentrant gradient checkpointing is not supported; {mend}")
            return
