"""RoutedCache: a cache of any kind, beside which the choices of the routers are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.beside import Beside
from sparse_rl.trace import EvictionTrace

GROW = 128  # positions of the record, added at a time


class RoutedCache(Beside):
    """Records the experts of each token that passes a router.

    inner : the cache that stores keys and values. It reads prompts in one forward pass
    layers : number of layers of the model, including those without experts
    choices : layer -> int16 [B, S, K], the experts of each token that was fed
    """

    def __init__(self, inner: Any, layers: int, choices: dict[int, Tensor] | None = None) -> None:
        self.inner, self.layer_count, self.choices = inner, layers, choices or {}
        self._positions: Tensor | None = None  # of a decoding step: the position of each row's token
        self._active: Tensor | None = None

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        self.inner.begin_prefill(prompt_lengths, device)
        self._positions = None

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        self.inner.begin_decode(active, device)
        self._positions = torch.tensor(self.inner.seen, device=device) - 1
        self._active = torch.tensor(active, device=device)
        if self.choices and max(self.inner.seen) > next(iter(self.choices.values())).shape[1]:
            self.choices = {layer: F.pad(record, (0, 0, 0, GROW), value=-1) for layer, record in self.choices.items()}

    def route(self, layer: int, own: Tensor, logits: Tensor) -> Tensor:
        """See `RoutingView.route`: record the router's own choices."""
        rows, choices = len(self.inner.seen), own.to(torch.int16)
        if self._positions is None:
            self.choices[layer] = choices.view(rows, -1, own.shape[-1])
        else:
            row = torch.arange(rows, device=own.device)[self._active]
            self.choices[layer][row, self._positions[self._active]] = choices[self._active]
        return own

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)
        self.choices = {layer: record[list(rows)] for layer, record in self.choices.items()}

    def fork(self, rows: Sequence[int]) -> RoutedCache:
        choices = {layer: record[list(rows)] for layer, record in self.choices.items()}
        return RoutedCache(self.inner.fork(rows), self.layer_count, choices)

    def trace(self, row: int, length: int) -> EvictionTrace:
        trace = self.inner.trace(row, length)
        width = next(iter(self.choices.values())).shape[-1]
        routed = torch.full((self.layer_count, length, width), -1, dtype=torch.int16)
        for layer, record in self.choices.items():
            routed[layer, : length - 1] = record[row, : length - 1].cpu()
        return replace(trace, further={**trace.further, "routed": routed})
