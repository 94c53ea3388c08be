"""The plain sampler: what `rollout.sampling.sample` must equal, bit for bit on a CPU. It sorts the whole vocabulary."""

from __future__ import annotations

import torch

from rollout.config import SamplingConfig


def sample_reference(
    logits: torch.Tensor,
    sampling: SamplingConfig,
    uniform: torch.Tensor | None,
    forced: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `rollout.sampling.sample` computes, of the same arguments, plainly."""
    logprobs = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1)
    processed = logprobs
    if uniform is None:
        tokens = logprobs.argmax(-1)
    else:
        if sampling.truncated_support:
            processed = truncate_reference(logprobs, sampling.top_p, sampling.top_k)
        cdf = processed.double().exp().cumsum(-1)
        target = (uniform * cdf[:, -1])[:, None]
        tokens = torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=cdf.shape[-1] - 1)
    if forced is not None:
        tokens = torch.where(forced < 0, tokens, forced)
    index = tokens[:, None]
    return tokens, processed.gather(-1, index)[:, 0], logprobs.gather(-1, index)[:, 0]


def truncate_reference(logprobs: torch.Tensor, top_p: float, top_k: int | None) -> torch.Tensor:
    """Renormalised log-probs [B, V] after top-k, then top-p (the smallest set with mass >= top_p); -inf outside."""
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
