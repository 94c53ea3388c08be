"""The one place where recorded traces become the view that a forward replays them by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_rl.attention.interface import KVView, TraceView
from sparse_rl.methods.config import CONFIGS
from sparse_rl.trace import EvictionTrace, TraceError, batch_traces


def views() -> list[type[TraceView]]:
    """The views of all methods, each once."""
    return list(dict.fromkeys(config.part("view") for config in CONFIGS.values()))


def make_view(
    traces: Sequence[EvictionTrace],
    starts: Sequence[int],
    width: int,
    device: torch.device | str,
    kernel: str = "gather",
    through: bool = True,
) -> KVView:
    """What a forward replays traces by, given to it as the keyword `kv_view`, with NO_MASK as its attention_mask.

    traces : one for each of B rows
    starts : the column of each row's first token; all 0 is right padding
    width : columns of the batch, S
    device : where the model runs
    kernel : one of ATTENTION_KERNELS
    through : under the policy am, whether gradients flow through the biases and values that are made again

    Raises TraceError where no view replays all sections of the traces, and where `batch_traces` does.
    """
    batch = batch_traces(traces, starts, width)
    for view in views():
        if batch.keys() <= view.replays:
            return view(batch, device, kernel, through)
    can = "; ".join(f"{view.__name__} replays {', '.join(sorted(view.replays))}" for view in views())
    raise TraceError(f"no view replays traces with the sections {', '.join(batch)} ({can})")
