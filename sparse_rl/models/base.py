"""Access to the transformers model inside a training wrapper."""

from __future__ import annotations

from typing import Any


def base_of(model: Any) -> Any:
    """Return the transformers model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
