"""Differences between the kv heads of a model, from traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sparse_rl.analysis.drawing import draw_map, policy_settings, subject
from sparse_rl.errors import UserError
from sparse_rl.trace import EvictionTrace


def protected(fingerprint: Mapping[str, str]) -> tuple[int, int]:
    """Return the numbers of first and of last tokens that the policy of a fingerprint never evicts: sinks, window."""
    settings = policy_settings(fingerprint)
    sinks, window = (size if type(size := settings.get(name)) is int else 0 for name in ("sinks", "window"))
    return sinks, window


def evict_ratios(traces: Sequence[EvictionTrace], fingerprint: Mapping[str, str]) -> dict[str, Any]:
    """Return the eviction ratio of each layer and kv head (KVpop, appendix H, figure 8): a median over the traces.

    The ratio of a trace is the share of its tokens between sinks and window that the last query no longer sees. 0 is a
    full cache, 1 a cache of sinks and window alone. A trace without such tokens does not count. Layers with a sliding
    window are left out.

    Returns ratios [layers][kv heads]; `layers`, their indices in the model; the number of `traces` that count; and
    the model and the policy in words, `subject`.
    """
    sinks, window = protected(fingerprint)
    ratios = []
    for trace in (whole.policy_part() for whole in traces):
        fed = len(trace) - 1
        between = trace.evict_at[..., sinks : max(sinks, fed - window)]
        if between.shape[-1]:
            ratios.append((between < fed).double().mean(-1))
    if not ratios:
        raise UserError(f"no trace has a token between {sinks} sinks and a window of {window}, so none can be evicted")
    medians = torch.stack(ratios).quantile(0.5, dim=0)
    return {
        "subject": subject(fingerprint),
        "traces": len(ratios),
        "layers": traces[0].global_layers,
        "ratios": [[round(ratio, 6) for ratio in row] for row in medians.tolist()],
    }


def draw_evict_ratios(numbers: Mapping[str, Any], out: Path) -> None:
    title = (
        f"{numbers['subject']}: share of evictable tokens that were evicted\nmedian of {numbers['traces']} sequences"
    )
    draw_map(numbers["ratios"], out, title, rows=numbers["layers"], label="share evicted", most=1.0)
