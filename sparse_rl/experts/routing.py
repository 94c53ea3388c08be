"""Lets the forward keyword `kv_view` read and set the choices of a model's routers.

`kv_view` is passed to every decoder layer, but no family passes it on to its router. So a hook before each decoder
layer stores the layer's own `kv_view` beside its router, in the forward pass and again in a recomputed one: gradient
checkpointing calls the layer again, with its hooks and keywords. An attribute that is set from outside would be absent
or stale in the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sparse_rl.experts.products import EXPERTS


class RoutingView(Protocol):
    """Type of a `kv_view` that also reads or sets the choices of routers."""

    def route(self, layer: int, own: Tensor, logits: Tensor) -> Tensor:
        """Return the experts that the tokens take, int64 [T, K]; T counts the tokens of all rows, row by row.

        own : the router's own choices, int64 [T, K]; the result is this tensor itself if the choices stay
        logits : the router's logits, [T, experts]
        """
        ...


def _softmax_over_all(router: Any, logits: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    weights = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always divides, and has no such setting
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(dtype)


def _sigmoid(router: Any, logits: Tensor, chosen: Tensor, dtype: torch.dtype) -> Tensor:
    """GLM-4's correction bias takes part in the choice only."""
    weights = logits.sigmoid().gather(-1, chosen)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return (weights * router.routed_scaling_factor).to(dtype)


# model_type -> function from (router, logits [T, experts], chosen [T, K], dtype) to the factors of the chosen experts,
# float [T, K]. It uses the family's own operations, so that equal choices have equal bits.
WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor, torch.dtype], Tensor]] = {
    "qwen3_moe": _softmax_over_all,
    "qwen2_moe": _softmax_over_all,
    "mixtral": _softmax_over_all,
    "olmoe": _softmax_over_all,
    "glm4_moe": _sigmoid,
}


def routers(model: Any) -> Iterator[tuple[int, nn.Module, Any]]:
    """Yield (index of the layer, decoder layer, router) for each layer with experts; none for a dense model."""
    if model.config.model_type in WEIGHTS:
        for index, layer in enumerate(model.get_decoder().layers):
            if hasattr(layer.mlp, "experts"):
                yield index, layer, layer.mlp.gate


def has_experts(model: Any) -> bool:
    return next(routers(model), None) is not None


def routed_experts(model: Any) -> int:
    """Return the number of experts that one token takes in all layers together; 0 for a model without experts."""
    return sum(model.config.num_experts_per_tok for _ in routers(model))


def attach(model: Any) -> None:
    """Connect the routers of a model to `kv_view`, and let its experts run by `experts_forward`.

    A second call changes nothing. In a dense model, only the key `output_router_logits` is switched off.
    """
    for index, layer, router in routers(model):
        if hasattr(router, "routes"):
            continue
        router.routes = Routes(index, WEIGHTS[model.config.model_type])
        layer.register_forward_pre_hook(router.routes.begin, with_kwargs=True)
        layer.register_forward_hook(router.routes.end, always_call=True)
        router.register_forward_hook(router.routes.choose)
    if has_experts(model):
        model.set_experts_implementation(EXPERTS)
    # The model would compute a balancing loss from NO_MASK, which marks no token. Dense models may have this key, too.
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False


class Routes:
    """The `kv_view` of the forward pass that a decoder layer is in, for the layer's router."""

    def __init__(self, layer: int, weights_of: Callable[[Any, Tensor, Tensor, torch.dtype], Tensor]) -> None:
        self.layer, self.weights_of = layer, weights_of
        self.view: Any = None

    def begin(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.view = kwargs.get("kv_view")

    def end(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.view = None

    def choose(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        """Replace the router's output (logits, weights, choices) by the view's choices; None keeps the output."""
        if not hasattr(self.view, "route"):
            return None
        logits, weights, own = output
        chosen = self.view.route(self.layer, own, logits)
        return None if chosen is own else (logits, self.weights_of(router, logits, chosen, weights.dtype), chosen)


def balancing_loss(routed: Mapping[int, tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
    """Compute the load-balancing loss (Switch Transformer, eqs. 4 to 6) for the experts that the tokens took.

    It equals transformers' `load_balancing_loss_func` bit for bit if these are the routers' own choices. Probabilities
    are the softmax of the logits.

    routed : layer -> (the router's logits [T, experts], the experts that were taken, int64 [T, K])
    mask : 1 for tokens and 0 for padding, [B, S] with B S = T
    """
    assert routed, "no router has run under a view that replays its choices"
    logits, _ = next(iter(routed.values()))
    real, experts = mask.reshape(-1).to(logits.device, torch.float32), logits.shape[-1]
    taken, chances = torch.zeros(experts, device=logits.device), torch.zeros(experts, device=logits.device)
    rows = torch.zeros((), device=logits.device)
    for layer in sorted(routed):
        logits, chosen = routed[layer]
        probabilities = logits.softmax(-1)
        counts = torch.zeros(experts, device=logits.device)
        taken = taken + counts.scatter_add_(0, chosen.reshape(-1), real.repeat_interleave(chosen.shape[-1]))
        chances = chances + (probabilities.float() * real[:, None]).sum(0)
        rows = rows + real.sum()
    return torch.sum(taken / rows * (chances / rows)[None]) * experts
