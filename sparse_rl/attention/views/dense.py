"""The reference of the views: one sequence under its trace as dense masks. Not to be run at size."""

from __future__ import annotations

from typing import ClassVar

import torch

from sparse_rl.attention.interface import check_sections
from sparse_rl.attention.kernels.dense import dense_attention
from sparse_rl.trace import EvictionTrace


class DenseView:
    """A `kv_view` of one unpadded sequence: its trace as dense masks, all layers at once."""

    replays: ClassVar = frozenset({"evict_at"})

    def __init__(self, trace: EvictionTrace, device: torch.device | str = "cpu") -> None:
        check_sections(type(self), trace.sections)
        self.masks = [trace.visible(layer)[None].to(device) for layer in range(trace.layers)]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return dense_attention(query, key, value, self.masks[layer], scaling)
