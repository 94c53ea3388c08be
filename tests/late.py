"""An engine that receives each update late: the reference for sampling ahead of the training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor


class LateEngine:
    """Samples, in this process, with weights that are some updates older than those that it was given last.

    engine : an engine with weights of its own
    updates : number of updates by which it is late; until it has as many, it samples with the first weights
    """

    def __init__(self, engine: Any, updates: int = 1) -> None:
        assert not engine.shares_weights
        self.engine = engine
        self.waiting: deque[list[tuple[str, Tensor]]] = deque(maxlen=updates + 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.waiting.append([(name, weight.detach().clone()) for name, weight in weights])
        self.engine.load_weights(self.waiting[0])
