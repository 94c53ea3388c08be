"""Experts of mixture-of-experts models: one module per layer that holds the matrices of all its experts."""

from __future__ import annotations

from typing import Any


def experts_of(layer: Any) -> Any:
    """Return a decoder layer's module of experts, whose `down_proj` has three dimensions; None if it has none."""
    modules = (module for module in layer.modules() if getattr(getattr(module, "down_proj", None), "ndim", 0) == 3)
    return next(modules, None)


def routed_experts(model: Any) -> int:
    """Return the number of experts that one token uses in all layers together; 0 for a model without experts."""
    layers = sum(experts_of(layer) is not None for layer in model.get_decoder().layers)
    return layers * model.config.num_experts_per_tok if layers else 0
