"""Mismatch between a model that samples under a cache and the same model with a full cache, by the tokens seen.

Of each sampled token:

    ratio       p_full(token) / p_small(token), where p_small is the sampler's own probability
    acceptance  sum over the vocabulary of min(p_full, p_small), the mean of min(ratio, 1) over all possible draws

Both distributions are those at the sampling temperature, before top-p, top-k and min-p. Sparrow (arXiv 2606.08446,
section 3.1, equation 2) found that a model for a full cache is trained stably from sparse rollouts while the 5th
percentile of the acceptance stays at 0.86 or above at every length (its takeaway 1: between 0.85 and 0.90). It sums
over the 20 most likely tokens, here all are summed. Its caches select entries anew at every step. Under eviction, what
a small budget dropped early stays dropped when the budget has grown, so a proposed budget must be measured itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rollout.engine import Rollout
from sparse_rl.attention import NO_MASK, adopt, make_view
from sparse_rl.methods.config import GrowingBudget
from sparse_rl.models.load import head_of

CHUNK = 256  # tokens whose distributions are in memory at a time
RARE = 1e-4  # a ratio below it is counted


def percentile(ordered: Tensor, share: float) -> Tensor:
    """Return the value of ascending values [N] below which the share `share` lies; torch.quantile takes at most 2**24.

    Returns a tensor without dimensions. N must be at least 1.
    """
    return ordered[round(share * (len(ordered) - 1))]


@dataclass(frozen=True)
class Scored:
    """The T sampled tokens of one rollout, or of several, float64 [T] each.

    seen : number of tokens that the cache had seen when the token was drawn
    ratio, acceptance : as in this module's docstring
    entries : number of entries that the token's query attended to, mean over layers and kv heads
    """

    seen: Tensor
    ratio: Tensor
    acceptance: Tensor
    entries: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Scored]) -> Scored:
        fields = ("seen", "ratio", "acceptance", "entries")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))


@torch.no_grad()
def score(model: Any, rollout: Rollout, temperature: float) -> Scored:
    """Score a rollout's sampled tokens with the sampler's model, under the trace and densely.

    temperature : the sampling temperature; 0 (greedy) is scored at 1
    """
    adopt(model)
    prompt, device = len(rollout.prompt_ids), next(model.parameters()).device
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]], device=device)
    hidden = []
    for trace in (rollout.trace, rollout.trace.dense_like()):
        view = make_view([trace], [0], ids.shape[1], device)
        mask = NO_MASK.to(device)
        out = model.get_decoder()(input_ids=ids, attention_mask=mask, kv_view=view, use_cache=False)
        hidden.append(out.last_hidden_state[0, prompt - 1 : -1])
    head, drawn, dense_logprobs, acceptance = head_of(model), ids[0, prompt:, None], [], []
    for start in range(0, len(drawn), CHUNK):
        part = slice(start, start + CHUNK)
        sparse, dense = ((head(h[part]).float() / (temperature or 1.0)).log_softmax(-1) for h in hidden)
        acceptance.append(torch.minimum(sparse, dense).double().exp().sum(-1))
        dense_logprobs.append(dense.gather(-1, drawn[part])[:, 0].double())
    gap = torch.cat(dense_logprobs).cpu() - torch.tensor(rollout.model_logprobs, dtype=torch.float64)
    first = torch.full((1,), float(prompt), dtype=torch.float64)  # the prompt's last query attends to the whole prompt
    counts = rollout.trace.policy_part().decoding_counts(prompt).double().mean((0, 1))
    seen = torch.arange(prompt, ids.shape[1], dtype=torch.float64)
    values = seen, gap.exp(), torch.cat(acceptance).cpu(), torch.cat([first, counts])[: len(seen)]
    return Scored(*(of_tokens[torch.tensor(rollout.sampled)] for of_tokens in values))


@dataclass(frozen=True)
class Bin:
    """Statistics of the tokens that were drawn after `start` <= seen < `end` tokens.

    tokens : number of these tokens
    ratio_p5, ratio_mean, ratio_rare : 5th percentile and mean of the ratio, and the share of ratios below RARE
    acceptance_p5, acceptance_mean : 5th percentile and mean of the acceptance
    entries : mean number of entries that the queries attended to
    """

    start: int
    end: int
    tokens: int
    ratio_p5: float
    ratio_mean: float
    ratio_rare: float
    acceptance_p5: float
    acceptance_mean: float
    entries: float


def bin_edges(scored: Sequence[Scored], count: int) -> list[int]:
    """Return the bounds of at most `count` bins that have about equal numbers of tokens of all samples together."""
    ordered = torch.cat([one.seen for one in scored]).sort().values
    bounds = ordered[[place * len(ordered) // count for place in range(count)]].int().tolist()
    return sorted({*bounds, int(ordered[-1]) + 1})


def bins(scored: Scored, edges: Sequence[int]) -> list[Bin | None]:
    """Return the statistics between each two neighbouring edges, the last bin with all later tokens; None if a bin has
    no token.
    """
    result: list[Bin | None] = []
    for start, end in pairwise(edges):
        inside = (scored.seen >= start) & ((scored.seen < end) | (end == edges[-1]))
        ratio, acceptance = (values[inside].sort().values for values in (scored.ratio, scored.acceptance))
        statistics = () if not len(ratio) else (
            percentile(ratio, 0.05), ratio.mean(), (ratio < RARE).double().mean(),
            percentile(acceptance, 0.05), acceptance.mean(), scored.entries[inside].mean(),
        )  # fmt: skip
        result.append(Bin(start, end, len(ratio), *map(float, statistics)) if statistics else None)
    return result


def holds(one: Bin | None, threshold: float) -> bool:
    """Return True if the 5th percentile of the acceptance is at least the threshold, or if there is no token."""
    return one is None or one.acceptance_p5 >= threshold


def propose(
    measured: Mapping[int, Sequence[Bin | None]], edges: Sequence[int], threshold: float, raised: Sequence[int]
) -> GrowingBudget | None:
    """Return the cheapest growing budget that has, from the start of each bin on, a measured budget that holds there.

    measured : constant budget -> its bins; a budget counts if it and all larger ones hold
    raised : for each bin, the number of further steps to a larger measured budget, up to the largest

    Returns None if a bin does not hold under the largest measured budget.
    """
    budgets, needs = sorted(measured), list[int]()
    for place, steps in enumerate(raised):
        failing = [level for level, budget in enumerate(budgets) if not holds(measured[budget][place], threshold)]
        level = max(failing, default=-1) + 1
        if level >= len(budgets):
            return None
        needs.append(max([budgets[min(level + steps, len(budgets) - 1)], *needs[-1:]]))
    for place in range(len(needs) - 1, 0, -1):  # an entry per token is the most that a cache gains
        needs[place - 1] = max(needs[place - 1], needs[place] - (edges[place] - edges[place - 1]))
    knots = list(zip(edges[:-1], needs, strict=True))
    kept = [
        knot
        for place, knot in enumerate(knots)
        if {need for _, need in knots[max(place - 1, 0) : place + 2]} != {knot[1]} or not place
    ]
    return GrowingBudget(tokens=[tokens for tokens, _ in kept], entries=[entries for _, entries in kept])
