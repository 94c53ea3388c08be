"""The transformers model inside what training wraps around it."""

from __future__ import annotations

from typing import Any


def base_of(model: Any) -> Any:
    """The transformers model, without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
