"""Sampling: from logits to tokens and log-probs, reproducible per sequence.

Each sequence draws one uniform number per step from its own generator and inverts the CDF in vocabulary order, in
float64. So a sequence's tokens depend on nothing but its logits, its seed and its own length.
"""

from __future__ import annotations

import torch

from rollout.config import SamplingConfig

BLOCK = 512  # uniforms drawn at a time


class Uniforms:
    """One sequence's stream of uniform numbers in float64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.number, self.block = -1, [0.0]

    def at(self, step: int) -> float:
        """The number of a step. A step may be asked for again, but not one of an earlier block."""
        number, place = divmod(step, BLOCK)
        while self.number < number:
            self.block = torch.rand(BLOCK, generator=self.generator, dtype=torch.float64).tolist()
            self.number += 1
        return self.block[place]


def sample(
    logits: torch.Tensor,
    sampling: SamplingConfig,
    uniform: torch.Tensor | None,
    forced: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token per row.

    logits [B, V]; uniform float64 [B], None: the most likely token; forced int64 [B]: where it is not -1, take this
    token instead. Returns tokens int64 [B], their log-probs float32 [B] under the distribution sampled from, and those
    before top-p and top-k.
    """
    logprobs = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1)
    processed = logprobs
    if uniform is None:
        tokens = logprobs.argmax(-1)
    else:
        if sampling.truncated_support:
            processed = truncate(logprobs, sampling.top_p, sampling.top_k)
        cdf = processed.double().exp().cumsum(-1)
        target = (uniform * cdf[:, -1])[:, None]
        tokens = torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=cdf.shape[-1] - 1)
    if forced is not None:
        tokens = torch.where(forced < 0, tokens, forced)
    index = tokens[:, None]
    return tokens, processed.gather(-1, index)[:, 0], logprobs.gather(-1, index)[:, 0]


def truncate(logprobs: torch.Tensor, top_p: float, top_k: int | None) -> torch.Tensor:
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
