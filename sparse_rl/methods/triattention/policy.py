"""TriAttention (arXiv 2604.04921): keeps the entries to which future queries are expected to attend most.

RoPE turns a query by its position, so that recent queries say little about later ones. Before RoPE, the queries of a
head lie close to one centre. A calibration (`measure_centres`) averages them over a text, once per model. Pair f of a
head's dimensions is the complex number x_f = x[f] + i x[f + D/2], which RoPE turns by the angle w_f p at position p.
For a query head with queries q before RoPE, and for an entry at position j with the key k before RoPE,

    S_trig(j) = mean_d sum_f |E q_f| |k_f| cos(w_f (n + d - j) + arg E q_f - arg k_f)
    S_norm(j) = sum_f (1 - R_f) E|q_f| |k_f|,   R_f = |E q_f| / E|q_f|
    S(j)      = max_g zscore_j(S_trig + S_norm)

for distances d = 1, 2, 4, ... up to `horizon`, and n tokens seen. S_trig is the product of the cached key with one
query for all distances: the centre, turned to the positions n + d and averaged over d. So no key is turned back. A
scaled RoPE (linear, llama3, YaRN) has other frequencies w; its factor on queries and keys cancels in the z-score.

We read the authors' code (github.com/WeianMao/triattention, c3744ee), and of the paper only the abstract. Readings: n
as in the code; z-scores over competing entries, with the variance divided by their number; the maximum over the query
heads g of a kv head, for each layer alone (`per_layer_perhead_pruning`; the code's default is its mean over layers).
Departures: prompts compete, which the code never evicts; ties go to the earlier position, where the code adds noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from sparse_rl.attention.families import context_length, policy_shape, refuse_states
from sparse_rl.attention.interface import NO_MASK, KVView, adopt
from sparse_rl.attention.views import map_of_model
from sparse_rl.errors import UserError
from sparse_rl.kernels.exact import sdpa
from sparse_rl.methods.triattention.config import ATTACHED_AS, TriAttentionConfig
from sparse_rl.policies.base import Entries, Policy

CHUNK = 1024  # queries that the calibration processes at a time
TOLERANCE = 0.15  # relative difference from RoPE at which a layer is refused; bfloat16 and float32 angles round
SMALLEST = 1e-6  # standard deviation by which scores are divided at least


@dataclass(frozen=True)
class Centres:
    """Statistics of a model's queries before RoPE, for its L layers without a sliding window and Hq query heads.

    centre : float32 [L, Hq, D], mean query E q
    size : float32 [L, Hq, D / 2], mean absolute value E|q_f| of each pair
    frequency : float32 [L, D / 2], angle w_f per position
    """

    centre: Tensor
    size: Tensor
    frequency: Tensor

    def of_heads(self, heads: slice) -> Centres:
        return Centres(self.centre[:, heads], self.size[:, heads], self.frequency)


class TriAttention(Policy):
    """Scores are computed in float64, and rounded: engines have a cache's entries in different orders."""

    config: TriAttentionConfig
    scores_by_layer = True
    centres: Centres | None = None

    def bound_to(self, model: Any) -> Self:
        return self.with_centres(getattr(model, ATTACHED_AS))  # models/centres.py attaches them

    def with_centres(self, centres: Centres) -> Self:
        bound = copy.copy(self)
        bound.centres = centres
        frequency, centre = centres.frequency.double(), pairs(centres.centre.double())
        distances = 2.0 ** torch.arange(self.config.horizon.bit_length(), dtype=torch.float64)
        turns = turned(distances[:, None, None] * frequency).mean(0)  # [L, D / 2]
        bound._parts = frequency, centre * turns[:, None], centres.size.double() - centre.abs()
        return bound

    def score(self, layer: int, entries: Entries) -> Tensor:
        assert entries.keys is not None and self.centres is not None
        keys = entries.keys.double()
        if self._parts[0].device != keys.device:
            self._parts = tuple(part.to(keys.device) for part in self._parts)
        frequency, query, spread = (part[layer] for part in self._parts)
        query = query * turned(entries.seen[:, None] * frequency)[:, None]  # [R, Hq, D / 2]
        shape = (len(keys), keys.shape[1], -1)  # R, Hkv, G
        expected = torch.cat([query.real, query.imag], -1).unflatten(1, shape[1:]) @ keys.transpose(-1, -2)
        sizes = torch.hypot(*keys.chunk(2, dim=-1)).transpose(-1, -2)  # |k_f|; `pairs` would need more memory
        scores = expected + spread.unflatten(0, shape[1:]) @ sizes  # [R, Hkv, G, N]
        competing = entries.competing(self.config.sinks, self.config.window)[:, :, None]
        count = competing.sum(-1, keepdim=True).clamp(min=1)
        scores = scores - scores.where(competing, 0.0).sum(-1, keepdim=True) / count
        deviation = (scores.where(competing, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
        return (scores / deviation.clamp(min=SMALLEST)).amax(2).float()

    _parts: tuple[Tensor, ...]  # frequency, centre turned to the future and averaged, E|q_f| - |E q_f|: [L, ...] each


def pairs(x: Tensor) -> Tensor:
    """Return the pairs of dimensions that RoPE turns as complex numbers: [..., D] -> [..., D / 2]."""
    return torch.complex(*x.contiguous().chunk(2, dim=-1))


def turned(angles: Tensor) -> Tensor:
    return torch.polar(torch.ones_like(angles), angles)


# ---- calibration -----------------------------------------------------------------------------------------------------


class Listener(KVView):
    """Full causal attention over one text, in which `hear` gets the queries [1, Hq, T, D] of each layer."""

    def __init__(self, hear: Callable[[int, Tensor], Any]) -> None:
        self.hear = hear

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.hear(layer, query)
        return sdpa(query, key, value, scaling, causal=query.shape[2] > 1)


@torch.no_grad()
def measure_centres(model: Any, ids: Sequence[int]) -> Centres:
    """Measure the centres of a model's queries over one text.

    ids : token ids of the text, at most as many as the model's context

    Raises UserError if RoPE of a layer does not turn all pairs of dimensions (`pairs`) by fixed frequencies.
    """
    refuse_states(model.config, "centres are measured on queries that differ by RoPE alone", "cache.policy")
    adopt(model)
    frequency = frequencies(model, ids[0]).double()
    layers, _, dim = policy_shape(model.config)
    centre = frequency.new_zeros(layers, model.config.num_attention_heads, dim // 2, dtype=torch.complex128)
    size = centre.real.clone()

    def add(layer: int, query: Tensor) -> None:
        for start in range(0, len(ids), CHUNK):
            some = pairs(query[0, :, start : start + CHUNK].double())
            positions = torch.arange(start, start + some.shape[1], device=some.device)
            centre[layer] += (some * turned(-positions[:, None] * frequency[layer])).sum(1)
            size[layer] += some.abs().sum(1)

    listen(model, add, ids, range(len(ids)))
    mean = torch.cat([centre.real, centre.imag], -1) / len(ids)
    return Centres(*(x.float().cpu() for x in (mean, size / len(ids), frequency)))


def listen(model: Any, hear: Callable[[int, Tensor], Any], ids: Sequence[int], positions: Sequence[int]) -> None:
    device = model.device
    view = map_of_model(Listener(hear), model.config, torch.tensor([len(ids)], device=device), len(ids))
    inputs = {"input_ids": [list(ids)], "position_ids": [list(positions)]}
    tensors = {name: torch.tensor(rows, device=device) for name, rows in inputs.items()}
    model.get_decoder()(**tensors, attention_mask=NO_MASK.to(device), kv_view=view, use_cache=False)


def frequencies(model: Any, token: int) -> Tensor:
    """Return the frequencies of RoPE in each layer without a sliding window, float32 [L, D / 2].

    In a text of one repeated token, the queries of any layer differ only by their RoPE. Among the model's frequencies,
    those of a layer turn its first query to all others, also to the query at the last position of the context.
    """
    last = (context_length(model.config) or model.config.max_position_embeddings) - 1
    positions = sorted({0, last, *(2**n for n in range(last.bit_length()))})
    heard: dict[int, Tensor] = {}
    listen(model, heard.__setitem__, [token] * len(positions), positions)
    rotary = getattr(model.get_decoder(), "rotary_emb", torch.nn.Module())
    candidates = [x.double() for name, x in rotary.named_buffers() if name.endswith("inv_freq")]
    result = []
    for layer, query in sorted(heard.items()):
        some, at = pairs(query[0].double()), torch.tensor(positions, device=query.device)[:, None]  # [Hq, T, D / 2]
        closest, own = TOLERANCE, None
        for frequency in candidates:
            if len(frequency) == some.shape[-1]:
                difference = (some - some[:, :1] * turned(at * frequency)).norm(dim=(0, 2)) / some[:, 0].norm()
                if (largest := float(difference.max())) < closest:
                    closest, own = largest, frequency.float()
        if own is None:
            why = f"in layer {layer} RoPE is absent, partial, interleaved, or scales queries by their position"
            raise UserError(f"triattention has no score for a model of type {model.config.model_type}: {why}", "model")
        result.append(own)
    return torch.stack(result)
