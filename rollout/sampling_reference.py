"""The plain sampler, which sorts the whole vocabulary.

`rollout.sampling.sample` must give the same results; on a CPU, the same bits. Both draw tokens with the same function;
they differ in how they compute the distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.sampling import drawn


def sample_reference(
    logits: Tensor, sampling: SamplingConfig, uniform: Tensor | None, forced: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token per row; arguments and results are those of `rollout.sampling.sample`."""
    logprobs = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1)
    cut = uniform is not None and sampling.truncated_support
    processed = truncate_reference(logprobs, sampling.top_p, sampling.top_k) if cut else logprobs
    return drawn(logprobs, processed, uniform, forced)


def truncate_reference(logprobs: Tensor, top_p: float, top_k: int | None) -> Tensor:
    """Return the same values as `rollout.sampling.truncate`."""
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)
    outside = torch.zeros_like(ranked, dtype=torch.bool)
    if top_k is not None:
        outside[:, top_k:] = True
    if top_p < 1:
        ranked = ranked.masked_fill(outside, float("-inf")).log_softmax(-1)
        before = ranked.exp().cumsum(-1) - ranked.exp()
        outside |= before >= top_p
        outside[:, 0] = False
    outside = torch.zeros_like(outside).scatter(-1, order, outside)
    return logprobs.masked_fill(outside, float("-inf")).log_softmax(-1)
