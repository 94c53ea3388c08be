"""How many entries each kv head keeps; head budgets from sensitivity curves (Attention Matching, section 4,
algorithm 4).

Heads differ in how much they lose. A curve says what the loss is with one head at each of some ratios, all others at a
base ratio; entries are then moved, a step at a time, from the head that loses least to the head that gains most. Ours
are the size of the step, and the loss between the ratios that were measured. Budgets belong to a model, not to a
context.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.context.cache import Context, LayerEntries, joined
from rollout.context.config import PromptCacheConfig
from sparse_rl.errors import UserError, reason
from sparse_rl.files import read_text

RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)  # at 0 a head keeps one entry
BASE = 0.05
STEPS = 200  # a step moves 1 / STEPS of what the mean head keeps
STEEP = 20  # of a pyramid: what the mean layer keeps is so many times what the last does (PyramidKV's beta)


class Studied(Protocol):
    """A context that has been prefilled, of whose heads compactions of any size are made (compact.py)."""

    whole: Context

    def head(self, config: PromptCacheConfig, place: int, head: int, count: int) -> LayerEntries:
        """What stays of one kv head of layer `place`: `count` entries, `first` and `last` apart."""
        ...


def planned(config: PromptCacheConfig, tokens: int, layers: int, kv_heads: int) -> list[list[int]]:
    """How many of so many tokens stay, `first` and `last` apart: [layer][kv head].

    Raises UserError where there are too few tokens, and where config.budgets is no file of a model of this shape.
    """
    every = config.kept(tokens)
    if config.chooses and config.budgets is not None:
        try:
            return counts(load(config.budgets, layers, kv_heads), config.ratio, tokens, config)
        except UserError as error:
            raise UserError(error.message, "budgets") from error
    pyramidal = config.chooses and config.layers == "pyramid"
    of_layers = pyramid(every, config.between(tokens), layers) if pyramidal else [every] * layers
    return [[count] * kv_heads for count in of_layers]


def pyramid(mean: int, most: int, layers: int) -> list[int]:
    """How many entries each layer keeps, of at most `most`: linear in the layer, with this mean (PyramidKV, section
    4.2, and the bounds of its code).
    """
    last = max(mean / STEEP, 1, 2 * mean - most) if layers > 1 else mean
    shares = (mean + (mean - last) * (1 - 2 * layer / max(1, layers - 1)) for layer in range(layers))
    return [end - start for start, end in pairwise(math.floor(end + 0.5) for end in accumulate(shares, initial=0))]


def sensitivity(
    contexts: Sequence[Studied],
    config: PromptCacheConfig,
    loss: Callable[[int, Context], float],
    ratios: Sequence[float] = RATIOS,
    base: float = BASE,
) -> Tensor:
    """Sensitivity curves: the mean loss over contexts with one head at a ratio, all others at `base`.

    Returns float64 [L, Hkv, ratios].

    loss : (place in `contexts`, a compaction of it) -> how bad it is
    """
    shape = (len(contexts[0].whole.layers), contexts[0].whole.layers[0].keys.shape[1])
    curves = torch.zeros(*shape, len(ratios), dtype=torch.float64)
    for number, studied in enumerate(contexts):
        between = config.between(len(studied.whole.tokens))
        count = [max(1, round(ratio * between)) for ratio in (base, *ratios)]
        rest = [[studied.head(config, layer, head, count[0]) for head in range(shape[1])] for layer in range(shape[0])]
        layers = [joined(heads) for heads in rest]
        for layer in range(shape[0]):
            for head in range(shape[1]):
                for place in range(len(ratios)):
                    mine = list(rest[layer])
                    mine[head] = studied.head(config, layer, head, count[place + 1])
                    changed = [*layers[:layer], joined(mine), *layers[layer + 1 :]]
                    context = Context(studied.whole.tokens, changed, config.policy == "am")
                    curves[layer, head, place] += loss(number, context) / len(contexts)
    return curves


def allocate(curves: Tensor, ratios: Sequence[float], ratio: float) -> Tensor:
    """The ratio of each head, float64 [L, Hkv], from 0 to 1, whose mean is `ratio`: greedy swaps on the curves.

    curves : [L, Hkv, ratios], the losses at ratios that increase. Between two of them, and beyond the outermost, the
        loss is linear in the ratio's logarithm, and below the first ratio above 0 in the ratio itself

    Raises UserError where `ratio` is 0, or not between the ratios of the curves.
    """
    if not ratios[0] <= ratio <= ratios[-1] or ratio <= 0:
        known = f"{ratios[0]} and {ratios[-1]}, for which the losses are known"
        raise UserError(f"{ratio} is not between {known}" if ratio else "0 leaves nothing to share out", "ratio")
    flat, step = curves.flatten(0, 1), ratio / STEPS
    losses = _losses(flat, ratios, torch.arange(math.floor(1 / step + 1e-9) + 1, dtype=torch.float64) * step)
    # What the n-th step is worth to a head. Of nothing a head gives nothing, and beyond everything it takes nothing.
    worth = F.pad(losses[:, :-1] - losses[:, 1:], (1, 1))
    worth[:, 0], worth[:, -1] = float("inf"), float("-inf")
    heads, steps = torch.arange(len(flat)), torch.full((len(flat),), STEPS)
    while True:
        gains, costs = worth[heads, steps + 1], worth[heads, steps]
        taker = int(gains.argmax())
        costs[taker] = float("inf")  # another head gives
        giver = int(costs.argmin())
        if not gains[taker] > costs[giver]:
            return (steps.double() * step).view(curves.shape[:2])
        steps[taker] += 1
        steps[giver] -= 1


def _losses(flat: Tensor, ratios: Sequence[float], wanted: Tensor) -> Tensor:
    """The losses of each head at some ratios [n]: [heads, n]."""
    lowest = min(ratio for ratio in ratios if ratio > 0)
    at, where = (
        x.clamp(max=lowest) / lowest + x.clamp(min=lowest).log() for x in (torch.tensor(ratios).to(wanted), wanted)
    )
    right = torch.searchsorted(at, where).clamp(1, len(at) - 1)
    part = (where - at[right - 1]) / (at[right] - at[right - 1])
    return torch.lerp(flat[:, right - 1].to(part), flat[:, right].to(part), part)


def counts(shares: Tensor, ratio: float, tokens: int, config: PromptCacheConfig) -> list[list[int]]:
    """How many entries of each head stay of so many tokens, where the mean head keeps `ratio`; shares [L, Hkv]."""
    between = config.between(tokens)
    wanted = (shares / shares.mean() * ratio * between).round().clamp(1, between)
    return wanted.long().tolist()


def save(path: str | Path, shares: Tensor) -> None:
    """Budgets as JSON, [layer][kv head], relative to their mean."""
    Path(path).write_text(json.dumps({"shares": (shares / shares.mean()).tolist()}) + "\n")


def load(path: str | Path, layers: int, kv_heads: int) -> Tensor:
    """Budgets that `save` wrote, relative to their mean: float64 [L, Hkv].

    Raises UserError where the file is none of budgets, or not of a model of this shape.
    """
    try:
        shares = torch.tensor(json.loads(read_text(path))["shares"], dtype=torch.float64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no head budgets: {reason(error)}") from error
    if not bool((shares >= 0).all() and shares.sum() > 0):
        raise UserError(f"{path} has a head budget below 0, or none above it")
    if shares.shape != (layers, kv_heads):
        wrong = f"{list(shares.shape)}, and the model has {[layers, kv_heads]} layers and kv heads"
        raise UserError(f"{path} has budgets of {wrong}")
    return shares
