"""Replay of sliding windows, beside the view that replays the layers without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.families import windows_of
from sparse_rl.attention.interface import KVView, Replayed
from sparse_rl.attention.views.replay import ReplayView
from sparse_rl.beside import Beside
from sparse_rl.policies.schedule import Schedule


class WindowedView(Beside):
    """A `kv_view` that sends each layer to one of two views. Each of the two numbers its own layers from 0.

    inner : the view of the global layers
    of_windows : the view of the layers with a sliding window
    windows : the window of each layer in tokens, 0 for a global layer
    """

    def __init__(self, inner: Any, of_windows: KVView, windows: Sequence[int]) -> None:
        self.inner, self.of_windows = inner, of_windows
        counts = {True: 0, False: 0}
        self.places: list[tuple[bool, int]] = []  # for each layer: True if it has a window, and its place in its view
        for window in windows:
            self.places.append((window > 0, counts[window > 0]))
            counts[window > 0] += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        has_window, place = self.places[layer]
        view: KVView = self.of_windows if has_window else self.inner
        return view.attend(place, query, key, value, scaling)

    @classmethod
    def holds(cls, window: int, replayed: Replayed) -> list[tuple[str, int, str]]:
        """Return the memory that the replay of layers with a sliding window of `window` tokens takes besides queries,
        keys and values: a list of (name, bytes, note). It is empty if no sequence is longer than the window.

        replayed : sizes of the replay; `layers` counts layers with a window
        """
        if replayed.length <= window:
            return []
        # a query sees its own token, and window - 1 earlier ones
        visible = SimpleNamespace(schedule=Schedule(window - 1))
        held = ReplayView.holds(visible, replace(replayed, prompt=0))
        return [(f"{name}, sliding windows", size, note) for name, size, note in held]

    @classmethod
    def around(cls, view: Any, batch: Mapping[str, Tensor], device: torch.device | str, kernel: str) -> Any:
        """Return `view` beside the windows of a batch of traces, or `view` itself if they have no section `windowed`.

        batch : trace sections by name, from `batch_traces`
        """
        if "windowed" not in batch:
            return view
        windowed = batch["windowed"]
        evictions = {"evict_at": batch["evict_at"][windowed > 0]}
        return cls(view, ReplayView(evictions, device, kernel), windowed.tolist())

    @classmethod
    def unrecorded(
        cls, view: Any, config: Any, lengths: Tensor, width: int, device: torch.device | str, kernel: str = "gather"
    ) -> Any:
        """Return `view` beside the sliding windows of a model, or `view` itself if the model has none.

        config : the model's configuration
        lengths : number of tokens of each row, int64 [rows]; rows are right-padded to `width`
        """
        windows = windows_of(config)
        if not any(windows):
            return view
        token = torch.arange(width, dtype=torch.int32)
        leaves = token + torch.tensor(list(filter(None, windows)), dtype=torch.int32)[:, None]
        evict_at = leaves[:, None].where(token < lengths.cpu()[:, None], 0)  # 0: no query sees padding
        heads = config.num_key_value_heads
        evictions = {"evict_at": evict_at[:, :, None].expand(-1, -1, heads, -1).contiguous()}
        return cls(view, ReplayView(evictions, device, kernel), windows)
