"""Number of entries that each kv head keeps, and head budgets from sensitivity curves (Attention Matching, section 3.4,
appendix E, algorithm 4).

A head's sensitivity curve gives the model's loss as a function of the ratio of its entries that this head keeps, while
all other heads keep a base ratio. Budgets are moved, one step at a time, from the head whose loss grows least to the
head whose loss falls most. The step size and the interpolation between the measured ratios are our own choice. Budgets
are measured once per model (`sparse-rl budgets`), and serve for all contexts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.context.cache import Context, joined
from rollout.context.config import BASE, RATIOS, PromptCacheConfig
from sparse_rl.config import Source, coerce, show
from sparse_rl.errors import UserError, reason
from sparse_rl.files import read_json, read_text, replace_text
from sparse_rl.models.weights import UNKNOWN, Identity

FORMAT_VERSION = 1
STEPS = 200  # a step moves 1 / STEPS of the mean number of entries per head
NAME = re.compile(r"L\d+H\d+")  # of a kv head, in the files of the paper's authors
STEEP = 20  # in a pyramid, the mean layer keeps STEEP times as much as the last layer (PyramidKV's beta)


def planned(
    config: PromptCacheConfig, tokens: int, layers: Sequence[int], kv_heads: int, model: Identity = UNKNOWN
) -> list[list[int]]:
    """Return the number of entries that each kv head keeps of a context of `tokens` tokens, as [layer][kv head], not
    counting the first `config.first` and the last `config.last` entries.

    layers : indices in the model of the layers that are compacted, which are those without a sliding window

    Raises UserError if `config.budgets` is not a file of head budgets for this model, these layers and kv heads.
    """
    mean_count = config.kept(tokens)
    if config.chooses and config.budgets is not None:
        try:
            shares = load(config.budgets, layers, kv_heads, model)
        except UserError as error:
            raise UserError(error.message, "budgets") from error
        if config.heads == "partition":
            return partition(shares, config.ratio, config.between(tokens))
        return counts(shares, config.ratio, tokens, config)
    pyramidal = config.chooses and config.heads == "pyramid"
    count = len(layers)
    of_layers = pyramid(mean_count, config.between(tokens), count) if pyramidal else [mean_count] * count
    return [[count] * kv_heads for count in of_layers]


def partition(shares: Tensor, ratio: float, between: int) -> list[list[int]]:
    """Return the number of entries that each kv head keeps if the share `ratio` of all heads with the largest budgets
    `shares` [L, Hkv] keeps all `between` entries that compete, and all others one entry (AM appendix B.3, after
    DuoAttention). Among equal budgets, the earlier head comes first.
    """
    order = shares.flatten().sort(descending=True, stable=True).indices[: round(ratio * shares.numel())]
    return torch.ones(shares.numel(), dtype=torch.long).index_fill(0, order, between).view_as(shares).tolist()


def pyramid(mean: int, most: int, layers: int) -> list[int]:
    """Return, for each layer, the number of entries that each of its kv heads keeps. It falls linearly with the layer
    index, with the mean `mean`, and at most `most` (PyramidKV, section 4.2, with the bounds of PyramidKV's code).
    """
    last = max(mean / STEEP, 1, 2 * mean - most) if layers > 1 else mean
    shares = (mean + (mean - last) * (1 - 2 * layer / max(1, layers - 1)) for layer in range(layers))
    return [end - start for start, end in pairwise(math.floor(end + 0.5) for end in accumulate(shares, initial=0))]


class Varied:
    """A compaction of a `studied` context (compact.py) in which all heads but one keep the ratio `base` of entries."""

    def __init__(self, studied: Any, config: PromptCacheConfig, base: float = BASE) -> None:
        self.studied, self.config = studied, config
        self.whole = studied.whole
        self.count = self._count(base)
        self.kv_heads = self.whole.layers[0].keys.shape[1]
        self.heads = [
            [studied.head(config, layer, head, self.count) for head in range(self.kv_heads)]
            for layer in range(len(self.whole.layers))
        ]
        self.layers = [joined(heads) for heads in self.heads]

    def unvaried(self) -> Context:
        return replace(self.whole, layers=self.layers, fitted=self.config.policy == "am")

    def varied(self, layer: int, head: int, count: int) -> Context:
        """Return the compaction in which one kv head keeps `count` chosen entries instead."""
        heads = list(self.heads[layer])
        heads[head] = self.studied.head(self.config, layer, head, count)
        layers = [*self.layers[:layer], joined(heads), *self.layers[layer + 1 :]]
        return replace(self.unvaried(), layers=layers)

    def curve(
        self,
        layer: int,
        head: int,
        ratios: Sequence[float],
        loss: Callable[[Context], float],
        unvaried_loss: float | None = None,
    ) -> list[float]:
        """Return the sensitivity curve of a kv head: the loss at each ratio, with one call of `loss` for ratios with
        equal numbers of entries, and none for that of `unvaried()` if its loss is given.
        """
        losses = {} if unvaried_loss is None else {self.count: unvaried_loss}
        counts = [self._count(ratio) for ratio in ratios]
        for count in counts:
            if count not in losses:
                losses[count] = loss(self.varied(layer, head, count))
        return [losses[count] for count in counts]

    def _count(self, ratio: float) -> int:
        return max(1, round(ratio * self.config.between(len(self.whole.tokens))))


def sensitivity(
    contexts: Sequence[Any],
    config: PromptCacheConfig,
    loss: Callable[[int, Context], float],
    ratios: Sequence[float] = RATIOS,
    base: float = BASE,
) -> Tensor:
    """Measure sensitivity curves: for each kv head and each ratio of `ratios`, the loss if the head keeps this ratio of
    its entries, and all other heads keep the ratio `base`. Returns means over the contexts: float64 [L, Hkv, number of
    ratios].

    loss : function (index in `contexts`, a compaction of that context) -> the model's loss with this compaction
    """
    curves = []
    for number, studied in enumerate(contexts):
        varied = Varied(studied, config, base)
        layers, heads = range(len(varied.layers)), range(varied.kv_heads)
        of_context = [[varied.curve(n, head, ratios, partial(loss, number)) for head in heads] for n in layers]
        curves.append(torch.tensor(of_context, dtype=torch.float64))
    return torch.stack(curves).mean(0)


def allocate(curves: Tensor, ratios: Sequence[float], ratio: float) -> Tensor:
    """Distribute a mean ratio over the heads by greedy swaps on their sensitivity curves. Returns the ratio of entries
    that each head keeps, float64 [L, Hkv], from 0 to 1, with mean `ratio`.

    curves : [L, Hkv, number of ratios], each head's losses at `ratios`; the ratios are in increasing order. Between and
        beyond them, the loss is taken as linear in the logarithm of the ratio; below the smallest ratio above 0, the
        loss is taken as linear in the ratio

    Raises UserError if `ratio` is 0, or not between the ratios of the curves.
    """
    if not ratios[0] <= ratio <= ratios[-1] or ratio <= 0:
        measured = f"{ratios[0]} and {ratios[-1]}, the outermost ratios of the measured losses"
        raise UserError(f"{ratio} is not between {measured}" if ratio else "0 leaves no entries to distribute", "ratio")
    flat, step = curves.flatten(0, 1), ratio / STEPS
    losses = _losses(flat, ratios, torch.arange(math.floor(1 / step + 1e-9) + 1, dtype=torch.float64) * step)
    # worth[head, n]: decrease of the head's loss by its n-th step. A head at ratio 0 cannot give, one at 1 cannot take.
    worth = F.pad(losses[:, :-1] - losses[:, 1:], (1, 1))
    worth[:, 0], worth[:, -1] = float("inf"), float("-inf")
    heads, steps = torch.arange(len(flat)), torch.full((len(flat),), STEPS)
    while True:
        gains, costs = worth[heads, steps + 1], worth[heads, steps]
        taker = int(gains.argmax())
        costs[taker] = float("inf")  # the giver must be another head
        giver = int(costs.argmin())
        if not gains[taker] > costs[giver]:
            return (steps.double() * step).view(curves.shape[:2])
        steps[taker] += 1
        steps[giver] -= 1


def _losses(flat: Tensor, ratios: Sequence[float], wanted: Tensor) -> Tensor:
    """Interpolate losses [heads, number of ratios] at the ratios `wanted`."""
    lowest = min(ratio for ratio in ratios if ratio > 0)
    scaled, wanted_scaled = (
        x.clamp(max=lowest) / lowest + x.clamp(min=lowest).log() for x in (torch.tensor(ratios).to(wanted), wanted)
    )
    right = torch.searchsorted(scaled, wanted_scaled).clamp(1, len(scaled) - 1)
    part = (wanted_scaled - scaled[right - 1]) / (scaled[right] - scaled[right - 1])
    return torch.lerp(flat[:, right - 1].to(part), flat[:, right].to(part), part)


def counts(shares: Tensor, ratio: float, tokens: int, config: PromptCacheConfig) -> list[list[int]]:
    """Return the number of entries that each kv head keeps of a context of `tokens` tokens, as `planned` does.

    shares : [L, Hkv], head budgets; only their ratios to their mean matter
    ratio : mean ratio of entries that a head keeps
    """
    between = config.between(tokens)
    wanted = (shares / shares.mean() * ratio * between).round().clamp(1, between)
    return wanted.long().tolist()


def padding(counts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the memory of a compacted context over that of its `counts` [layer][kv head] of entries alone: in hf,
    where each head is padded to the longest of its layer, and in vLLM, of all layers (AM, footnote 3).
    """
    longest = [max(heads) for heads in counts]
    entries = sum(map(sum, counts)) / len(counts[0])
    return sum(longest) / entries, max(longest) * len(counts) / entries


# ---- keys of all kv heads that compete by their attention (KVzip; Attention Matching, appendices B.3 and E) ---------


def competing_counts(scores: Tensor, total: int) -> list[list[int]]:
    """Return the number of keys that each kv head keeps, as [layer][kv head], if the `total` keys with the highest
    scores [L, Hkv, N] are kept, and the best key of each head.
    """
    scores = scores.scatter(2, scores.argmax(2, keepdim=True), float("inf"))
    order = scores.flatten().sort(descending=True, stable=True).indices
    kept = torch.zeros_like(order, dtype=torch.bool)
    kept[order[: max(total, scores.shape[0] * scores.shape[1])]] = True
    return kept.view_as(scores).sum(-1).tolist()


def global_shares(scores: Tensor, ratios: Sequence[float]) -> Tensor:
    """Return the share of the kept keys that each kv head gets if the keys with the highest scores [L, Hkv, N] of all
    heads are kept, at least one: float64 [number of ratios, L, Hkv], which adds up to 1 at each ratio.
    """
    layers, heads, count = scores.shape
    owner = torch.arange(layers * heads).repeat_interleave(count)
    ranked = owner[scores.flatten().sort(descending=True, stable=True).indices]
    kept = (ranked[: max(1, round(ratio * len(owner)))] for ratio in ratios)
    shares = [torch.bincount(owners, minlength=layers * heads).double() / len(owners) for owners in kept]
    return torch.stack(shares).view(-1, layers, heads)


# ---- files ----------------------------------------------------------------------------------------------------------


def save(path: str | Path, shares: Tensor, model: Identity = UNKNOWN, **more: Any) -> dict[str, Any]:
    """Write head budgets [L, Hkv] of a model to a JSON file as [layer][kv head], divided by their mean, with further
    keys: if the model has layers with a sliding window, `layers`, the indices of the L others. Return the content.
    """
    content = {"format_version": FORMAT_VERSION, "model": asdict(model), **more}
    content["shares"] = (shares / shares.mean()).tolist()
    replace_text(path, json.dumps(content) + "\n")
    return content


def load(path: str | Path, layers: Sequence[int], kv_heads: int, model: Identity = UNKNOWN) -> Tensor:
    """Read head budgets. Returns float64 [L, Hkv], with mean 1.

    Three formats are read: a file of `save`; a JSON mapping {"L0H0": share, ...}, as the paper's authors publish; and a
    file *.tsv with a line for each layer and a column for each kv head, as DuoAttention publishes.

    layers : indices in the model of its L layers without a sliding window

    Raises UserError if the file does not hold budgets for this model, with these layers and this number of kv heads.
    """
    try:
        if Path(path).suffix == ".tsv":
            lines = filter(str.strip, read_text(path).splitlines())
            content: dict[str, Any] = {"shares": [[float(cell) for cell in line.split("\t")] for line in lines]}
        else:
            content = read_json(path)
        if content.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            wrong = f"it has format version {show(content['format_version'])}, but {FORMAT_VERSION} is read"
            raise UserError(f"{wrong}; measure it again")
        maker = coerce(content.get("model", {}), Identity, "model", Source())
        if any(NAME.fullmatch(name) for name in content):
            content = _by_name(content)
        rows = coerce(content["shares"], list[list[float]], "shares", Source(), promote=False)
        shares = torch.tensor(rows, dtype=torch.float64)
        named = coerce(content.get("layers", list(layers)), list[int], "layers", Source(), promote=False)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}; measure head budgets: sparse-rl budgets RECIPE") from error
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{path} holds no head budgets: {reason(error)}") from error
    shares /= shares.mean()
    if not bool((shares >= 0).all() and shares.isfinite().all()):
        raise UserError(f"{path} has a head budget below 0, or no head budget above 0")
    if shares.shape != (len(layers), kv_heads):
        wrong = f"{list(shares.shape)}, but the model has {[len(layers), kv_heads]} layers and kv heads"
        raise UserError(f"{path} has head budgets of shape {wrong}")
    if named != list(layers):
        theirs, own = (", ".join(map(str, numbers)) for numbers in (named, layers))
        wrong = f"{theirs}, but the model's layers without a sliding window are {own}"
        raise UserError(f"{path} has head budgets of the layers {wrong}")
    maker.check(model, str(path))
    return shares


def _by_name(shares: dict[str, float]) -> dict[str, Any]:
    """Return the content of a file of `save` for {"L5H0": 0.1, ...}, of the layers without a sliding window."""
    if other := next((name for name in shares if not NAME.fullmatch(name)), None):
        raise ValueError(f"{other} does not name a layer and a kv head, as L0H0 does")
    places = [tuple(map(int, name[1:].split("H"))) for name in shares]
    layers, heads = sorted({layer for layer, _ in places}), range(1 + max(head for _, head in places))
    return {"layers": layers, "shares": [[shares[f"L{n}H{head}"] for head in heads] for n in layers]}
