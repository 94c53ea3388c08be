"""Beside, the base class of views and caches that stand beside others: they leave a part of the work to them."""

from __future__ import annotations

from typing import Any


class Beside:
    """Leaves attention to another view or cache, `inner`, and has its attributes."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # `copy` asks for methods before the copy has attributes
            raise AttributeError(name)
        return getattr(self.inner, name)

    def attend(self, layer: int, query: Any, key: Any, value: Any, scaling: float) -> Any:
        """See `KVView.attend` (sparse_rl/attention/interface.py)."""
        return self.inner.attend(layer, query, key, value, scaling)
