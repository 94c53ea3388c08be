"""Make a view from recorded traces, for a forward pass that replays the traces.

The view of the policy's own sections replays the global layers. Sliding windows and experts stand beside any such view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparse_rl.attention.interface import KVView, TraceView
from sparse_rl.attention.windows.view import WindowedView
from sparse_rl.experts.view import RoutedView
from sparse_rl.methods.config import CONFIGS, AMConfig
from sparse_rl.trace import EvictionTrace, TraceError, batch_traces, policy_part

NOT_RECORDED = (
    "a compacted context can be replayed only for a dense model, with `chunking: kv`, and either `policy: evict` or "
    "`policy: am` with `fit: ridge` and reference queries of the context's own tokens, `queries: [context]` or "
    "`queries: [window]`"
)


def views() -> list[type[TraceView]]:
    return list(dict.fromkeys([*(config.part("view") for config in CONFIGS.values()), AMConfig.part("context_view")]))


def make_view(
    traces: Sequence[EvictionTrace],
    starts: Sequence[int],
    width: int,
    device: torch.device | str,
    kernel: str = "gather",
    through: bool = True,
) -> KVView:
    """Make the view that replays the traces. Pass the view to the model as `kv_view`, with NO_MASK as attention_mask.

    traces : one trace for each row of the batch
    starts : the column of each row's first token; all 0 means right padding
    width : number of columns of the batch
    device : the device of the model
    kernel : one of ATTENTION_KERNELS
    through : under the policy am, True if gradients flow through the refitted biases and values

    Raises TraceError if no view replays all sections of the traces, or if `batch_traces` cannot batch them.
    """
    whole = batch_traces(traces, starts, width)
    batch = {name: values for name, values in policy_part(whole).items() if name != "routed"}
    for view in views():
        if view.requires <= batch.keys() <= view.replays:
            made = view(batch, device, kernel, through)
            return RoutedView.around(WindowedView.around(made, whole, device, kernel), whole, device)
    abilities = "; ".join(f"{view.__name__} replays {', '.join(sorted(view.replays))}" for view in views())
    why = f"; {NOT_RECORDED}" if batch.keys() == {"evict_at", "compacted_at"} else ""
    raise TraceError(f"no view replays traces with the sections {', '.join(batch)}{why} ({abilities})")
