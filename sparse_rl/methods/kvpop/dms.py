"""DMS (dynamic memory sparsification), KVpop's baseline: when a token arrives, a gate decides whether to drop it later.

The gate of token t is open if score + bias > 0. A token with an open gate is dropped when query t + w arrives, before
that query attends (evict_at = t + w); w is the window. Only training controls the average number of entries, through
`compression`.

In training the gates are soft: they reduce a token's weight instead of dropping it. The gate of token t is the
Gumbel-sigmoid with temperature tau and logistic noise g:

    alpha_t = sigmoid((score_t + bias + g) / tau)

If q - t >= w, log(1 - alpha_t) is added to the logit of query q and token t. Under dense prefill, this is done only for
queries q after the prompt. The added terms of one layer would have the shape [B, Hkv, S, S], so they are computed for
CHUNK queries at a time, and again in the backward pass. Without a temperature the gates are hard, as in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention.interface import KVView
from sparse_rl.kernels.exact import computing_dtype, sdpa
from sparse_rl.kernels.masked import masked_attention
from sparse_rl.methods.config import DMSConfig
from sparse_rl.methods.kvpop.policy import LearnedPolicy
from sparse_rl.methods.kvpop.view import share_held
from sparse_rl.policies.base import Arriving, Chunk, Entries
from sparse_rl.policies.cache import EvictingCache, Layer, at_slots
from sparse_rl.trace import NEVER

GOES = "goes"  # in the policy's memory of an entry: 1.0 if the gate is open
HELD = "held"  # likewise: 1.0 if the slot is in use, else 0.0
GROW = 16  # slots added at a time
CHUNK = 256  # queries whose biases are computed at a time


class DMS(LearnedPolicy):
    config: DMSConfig
    entry_memory = {GOES: 0.0}

    def goes(self, scores: Tensor, positions: Tensor) -> Tensor:
        return ((scores + self.config.bias > 0) & (positions >= self.config.sinks)[:, None]).float()

    def take_in(self, layer: int, chunk: Chunk) -> dict[str, Tensor]:
        return {GOES: self.goes(*self.scores_of(layer, chunk))}

    def masks(self, layer: int, state: dict[str, Tensor], lengths: Tensor) -> Tensor | None:
        if self.config.prefill == "dense":
            return None
        at = torch.arange(state[GOES].shape[-1], device=lengths.device) + self.config.window
        return torch.where((state[GOES] > 0) & (at < lengths[:, None, None]), at, NEVER).int().contiguous()

    def before_attending(self, layer: int, entries: Entries, arriving: Arriving) -> Tensor:
        now = (entries.seen - 1)[:, None]
        x = torch.cat([arriving.keys, arriving.values], dim=-1)[:, :, None]
        scores = self.scorers[layer].follow(arriving.memory, x, x, now)
        arriving.state[GOES].copy_(self.goes(scores, now)[..., 0])
        leaves = entries.positions == now[:, None] - self.config.window
        return ~(leaves & (entries.state[GOES] > 0))


class GatedCache(EvictingCache):
    """Physical caches whose kv heads hold different numbers of entries, because DMS's gates decide per head.

    In each kv head, a new token takes any free slot, and a mask marks the slots in use. A layer's buffers grow when one
    of its heads has no free slot, and never shrink after prefill. `lengths` and `_held` count the tokens seen, an upper
    bound of the entries held.
    """

    policy: DMS

    def begin_decode(self, active: Sequence[bool], device: torch.device) -> None:
        self.seen = [n + a for n, a in zip(self.seen, active, strict=True)]
        self._plan(self.seen, device)
        self._active = torch.tensor(active, device=device)
        self._extend_records()

    def _prefill(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        out = super()._prefill(index, query, key, value, scaling)
        layer, ends = self.layers[index], self._attended_tensor[:, None, None]
        evicted = (layer.state[GOES] > 0) & (layer.positions + self.policy.config.window < ends)
        real = layer.positions < ends
        at = torch.where(evicted & real, ends, NEVER).to(torch.int32)
        width = at.shape[-1]
        layer.evict_at[..., :width] = torch.minimum(layer.evict_at[..., :width], at)
        held = real & ~evicted
        count = int(held.sum(-1).max())
        order = (~held).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]  # held entries come first
        layer.state[HELD] = held.float()
        buffers = layer.slotted().items()
        layer.replace({name: at_slots(x, order) if x.ndim == 4 else x.gather(2, order) for name, x in buffers})
        return out

    def _arrive(self, index: int, layer: Layer, key: Tensor, value: Tensor, scaling: float) -> None:
        """Drop the entries that are due, then put each row's new token into a free slot of each kv head."""
        now, active = self._seen_tensor - 1, self._active[:, None]
        count = layer.keys.shape[2]
        entries = self._entries(layer, slice(None), count, scaling, ("keys", "values"))
        state = self._new_state(key.shape[:2], key.device)
        stays = self.policy.before_attending(index, entries, Arriving(key, value, state, layer.memory))
        held = layer.state[HELD] > 0
        dropped = held & ~stays & active[..., None]
        dropped_at = torch.where(dropped, now[:, None, None], NEVER).to(torch.int32)
        layer.evict_at.scatter_reduce_(-1, layer.positions, dropped_at, reduce="amin")
        held &= ~dropped
        layer.state[HELD] = held.float()
        if bool(held.all(-1).any()):  # a head has no free slot
            layer.replace(
                {n: F.pad(b, (0, 0, 0, GROW) if b.ndim == 4 else (0, GROW)) for n, b in layer.slotted().items()}
            )
        slot = (layer.state[HELD] == 0).int().argmax(-1)
        self._write(layer, slot, key, value, {**state, HELD: torch.ones(key.shape[:2], device=key.device)})

    def _slots_seen(self, layer: Layer) -> tuple[int, Tensor | None]:
        return layer.keys.shape[2], layer.state[HELD][:, :, None] > 0


@dataclass(eq=False)
class GatedView(KVView):
    """A `kv_view` for one forward and backward pass over B right-padded rows of S columns."""

    # one function per layer, called with (keys, values, window); it returns the scores, float32 [B, Hkv, S], and the
    # logarithm of each kv head's decay gamma, [Hkv]
    scorers: Sequence[Callable[..., tuple[Tensor, Tensor]]]
    policy: DMSConfig = field()  # only sinks, window and bias are used
    lengths: Tensor  # int64 [B], number of tokens of each row
    _: KW_ONLY
    # int64 [B], number of tokens of each prompt, to whose queries no gate applies; None: gates apply to all queries
    prompts: Tensor | None = None
    temperature: float | None = None  # tau; None means hard gates
    kernel: str = "gather"  # one of ATTENTION_KERNELS, used with hard gates

    # After the forward pass, for each layer: the sum of alpha over all real tokens and heads, with its autograd graph;
    # for hard gates, the number of open gates;
    open: dict[int, Tensor] = field(default_factory=dict, init=False)
    # float [B], the share of each row's tokens that is held at the end of the row. With soft gates, a token that could
    # have been dropped by then counts as 1 - alpha
    retained: dict[int, Tensor] = field(default_factory=dict, init=False)
    gates: int = field(default=0, init=False)  # number of gates of a layer
    _noise: dict[int, Tensor] = field(default_factory=dict, init=False)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        scores, log_decay = self.scorers[layer](key, value, self.policy.window)
        logits = scores + self.policy.bias + 0.0 * log_decay[:, None]  # the decay has no effect, but gets a gradient
        places = torch.arange(key.shape[2], device=key.device)
        may_go = (places >= self.policy.sinks) & (places < self.lengths[:, None])  # [B, S]
        real = (places < self.lengths[:, None])[:, None].expand_as(logits)
        self.gates = int(real.sum())
        prompts = torch.zeros_like(self.lengths) if self.prompts is None else self.prompts
        goes_at = torch.maximum(places + self.policy.window, prompts[:, None])  # first query to which the gate applies
        if self.temperature is None:
            evict_at = self.evict_at(logits, may_go, goes_at)
            self.open.setdefault(layer, ((logits > 0) & may_go[:, None]).sum().float())
            self.retained[layer] = share_held((evict_at >= self.lengths[:, None, None] - 1).float(), self.lengths)
            evict_at = evict_at.masked_fill(~real, 0)  # no query sees padding
            return masked_attention(lambda: evict_at, query, key, value, scaling, self.kernel)
        soft = (logits + self._logistic(layer, logits)) / self.temperature
        alpha = torch.where(may_go[:, None], soft.sigmoid(), 0.0)
        self.open.setdefault(layer, alpha.sum())
        due = (goes_at < self.lengths[:, None] - 1)[:, None]
        self.retained[layer] = share_held(torch.where(due, 1 - alpha.detach(), 1.0), self.lengths)
        stays = torch.where(may_go[:, None], F.logsigmoid(-soft), 0.0)  # log(1 - alpha)
        return self._soft_attention(query, key, value, stays, goes_at, scaling)

    def _soft_attention(
        self, query: Tensor, key: Tensor, value: Tensor, stays: Tensor, goes_at: Tensor, scaling: float
    ) -> Tensor:
        """Attend under soft gates, in chunks of queries whose biases the backward pass recomputes.

        stays, goes_at : [B, Hkv, S], log(1 - alpha), added to a token's logits, and [B, S], the first query to which
            the token's gate applies
        """
        wide, parts = computing_dtype(query, value), list[Tensor]()
        grouped = query.to(wide).unflatten(1, (key.shape[1], -1))  # [B, Hkv, G, S, D]
        tensors = (key.to(wide), value.to(wide), stays)
        for queries in grouped.split(CHUNK, dim=3):
            work = partial(_attend_softly, len(parts) * CHUNK, scaling, goes_at, self.lengths)
            if torch.is_grad_enabled():
                parts.append(checkpoint(work, queries, *tensors, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(work(queries, *tensors))
        return torch.cat(parts, dim=3).flatten(1, 2).to(value.dtype)

    def evict_at(self, logits: Tensor, may_go: Tensor, goes_at: Tensor) -> Tensor:
        """Return evict_at of hard gates, int32 [B, Hkv, S]: `goes_at` [B, S] if the logit is positive, else NEVER."""
        return torch.where((logits > 0) & may_go[:, None], goes_at[:, None], NEVER).int()

    def share(self) -> Tensor:
        """Return the mean of alpha over all gates of all layers. Call this after the forward pass."""
        return torch.stack(list(self.open.values())).sum() / max(1, self.gates * len(self.open))

    @torch.no_grad()
    def _logistic(self, layer: int, like: Tensor) -> Tensor:
        """Return the logistic noise of a layer. It is the same when gradient checkpointing repeats the layer."""
        if layer not in self._noise:
            uniform = torch.rand(like.shape).clamp(1e-6, 1 - 1e-6).to(like)
            self._noise[layer] = uniform.log() - (-uniform).log1p()
        return self._noise[layer]


def _attend_softly(first: int, scaling: float, goes_at: Tensor, lengths: Tensor, *tensors: Tensor) -> Tensor:
    """Attend causally, under soft gates, from C consecutive queries to all tokens up to the last query.

    `first` is the position of the first query; the tensors are queries, [B, Hkv, G, C, D] as the result, keys, values,
    and `stays` (`_soft_attention`).
    """
    query, key, value, stays = tensors
    last = first + query.shape[3]
    tokens = torch.arange(last, device=query.device)
    queries = tokens[first:, None]
    late = queries >= goes_at[:, None, None, :last]  # [B, 1, C, N]
    bias = torch.where(late, stays[:, :, None, :last], 0.0)
    hidden = (queries < tokens) | (tokens >= lengths[:, None, None, None])  # later tokens, and padding
    bias = bias.masked_fill(hidden & (queries != tokens), float("-inf")).to(query.dtype)
    # kv heads are folded into the batch, so that neither keys nor biases are repeated
    keys, values = (x[:, :, None, :last].expand(-1, -1, query.shape[2], -1, -1).flatten(0, 1) for x in (key, value))
    return sdpa(query.flatten(0, 1), keys, values, scaling, bias.flatten(0, 1)[:, None]).view(query.shape)
