"""Number of entries that each kv head keeps, and head budgets from sensitivity curves (Attention Matching, section 3.4,
appendix E, algorithm 4).

A head's sensitivity curve gives the model's loss as a function of the ratio of its entries that this head keeps, while
all other heads keep a base ratio. Budgets are moved, one step at a time, from the head whose loss grows least to the
head whose loss falls most. The step size and the interpolation between the measured ratios are our own choice. Budgets
are measured once per model, and serve for all contexts. `sparse-rl budgets` measures them (evaluation/budgets.py).
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
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.context.cache import Context, LayerEntries, joined
from rollout.context.config import BASE, RATIOS, PromptCacheConfig
from sparse_rl.config import show
from sparse_rl.errors import UserError, reason
from sparse_rl.files import read_text, replace_text
from sparse_rl.models.identity import UNKNOWN, Identity

FORMAT_VERSION = 1
STEPS = 200  # a step moves 1 / STEPS of the mean number of entries per head
NAME = re.compile(r"L\d+H\d+")  # of a kv head, in the files of the paper's authors
STEEP = 20  # in a pyramid, the mean layer keeps STEEP times as much as the last layer (PyramidKV's beta)


class Studied(Protocol):
    """A prefilled context, each of whose kv heads can be compacted to any number of entries (compact.py)."""

    whole: Context

    def head(self, config: PromptCacheConfig, place: int, head: int, count: int) -> LayerEntries:
        """Return the entries that kv head `head` of layer `place` keeps: `count` chosen ones, the first `config.first`
        and the last `config.last`.
        """
        ...


def planned(
    config: PromptCacheConfig, tokens: int, layers: Sequence[int], kv_heads: int, model: Identity = UNKNOWN
) -> list[list[int]]:
    """Return the number of entries that each kv head keeps of a context of `tokens` tokens, as [layer][kv head].

    The numbers do not include the first `config.first` and the last `config.last` entries, which are always kept.

    layers : indices in the model of the layers that are compacted, which are those without a sliding window

    Raises UserError if the context has at most `config.first` + `config.last` tokens, or if `config.budgets` is not a
    file of head budgets for this model, with these layers and this number of kv heads.
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
    """Return the number of entries that each kv head keeps if some heads keep all entries, and all others one entry.

    The heads that keep everything are the share `ratio` of all heads with the largest budgets (AM appendix B.3, after
    DuoAttention). Among equal budgets, the earlier head comes first.

    shares : [L, Hkv], head budgets, or other scores of heads
    between : number of entries that compete
    """
    order = shares.flatten().sort(descending=True, stable=True).indices[: round(ratio * shares.numel())]
    return torch.ones(shares.numel(), dtype=torch.long).index_fill(0, order, between).view_as(shares).tolist()


def pyramid(mean: int, most: int, layers: int) -> list[int]:
    """Return, for each layer, the number of entries that each of its kv heads keeps.

    The number falls linearly with the layer index. The mean over the layers is `mean`, and no layer's number
    exceeds `most` (PyramidKV, section 4.2, with the bounds of PyramidKV's code).
    """
    last = max(mean / STEEP, 1, 2 * mean - most) if layers > 1 else mean
    shares = (mean + (mean - last) * (1 - 2 * layer / max(1, layers - 1)) for layer in range(layers))
    return [end - start for start, end in pairwise(math.floor(end + 0.5) for end in accumulate(shares, initial=0))]


class Varied:
    """A compacted context in which all heads keep the ratio `base` of their entries, except one head at a time."""

    def __init__(self, studied: Studied, config: PromptCacheConfig, base: float = BASE) -> None:
        self.studied, self.config = studied, config
        self.whole = studied.whole
        self.kv_heads = self.whole.layers[0].keys.shape[1]
        self.count = self._count(base)
        places = range(len(self.whole.layers))
        self.heads = [[self._head(layer, head, self.count) for head in range(self.kv_heads)] for layer in places]
        self.layers = [joined(heads) for heads in self.heads]

    def unvaried(self) -> Context:
        """Return the compaction in which all heads keep the ratio `base`."""
        return replace(self.whole, layers=self.layers, fitted=self.config.policy == "am")

    def varied(self, layer: int, head: int, count: int) -> Context:
        """Return the compaction in which one kv head keeps `count` chosen entries instead."""
        heads = list(self.heads[layer])
        heads[head] = self._head(layer, head, count)
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
        """Return the sensitivity curve of a kv head: the loss at each ratio.

        Ratios with equal numbers of entries share one call of `loss`.

        loss : function compaction of the context -> the model's loss with this compaction
        unvaried_loss : loss of `unvaried()`; None means that it has not been computed
        """
        losses = {} if unvaried_loss is None else {self.count: unvaried_loss}
        counts = [self._count(ratio) for ratio in ratios]
        for count in counts:
            if count not in losses:
                losses[count] = loss(self.varied(layer, head, count))
        return [losses[count] for count in counts]

    def _count(self, ratio: float) -> int:
        return max(1, round(ratio * self.config.between(len(self.whole.tokens))))

    def _head(self, layer: int, head: int, count: int) -> LayerEntries:
        return self.studied.head(self.config, layer, head, count)


def sensitivity(
    contexts: Sequence[Studied],
    config: PromptCacheConfig,
    loss: Callable[[int, Context], float],
    ratios: Sequence[float] = RATIOS,
    base: float = BASE,
) -> Tensor:
    """Measure sensitivity curves: for each kv head and each ratio of `ratios`, the loss if the head keeps this ratio of
    its entries, and all other heads keep the ratio `base`.

    Returns mean losses over the contexts: float64 [L, Hkv, number of ratios], for L layers of Hkv kv heads.

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
    """Distribute a mean ratio over the heads by greedy swaps on their sensitivity curves.

    Returns the ratio of entries that each head keeps, float64 [L, Hkv], from 0 to 1, with mean `ratio`.

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
    """Interpolate losses [heads, number of ratios] at the ratios `wanted`. Returns [heads, number of wanted ratios]."""
    lowest = min(ratio for ratio in ratios if ratio > 0)
    scaled, wanted_scaled = (
        x.clamp(max=lowest) / lowest + x.clamp(min=lowest).log() for x in (torch.tensor(ratios).to(wanted), wanted)
    )
    right = torch.searchsorted(scaled, wanted_scaled).clamp(1, len(scaled) - 1)
    part = (wanted_scaled - scaled[right - 1]) / (scaled[right] - scaled[right - 1])
    return torch.lerp(flat[:, right - 1].to(part), flat[:, right].to(part), part)


def counts(shares: Tensor, ratio: float, tokens: int, config: PromptCacheConfig) -> list[list[int]]:
    """Return the number of entries that each kv head keeps of a context of `tokens` tokens, as [layer][kv head].

    The first `config.first` and the last `config.last` entries are not counted.

    shares : [L, Hkv], head budgets; only their ratios to their mean matter
    ratio : mean ratio of entries that a head keeps
    """
    between = config.between(tokens)
    wanted = (shares / shares.mean() * ratio * between).round().clamp(1, between)
    return wanted.long().tolist()


def padding(counts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the memory of a compacted context over the memory of its entries alone, in hf and in vLLM.

    In hf each head is padded to the longest head of its layer, in vLLM to the longest head of all layers (AM, footnote
    3).

    counts : number of entries of each kv head, as [layer][kv head]
    """
    longest = [max(heads) for heads in counts]
    entries = sum(map(sum, counts)) / len(counts[0])
    return sum(longest) / entries, max(longest) * len(counts) / entries


# ---- files ----------------------------------------------------------------------------------------------------------


def save(path: str | Path, shares: Tensor, model: Identity = UNKNOWN, **more: Any) -> dict[str, Any]:
    """Write head budgets [L, Hkv] to a JSON file as [layer][kv head], divided by their mean. Return the content of
    the file.

    model : the model of which they are the budgets; if it has layers with a sliding window, `more` needs the key
        `layers`, the indices of the L other layers
    more : further keys of the file
    """
    content = {"format_version": FORMAT_VERSION, "model": asdict(model), **more}
    content["shares"] = (shares / shares.mean()).tolist()
    replace_text(path, json.dumps(content) + "\n")
    return content


def load(path: str | Path, layers: Sequence[int], kv_heads: int, model: Identity = UNKNOWN) -> Tensor:
    """Read head budgets. Returns float64 [L, Hkv], with mean 1.

    Three formats are read: a file of `save`; a JSON mapping {"L0H0": share, ...}, as the paper's authors publish; and a
    file *.tsv with a line for each layer and a column for each kv head, as DuoAttention publishes. The last two name no
    model, so only their layers and kv heads are checked, of a *.tsv only their numbers.

    layers : indices in the model of its L layers without a sliding window

    Raises UserError if the file does not hold budgets for this model, with these layers and this number of kv heads.
    """
    try:
        text = read_text(path)
        content = {"shares": _table(text)} if Path(path).suffix == ".tsv" else json.loads(text)
        if not isinstance(content, dict):
            raise TypeError("it is not a mapping")
        if content.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            wrong = f"it has format version {show(content['format_version'])}, but {FORMAT_VERSION} is read"
            raise UserError(f"{wrong}; measure it again")
        maker = Identity(**content.get("model", {}))
        if any(NAME.fullmatch(name) for name in content):
            content = _by_name(content)
        shares = torch.tensor(content["shares"], dtype=torch.float64)
        named = [int(layer) for layer in content.get("layers", layers)]
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}; measure head budgets: sparse-rl budgets RECIPE") from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} holds no head budgets: {reason(error)}") from error
    if not bool((shares >= 0).all() and shares.isfinite().all() and shares.sum() > 0):
        raise UserError(f"{path} has a head budget below 0, or no head budget above 0")
    if shares.shape != (len(layers), kv_heads):
        wrong = f"{list(shares.shape)}, but the model has {[len(layers), kv_heads]} layers and kv heads"
        raise UserError(f"{path} has head budgets of shape {wrong}")
    if named != list(layers):
        own = f"but the model's layers without a sliding window are {listing(layers)}"
        raise UserError(f"{path} has head budgets of the layers {listing(named)}, {own}")
    maker.check(model, str(path))
    return shares / shares.mean()


def _table(text: str) -> list[list[float]]:
    return [[float(cell) for cell in line.split("\t")] for line in text.splitlines() if line.strip()]


def _by_name(shares: dict[str, float]) -> dict[str, Any]:
    """Return the content of a file of `save` for a mapping from names to shares, such as {"L5H0": 0.1}.

    Only the layers without a sliding window are named. Raises ValueError for another name, and KeyError for an absent
    head.
    """
    if other := next((name for name in shares if not NAME.fullmatch(name)), None):
        raise ValueError(f"{other} does not name a layer and a kv head, as L0H0 does")
    places = [tuple(map(int, name[1:].split("H"))) for name in shares]
    layers, heads = sorted({layer for layer, _ in places}), range(1 + max(head for _, head in places))
    return {"layers": layers, "shares": [[float(shares[f"L{n}H{head}"]) for head in heads] for n in layers]}


def listing(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
