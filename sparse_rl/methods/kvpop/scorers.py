"""KVpop's scorers predict, from a layer's keys and values, which tokens will matter once they have left the window.

    scorer = make_scorer({"name": "mlstm"}, heads=8, dim=128)      # the scorer of one layer with 8 kv heads
    scores, log_decay = scorer(keys, values, window)               # float32 [rows, kv heads, tokens], [kv heads]

Each kv head has its own parameters. Scorers compute in float32 for any dtype of the model; no gradient reaches the
model. Scores decay with age, at a rate gamma. A number alpha, learned for each kv head, sets gamma between two bounds:

    log gamma = log gamma_min + sigmoid(alpha) (log gamma_max - log gamma_min)

The gradient of alpha comes from the boundary loss, which compares the decayed scores of tokens of different age.

To add a scorer, write its settings in config.py and a subclass of `Scorer` here, with a line in both tables.

Sizes in shapes: B or R rows (sequences), Hkv or H kv heads, S or T tokens, D dimensions of a key and of a value,
F features, V numbers of a memory's value.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.config import GAMMA, DecayingConfig, LinearConfig, MLPConfig, MLSTMConfig, ScorerConfig

NOT_DECAYED = ("alpha", "bias", "forget_bias", "scale")  # parameters without weight decay
NOISE = 0.02
TINY = torch.finfo(torch.float32).tiny
EMPTY = -1e30  # log of the largest weight in an empty memory; finite, because -inf - -inf is NaN


class Scorer(nn.Module):
    """The scorer of one layer: for every kv head, it predicts how much each token matters after leaving the window.

    A subclass implements `score`; it also implements `read` if the score of a token depends on other tokens. An
    untrained scorer gives all tokens the score 0, so that they are ranked by recency alone. `forward` scores all tokens
    of a text, for training; `follow` scores one token after another, for decoding. Both give the same scores, up to
    rounding.
    """

    delayed: bool = False  # True if a token's score is known only when the token leaves the window

    def __init__(self, config: ScorerConfig, *, heads: int, dim: int) -> None:
        super().__init__()
        self.config, self.heads, self.dim = config, heads, dim
        if isinstance(config, DecayingConfig):
            low, high = map(math.log, GAMMA)
            share = 0.5 if config.gamma is None else (math.log(config.gamma) - low) / (high - low)
            self.alpha = nn.Parameter(torch.full((heads,), math.log(share / (1 - share))))

    def forward(self, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Return the scores of all tokens of the texts, float32 [B, Hkv, S], and log gamma of each kv head, [Hkv].

        key, value : [B, Hkv, S, D], keys after RoPE, as the cache holds them; no gradient flows into them
        window : w; token u is scored when query u + w arrives, and its score may depend on all tokens up to u + w. The
            scores of tokens that never leave the window are meaningless
        """
        with torch.autocast(key.device.type, enabled=False):
            scores = self.score(torch.cat([key.detach(), value.detach()], dim=-1).float(), window)
            return scores, self.log_decay().to(scores.device)

    def score(self, x: Tensor, window: int) -> Tensor:
        """Return the scores of all tokens, float32 [B, Hkv, S], from their keys and values x, float32 [B, Hkv, S, 2 D].

        `window` is that of `forward`.
        """
        raise NotImplementedError

    # ---- decoding -------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Tensor]:
        """Return a layer's initial memory of one sequence, before any token: name -> [Hkv, ...], on the CPU."""
        return {}

    @torch.no_grad()
    def follow(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Read T arriving tokens; when each of them arrives, score one token. Returns the scores float32 [R, Hkv, T].

        memory : name -> [R, Hkv, ...], updated in place
        x : [R, Hkv, T, 2 D], key and value of the tokens that arrive, concatenated
        asked : [R, Hkv, T, 2 D], key and value of the tokens to score: the arriving tokens or, if scores are delayed,
            the tokens that leave the window
        positions : int64 [R, T], positions of the tokens to score
        lengths : int64 [R], number of tokens of each row, the rest is padding; None means all T
        """
        with torch.autocast(x.device.type, enabled=False):
            return self.read(memory, x.float(), asked.float(), positions, lengths)

    def read(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None
    ) -> Tensor:
        """Do the work of `follow`, without autocast, for float32 x and asked."""
        return self.score(asked, 0)

    def log_decay(self) -> Tensor:
        """Return log gamma of each kv head, float32 [Hkv], <= 0. Each step of age adds log gamma to a token's score."""
        low, high = (math.log(bound) for bound in GAMMA)
        return low + self.alpha.float().sigmoid() * (high - low)


class Recency(Scorer):
    """Ranks the most recent tokens best: StreamingLLM, or after a training under it the baseline StreamingLLM+."""

    def score(self, x: Tensor, window: int) -> Tensor:
        return torch.arange(x.shape[2], device=x.device, dtype=torch.float32).expand(x.shape[:3])

    def read(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None
    ) -> Tensor:
        return positions[:, None].float().expand(asked.shape[:3])

    def log_decay(self) -> Tensor:
        return torch.zeros(self.heads)


def head_digests(weights: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return name -> the digest of all bits, in float32, for each kv head of the parameters [Hkv, ...]."""
    return {
        name: [hashlib.blake2b(head.numpy().tobytes(), digest_size=12).hexdigest() for head in weight]
        for name, weight in ((name, weight.detach().float().cpu()) for name, weight in weights.items())
    }


def per_head(*shape: int, scale: float = 0.0) -> nn.Parameter:
    """Return a parameter of shape [Hkv, ...]: normal random numbers times `scale`; zeros if `scale` is 0."""
    return nn.Parameter(torch.randn(*shape) * scale if scale else torch.zeros(*shape))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [B, Hkv, S, I] by the weights [Hkv, I, O] of each kv head, in float32. Returns [B, Hkv, S, O]."""
    rows, heads, count, _ = x.shape
    by_head = x.transpose(0, 1).reshape(heads, rows * count, -1)  # broadcasting would copy the weights B times
    return (by_head @ weight.float()).view(heads, rows, count, -1).transpose(0, 1)


# ---- scorers without a memory: r_t = f([k_t; v_t]) is known when token t arrives -----------------------------------


class Linear(Scorer):
    """Scores tokens by the linear function r = a . [k; v]. A constant would cancel in every comparison."""

    def __init__(self, config: LinearConfig, *, heads: int, dim: int) -> None:
        super().__init__(config, heads=heads, dim=dim)
        self.out = per_head(heads, 2 * dim, 1)

    def score(self, x: Tensor, window: int) -> Tensor:
        return project(x, self.out)[..., 0]


class MLP(Scorer):
    """Scores tokens by r = a . SiLU(W [k; v] + b), a network with `hidden` hidden units per kv head."""

    def __init__(self, config: MLPConfig, *, heads: int, dim: int) -> None:
        super().__init__(config, heads=heads, dim=dim)
        width = config.hidden or 2 * dim
        self.inner = per_head(heads, 2 * dim, width, scale=(2 * dim) ** -0.5)
        self.bias = per_head(heads, 1, width)
        self.out = per_head(heads, width, 1)

    def score(self, x: Tensor, window: int) -> Tensor:
        return project(F.silu(project(x, self.inner) + self.bias.float()), self.out)[..., 0]


# ---- the scorer with a memory ---------------------------------------------------------------------------------------


class MLSTM(Scorer):
    """A matrix-valued LSTM (xLSTM) over keys and values, read when a token leaves the window.

    The input x_t = [k_t; v_t] is the key and value of token t; phi(y) = [softmax(y); softmax(-y)] is the Hedgehog
    feature map. With the input gate i = exp(a_i(x)) and the forget gate f = sigmoid(a_f(x)), the memory C, z and the
    score r_u of token u under the window w are:

        C_t = f_t C_{t-1} + i_t phi(W_k x_t) (W_v x_t)^T        z_t = f_t z_{t-1} + i_t phi(W_k x_t)
        h_u = phi(W_q x_u)^T C_q / phi(W_q x_u)^T z_q,   q = u + w             the delayed readout
        r_u = a . SiLU(h_u)

    Because phi > 0, the denominator needs no guard, and a factor common to C and z cancels. The weight of token j at
    query q is exp(sum_{j < s <= q} log f_s + log i_j), up to such a factor, which is chosen to make the largest weight
    1 (the stabilised form). The kernel libraries of mLSTM normalise by max(|q . z|, exp(-m)) instead, which gives other
    results; therefore `chunkwise` is our own. There is no output gate. r has no additive constant, which would cancel.

    W_v has D / 2 columns, as in both papers, so C has D / 2 values per feature. `MLSTMConfig` describes `norm`, `skip`
    (W_s x_u is added to h_u; W_s = 0 at the start), and the D x D memory of `value: full`. Our choices, because the
    papers do not give them: initially, W_q and W_k copy the first numbers of the key, and W_v the first numbers of the
    value, with noise of 0.02; a = 0; log i = 0; the forget gate's bias goes from 3 to 6 over the kv heads, and its
    weights are 0; both gates are soft-capped at 15.
    """

    def __init__(self, config: MLSTMConfig, *, heads: int, dim: int) -> None:
        super().__init__(config, heads=heads, dim=dim)
        if dim % 2:
            raise UserError(f"scorer 'mlstm': keys must have an even number of dimensions, got {dim}")
        self.hedgehog, self.delayed = config.features == "hedgehog", config.readout == "delayed"
        self.chunk, self.softcap = config.chunk, config.softcap
        narrow = dim // 2 if self.hedgehog else dim
        self.width = dim // 2 if config.value == "half" else dim
        self.query, self.key = _reads(heads, dim, narrow, 0), _reads(heads, dim, narrow, 0)
        self.value = None if config.value == "cached" else _reads(heads, dim, self.width, dim)
        self.gates = per_head(heads, 2 * dim, 2)
        self.forget_bias = nn.Parameter(torch.linspace(3.0, 6.0, heads))
        self.scale = nn.Parameter(torch.ones(heads, 1, self.width)) if config.norm else None
        self.skip = per_head(heads, 2 * dim, self.width) if config.skip else None
        self.out = per_head(heads, self.width, 1)

    def memory(self) -> dict[str, Tensor]:
        return vars(State.empty((self.heads,), self.dim, self.width))

    def read(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None
    ) -> Tensor:
        state, parts, query = State(**memory), self.parts(x), self.asks(asked)
        if x.shape[2] == 1 and lengths is None:
            state.write(*(part[:, :, 0] for part in vars(parts).values()))
            read = state.read(query[:, :, 0])[:, :, None]
        else:
            if lengths is not None:  # padding tokens write nothing to the memory, and the memory forgets nothing
                padding = (torch.arange(x.shape[2], device=x.device) >= lengths[:, None])[:, None]
                parts.log_input = parts.log_input.masked_fill(padding, float("-inf"))
                parts.log_forget = parts.log_forget.masked_fill(padding, 0.0)
            read, state = chunkwise(state, query, parts, self.chunk)
        for name, value in vars(state).items():
            memory[name].copy_(value)
        return self.rate(read, asked)

    def score(self, x: Tensor, window: int) -> Tensor:
        delay = window if self.delayed else 0
        length = x.shape[2]
        if delay >= length:
            return x.new_zeros(x.shape[:3]) + 0.0 * sum(weight.sum() for weight in self.parameters())  # gradients
        query = F.pad(self.asks(x[:, :, : length - delay]), (0, 0, delay, 0))  # index q holds the query of u = q - w
        empty = State.empty(x.shape[:2], self.dim, self.width, x.device)
        read, _ = chunkwise(empty, query, self.parts(x), self.chunk)
        return F.pad(self.rate(read[:, :, delay:], x[:, :, : length - delay]), (0, delay))

    def parts(self, x: Tensor) -> Parts:
        log_input, forget = project(x, self.gates).unbind(-1)
        forget = forget + self.forget_bias.float()[:, None]
        value = x[..., self.dim :] if self.value is None else project(x, self.value)
        log_forget = F.logsigmoid(self._capped(forget))
        return Parts(self._features(project(x, self.key)), value, self._capped(log_input), log_forget)

    def asks(self, x: Tensor) -> Tensor:
        """Return the memory query of each token x [B, Hkv, S, 2 D]: [B, Hkv, S, F], all positive."""
        return self._features(project(x, self.query))

    def rate(self, read: Tensor, x: Tensor) -> Tensor:
        """Return the scores [B, Hkv, S] of tokens x [B, Hkv, S, 2 D], from their readouts `read` [B, Hkv, S, V]."""
        if self.skip is not None:
            read = read + project(x, self.skip)
        if self.scale is not None:
            read = F.rms_norm(read, read.shape[-1:]) * self.scale.float()
        return project(F.silu(read), self.out)[..., 0]

    def _capped(self, gate: Tensor) -> Tensor:
        return gate if self.softcap is None else self.softcap * (gate / self.softcap).tanh()

    def _features(self, y: Tensor) -> Tensor:
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1) if self.hedgehog else y.softmax(-1)


@dataclass
class Parts:
    """Data that tokens write into the memory."""

    key: Tensor  # [B, H, S, F], all positive
    value: Tensor  # [B, H, S, V]
    log_input: Tensor  # [B, H, S], logarithm of the input gate
    log_forget: Tensor  # likewise, of the forget gate


@dataclass
class State:
    """The LSTM's state of B sequences; its size does not grow."""

    memory: Tensor  # [B, H, F, V + 1], C and, as the last column, z; both are divided by exp(top)
    # float64 [B, H], log of the largest weight; float64, because the logs of the gates add up over a whole sequence
    top: Tensor

    @classmethod
    def empty(cls, shape: Sequence[int], features: int, width: int, device: torch.device | str = "cpu") -> State:
        """Return the state of an empty memory for a shape [B, H], or [H] for one sequence."""
        top = torch.full(tuple(shape), EMPTY, dtype=torch.float64, device=device)
        return cls(torch.zeros(*shape, features, width + 1, device=device), top)

    def write(self, key: Tensor, value: Tensor, log_input: Tensor, log_forget: Tensor) -> None:
        """Write one token per sequence into the memory: key [B, H, F], value [B, H, V], logs of the gates [B, H]."""
        kept = self.top + log_forget
        top = torch.maximum(kept, log_input)
        value = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
        new = key[..., None] * value[..., None, :] * (log_input - top).exp().float()[..., None, None]
        self.memory = self.memory * (kept - top).exp().float()[..., None, None] + new
        self.top = top

    def read(self, query: Tensor) -> Tensor:
        """Return the readout q^T C / q^T z, [B, H, V], of one query q per sequence, [B, H, F]."""
        total = (query[..., None, :] @ self.memory)[..., 0, :]
        return total[..., :-1] / total[..., -1:].clamp(min=TINY)


def chunkwise(state: State, query: Tensor, parts: Parts, chunk: int) -> tuple[Tensor, State]:
    """Return the readouts q_t^T C_t / q_t^T z_t for all t, float32 [B, H, S, V], and the state after the last token.

    A query reads the tokens of its own chunk of `chunk` tokens one by one, and earlier chunks through the state before
    its chunk. The time is O(S chunk + S^2 / chunk^2). `query` is [B, H, S, F], one query q_t per token.
    """
    length = query.shape[2]
    pad = -length % chunk
    # in C and z at t, divided by exp(sum of log f up to t), token j has the weight exp(weight_j)
    forgotten = parts.log_forget.double().cumsum(-1)
    weight = F.pad(parts.log_input.double() - forgotten, (0, pad), value=float("-inf"))
    weight = weight.unflatten(-1, (-1, chunk))  # [B, H, N, c]: N chunks of c tokens
    value = torch.cat([parts.value, torch.ones_like(parts.value[..., :1])], dim=-1)  # z is C's last column
    query, key, value = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk)) for x in (query, parts.key, value))

    detached = weight.detach()  # only used for scaling, which cancels, so it needs no gradient
    tops = detached.amax(-1).clamp(min=EMPTY)  # [B, H, N]; a chunk of padding would have -inf
    scaled = key * (weight - tops[..., None]).exp().float()[..., None]
    written = torch.cat([state.memory[:, :, None], scaled.transpose(-1, -2) @ value], dim=2)  # [B, H, 1 + N, F, V + 1]
    tops = torch.cat([state.top[..., None], tops], dim=-1)
    top = tops.cummax(-1).values  # the largest before each chunk, then the largest of all
    count = tops.shape[-1]
    up_to = torch.ones(count, count, dtype=torch.bool, device=tops.device).tril()
    share = (tops[..., None, :] - top[..., None]).masked_fill(~up_to, float("-inf")).exp().float()
    states = (share @ written.flatten(-2)).unflatten(-1, written.shape[-2:])  # before each chunk, divided by exp(top)

    before = top[..., :-1]
    largest = torch.maximum(detached.cummax(-1).values, before[..., None])  # [B, H, N, c], up to each token
    past = (query @ states[:, :, :-1]) * (before[..., None] - largest).exp().float()[..., None]
    up_to = torch.ones(chunk, chunk, dtype=torch.bool, device=tops.device).tril()
    within = (weight[..., None, :] - largest[..., None]).masked_fill(~up_to, float("-inf")).exp().float()
    total = past + ((query @ key.transpose(-1, -2)) * within) @ value
    read = (total[..., :-1] / total[..., -1:].clamp(min=TINY)).flatten(2, 3)[:, :, :length]
    return read, State(states[:, :, -1], top[..., -1] + forgotten[..., -1])


def _reads(heads: int, dim: int, width: int, first: int) -> nn.Parameter:
    """Return a projection [Hkv, 2 D, width] that copies `width` numbers of [k; v] from index `first` on, with noise."""
    weight = torch.randn(heads, 2 * dim, width) * NOISE
    weight[:, first : first + width] += torch.eye(width)
    return nn.Parameter(weight)


# ---- making a scorer ------------------------------------------------------------------------------------------------

SCORERS: dict[str, type[Scorer]] = {"recency": Recency, "linear": Linear, "mlp": MLP, "mlstm": MLSTM}
"""The class of each scorer, by its name in recipes."""


def make_scorer(scorer: Any, *, heads: int, dim: int) -> Scorer:
    """Make the scorer of one layer with `heads` kv heads, whose keys and values have `dim` dimensions, from its
    settings, its name, or {name: ..., its parameters}.
    """
    config = ScorerConfig.from_block(scorer)
    return SCORERS[config.name](config, heads=heads, dim=dim)


def sketch_scorer(scorer: Any, *, heads: int, dim: int) -> Scorer:
    """Make a scorer on the meta device, without memory for its parameters and without drawing random numbers."""
    with torch.device("meta"):
        return make_scorer(scorer, heads=heads, dim=dim)


class StackedScorers:
    """The scorers of L layers with Hkv kv heads, for an engine that runs one layer, or all of them together.

    One scorer per layer (`of_layer`) and one for all L x Hkv heads (`all`) share the memory of the weights.
    """

    def __init__(self, config: ScorerConfig, layers: int, heads: int, dim: int, device: torch.device) -> None:
        self.heads, self.device = heads, device
        self.log_decay: Tensor
        self.all: Scorer = sketch_scorer(config, heads=layers * heads, dim=dim).to_empty(device=device)
        self.all.requires_grad_(False)
        self.of_layer = [sketch_scorer(config, heads=heads, dim=dim) for _ in range(layers)]
        for layer, scorer in enumerate(self.of_layer):
            for name, weight in self.all.named_parameters():
                layer_weight = weight[layer * heads : (layer + 1) * heads]
                setattr(scorer, name, nn.Parameter(layer_weight, requires_grad=False))

    def load(self, weights: Mapping[str, Tensor], own: slice) -> None:
        """Load the weights of all layers' scorers, and compute `log_decay` [L, Hkv], the log of each head's decay.

        weights : name in cache_scorer.safetensors (layer number, ".", parameter name) -> weight [all kv heads, ...]
        own : the heads to take
        """
        parameters = self.by_name()
        if parameters.keys() != weights.keys():
            differing = ", ".join(sorted(parameters.keys() ^ weights.keys())[:3])
            raise UserError(f"the weights do not have the names of the scorers' parameters: {differing} differ")
        for name, weight in parameters.items():
            weight.copy_(weights[name][own])
        self.log_decay = torch.stack([scorer.log_decay() for scorer in self.of_layer]).to(self.device)

    def by_name(self) -> dict[str, Tensor]:
        """Return the parameters by their names in cache_scorer.safetensors."""
        return {f"{i}.{name}": w for i, scorer in enumerate(self.of_layer) for name, w in scorer.named_parameters()}
