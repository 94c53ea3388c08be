"""Summaries of pages, and the pages that a query opens (LuKA section 3.2)."""

from __future__ import annotations

import math

import torch

from sparse_rl.kernels.ranked import ranked
from sparse_rl.pages.pages import Pages


def summarise(
    keys: torch.Tensor, values: torch.Tensor, pages: Pages, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The summaries of pages, k_p = sum_t pi_t k_t and v_p likewise: (keys, values) [..., D], in their own dtype.

    keys, values : of the tokens of each page, [..., n, D], keys after RoPE
    weights : pi, float32 [..., n], which get no gradient; None: 1 / n each, the mean

    The sums are made in float64 and then rounded, as the cache holds them, in the sampler and in the trainer alike.
    Without `Pages.valued` the values are zero.
    """

    def mean(x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        made = wide.mean(-2) if weights is None else (wide * weights.double()[..., None]).sum(-2)
        return made.to(x.dtype)

    key, value = mean(keys), mean(values)
    return key, value if pages.valued else torch.zeros_like(value)


def attention_weights(received: torch.Tensor) -> torch.Tensor:
    """How much of a summary each token is by the attention that it got, pi = softmax(w) over a page: float32 [..., n].

    received : w, the attention that the page's tokens have got as it closes, [..., n]
    """
    return received.softmax(-1).float()


def random_weights(layer: int, heads: int, numbers: torch.Tensor, size: int) -> torch.Tensor:
    """pi = 1 for one token of each page, 0 for the others: float32 [heads, M, size].

    numbers : int64 [M], the pages; the tokens depend on layer, head and page alone
    """
    picked = []
    for page in numbers.tolist():
        generator = torch.Generator().manual_seed((layer << 15) + page)  # of a seed no more than 32 bits count
        picked.append(torch.randint(size, (heads,), generator=generator))
    one_hot = torch.nn.functional.one_hot(torch.stack(picked, dim=1), size)
    return one_hot.to(numbers.device, torch.float32)


def choose(
    logits: torch.Tensor,
    raw: int,
    most: int,
    threshold: float | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The pages to open: int64 [B, Hkv, K], -1 where there are fewer.

    logits : [B, Hkv, G, raw + M] of the cover, raw entries first, then M summaries; -inf: not seen
    most : K
    threshold : pages whose mass is no larger stay closed; None: all masses will do
    allowed : int64 [B], at most so many for a row; None: K

    Those of largest mass under the softmax over the cover, the largest over the group's query heads; of masses that are
    equal in float32 the earlier page.
    """
    mass = (logits[..., raw:] - logits.logsumexp(-1, keepdim=True)).amax(2)
    count = min(most, mass.shape[-1])
    best = ranked(mass.float(), torch.arange(mass.shape[-1], device=mass.device)).topk(count).indices
    too_small = mass.gather(-1, best) <= (math.log(threshold) if threshold else float("-inf"))
    if allowed is not None:
        too_small |= torch.arange(count, device=logits.device) >= allowed[:, None, None]
    opened = best.masked_fill(too_small, -1)
    return torch.nn.functional.pad(opened, (0, most - count), value=-1)
