"""RoutedCache: a cache of any kind, beside which the choices of the routers are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.trace import EvictionTrace

GROW = 128  # positions of the record, added at a time


class RoutedCache:
    """Records the experts of each token that passes a router; everything else is done by the cache inside.

    cache : the cache inside, whose attributes RoutedCache has too
    layers : number of layers of the model, including those without experts
    choices : layer -> int16 [B, S, K], the experts of each token that was fed
    """

    def __init__(self, cache: Any, layers: int, choices: dict[int, Tensor] | None = None) -> None:
        self.cache, self.layer_count, self.choices = cache, layers, choices or {}
        self._column = 0  # column at which this piece of the prompts begins
        self._positions: Tensor | None = None  # of a decoding step: the position of each row's token
        self._active: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "cache":  # `copy` asks for methods before the copy has attributes
            raise AttributeError(name)
        return getattr(self.cache, name)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return self.cache.attend(layer, query, key, value, scaling)

    def begin_prefill(self, prompt_lengths: Sequence[int], device: torch.device) -> None:
        self.cache.begin_prefill(prompt_lengths, device)
        self._column = next(iter(self.choices.values())).shape[1] if self.choices else 0  # after earlier pieces
        self._positions = None

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        self.cache.begin_decode(active, device)
        self._positions = torch.tensor(self.cache.seen, device=device) - 1
        self._active = torch.tensor(active, device=device)
        if self.choices and max(self.cache.seen) > next(iter(self.choices.values())).shape[1]:
            self.choices = {layer: F.pad(record, (0, 0, 0, GROW), value=-1) for layer, record in self.choices.items()}

    def route(self, layer: int, own: Tensor, logits: Tensor) -> Tensor:
        """See `RoutingView.route`: record the router's own choices."""
        rows, choices = len(self.cache.seen), own.to(torch.int16)
        if self._positions is None:
            piece = choices.view(rows, -1, own.shape[-1])
            earlier = [self.choices[layer][:, : self._column]] if self._column else []
            self.choices[layer] = torch.cat([*earlier, piece], dim=1)
        else:
            row = torch.arange(rows, device=own.device)[self._active]
            self.choices[layer][row, self._positions[self._active]] = choices[self._active]
        return own

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(rows)
        self.choices = {layer: record[list(rows)] for layer, record in self.choices.items()}

    def fork(self, rows: Sequence[int]) -> RoutedCache:
        choices = {layer: record[list(rows)] for layer, record in self.choices.items()}
        return RoutedCache(self.cache.fork(rows), self.layer_count, choices)

    def trace(self, row: int, length: int) -> EvictionTrace:
        trace = self.cache.trace(row, length)
        width = next(iter(self.choices.values())).shape[-1]
        routed = torch.full((self.layer_count, length, width), -1, dtype=torch.int16)
        for layer, record in self.choices.items():
            routed[layer, : length - 1] = record[row, : length - 1].cpu()
        return replace(trace, further={**trace.further, "routed": routed})
