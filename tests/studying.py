"""Record the reference queries with which a context is compacted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rollout.context.compact import Studied


@contextmanager
def recorded_queries() -> Iterator[list[torch.Tensor]]:
    """Collect the reference queries of each layer that is compacted inside the block, in the order of the layers."""
    recorded: list[torch.Tensor] = []
    layer = Studied.layer

    def listening(studied: Studied, config: Any, place: int, *rest: Any) -> Any:
        recorded.append(studied.queries[place])
        return layer(studied, config, place, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Studied, "layer", listening)
        yield recorded
