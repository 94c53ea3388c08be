"""Turns logits into tokens and log-probs, reproducibly for each sequence.

Each sequence draws one uniform number per step from its own generator and inverts the CDF in vocabulary order, in
float64. So a sequence's tokens depend only on its logits, its seed and its own length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.config import SamplingConfig

BLOCK = 512  # uniforms drawn at a time
AT_ONCE = 2**18  # logits that a CPU processes at a time: 2 MiB in float64, so that they stay in a core's cache
LANES = 64  # upper bound on the numbers that a CPU adds in parallel


class Uniforms:
    """One sequence's stream of uniform numbers in float64."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._begin()

    def _begin(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.number, self.block = -1, [0.0]

    def at(self, step: int) -> float:
        """Return the uniform number of a step. Any order of steps is allowed; an increasing order is the fastest."""
        number, place = divmod(step, BLOCK)
        if number < self.number:
            self._begin()
        while self.number < number:
            self.block = torch.rand(BLOCK, generator=self.generator, dtype=torch.float64).tolist()
            self.number += 1
        return self.block[place]


def sample(
    logits: Tensor, sampling: SamplingConfig, uniform: Tensor | None, forced: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample one token for each of B rows.

    logits : [B, V]
    uniform : float64 [B], one uniform number per row; None means that each row takes its most likely token
    forced : int64 [B]; a value other than -1 replaces the sampled token

    Returns the tokens int64 [B], their log-probs float32 [B] under the sampling distribution, and their log-probs
    float32 [B] before top-p and top-k. Never waits for the device.
    """
    rows = max(1, AT_ONCE // logits.shape[-1]) if logits.is_cpu else len(logits)
    if len(logits) > rows:
        parts = []
        for i in range(0, len(logits), rows):
            u, f = (None if column is None else column[i : i + rows] for column in (uniform, forced))
            parts.append(sample(logits[i : i + rows], sampling, u, f))
        return tuple(map(torch.cat, zip(*parts, strict=True)))  # type: ignore[return-value]
    scaled = sampling.temperature not in (0, 1)
    logprobs = (logits.float() / sampling.temperature if scaled else logits.float()).log_softmax(-1)
    cut = uniform is not None and sampling.truncated_support
    processed = truncate(logprobs, sampling.top_p, sampling.top_k) if cut else logprobs
    return drawn(logprobs, processed, uniform, forced)


def drawn(
    logprobs: Tensor, processed: Tensor, uniform: Tensor | None, forced: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample tokens as `sample` does. logprobs, processed : float32 [B, V], before and after top-p and top-k"""
    if uniform is None:
        tokens = logprobs.argmax(-1)
    else:
        cdf = processed.double().exp_().cumsum_(-1)
        target = (uniform * cdf[:, -1])[:, None]
        tokens = torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=cdf.shape[-1] - 1)
    if forced is not None:
        tokens = torch.where(forced < 0, tokens, forced)
    index = tokens[:, None]
    return tokens, processed.gather(-1, index)[:, 0], logprobs.gather(-1, index)[:, 0]


def truncate(logprobs: Tensor, top_p: float, top_k: int | None) -> Tensor:
    """Restrict log-probs [B, V] by top-k, then by top-p, and renormalise them. All other tokens get -inf.

    Top-p keeps the smallest set of tokens with total probability >= top_p. With top-k, only the max(top_k, LANES) most
    likely tokens are ranked. All other tokens would only add zeros to the sums; since at least LANES tokens are ranked,
    every sum on a CPU has the same bits as a sum over the whole vocabulary.
    """
    size = logprobs.shape[-1]
    order = ranking(logprobs, size if top_k is None else min(size, max(top_k, LANES)))
    outside = torch.zeros_like(order, dtype=torch.bool)
    if top_k is not None:
        outside[:, top_k:] = True
    if top_p < 1:
        mass = logprobs.gather(-1, order).masked_fill_(outside, float("-inf")).log_softmax(-1).exp_()
        outside |= mass.cumsum(-1).sub_(mass) >= top_p
    outside = torch.ones_like(logprobs, dtype=torch.bool).scatter_(-1, order, outside)
    return logprobs.masked_fill(outside, float("-inf")).log_softmax(-1)


def ranking(logprobs: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` most likely tokens of each row, best first: int64 [B, count].

    logprobs : float32 [B, V]

    Equal log-probs are ordered by index. The bit pattern of a non-positive float, read as an integer, grows as the
    number falls. A sort key is these bits followed by the token index, so no two keys are equal, and every selection
    algorithm gives the same order. On a CPU, NumPy's selection is far faster than PyTorch's stable sort or top-k.
    """
    size = logprobs.shape[-1]
    if count == size and not logprobs.is_cpu:  # a GPU sorts byte by byte, and the keys have twice as many bytes
        return logprobs.sort(dim=-1, descending=True, stable=True).indices
    keys = logprobs.view(torch.int32).long().bitwise_and_(0x7FFFFFFF)
    keys.bitwise_left_shift_(32).add_(torch.arange(size, device=logprobs.device))
    if not logprobs.is_cpu:
        return keys.topk(count, largest=False).values & 0xFFFFFFFF
    keys.numpy().partition(count - 1)
    best = keys[:, :count]
    best.numpy().sort()
    return best & 0xFFFFFFFF
