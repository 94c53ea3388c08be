"""The weights of a reference model that follows the policy (TRL's `sync_ref_model`), kept in checkpoints.

The first process keeps all of them. Every process must take part in both functions: under ZeRO-3 each has a part.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import broadcast

from trainer.weights import gathered, named_weights, partitioned


def reference_state(model: Any, accelerator: Any) -> dict[str, torch.Tensor]:
    """Every weight by its name, on the CPU; nothing on any process but the first."""
    kept: dict[str, torch.Tensor] = {}
    for name, weight in named_weights(model, accelerator):
        if accelerator.is_main_process:
            kept[name] = weight.to("cpu", copy=True)
    return kept


@torch.no_grad()
def load_reference(model: Any, accelerator: Any, kept: dict[str, torch.Tensor]) -> None:
    """Give every process what `reference_state` has kept on the first."""
    for name, weight in accelerator.unwrap_model(model).named_parameters():
        with gathered(weight, accelerator, writer=0):
            if accelerator.is_main_process:
                weight.copy_(kept[name])
        if not partitioned(accelerator):
            broadcast(weight.data)
