"""Replay of the experts that tokens took, beside the view that replays their attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparse_rl.beside import Beside
from sparse_rl.trace import TraceError


class RoutedView(Beside):
    """A `kv_view` for training: another view, and the recorded experts of each token.

    inner : the view that replays the attention
    routed : recorded experts, int16 [L, B, S, K] in host memory; -1 stands for the router's own choice: in padding, and
        for the last token of a sequence
    choices : layer -> (logits of the router [B S, experts], experts taken, int64 [B S, K]), after a forward pass
    """

    def __init__(self, inner: Any, routed: Tensor, device: torch.device | str) -> None:
        self.inner, self.routed, self.device = inner, routed, torch.device(device)
        self.highest = routed.amax(dim=(1, 2, 3)).tolist()
        self.choices: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def around(cls, view: Any, batch: Mapping[str, Tensor], device: torch.device | str) -> Any:
        """Return `view` with the section `routed` of a batch of traces, or `view` itself if they have no such section.

        Without the section, the routers of a mixture of experts choose themselves.

        batch : trace sections by name, from `batch_traces`
        """
        return cls(view, batch["routed"], device) if "routed" in batch else view

    @classmethod
    def unrecorded(cls, view: Any, config: Any, rows: int, columns: int, device: torch.device | str) -> RoutedView:
        """Return `view` with routers that choose themselves, and whose choices are kept in `choices`.

        config : the model's configuration
        """
        sizes = (config.num_hidden_layers, rows, columns, config.num_experts_per_tok)
        return cls(view, torch.full(sizes, -1, dtype=torch.int16), device)

    def route(self, layer: int, own: Tensor, logits: Tensor) -> Tensor:
        """See `RoutingView.route`. Raises TraceError if the record does not fit the model."""
        recorded = self.routed[layer].to(self.device, own.dtype).flatten(0, 1)
        if recorded.shape != own.shape or self.highest[layer] >= logits.shape[-1]:
            raise TraceError(
                f"routed has {list(recorded.shape)} experts up to {self.highest[layer]} in layer {layer}, but its "
                f"router chose {list(own.shape)} of {logits.shape[-1]} experts"
            )
        chosen = torch.where(recorded >= 0, recorded, own)
        self.choices[layer] = logits, chosen
        return chosen
