"""The scorer with a memory: a matrix-valued LSTM (xLSTM) over keys and values, read when a token leaves the window.

The input x_t = [k_t; v_t] is the key and value of token t; phi(y) = [softmax(y); softmax(-y)] is the Hedgehog feature
map. With the input gate i = exp(a_i(x)) and the forget gate f = sigmoid(a_f(x)), the memory C, z and the score r_u of
token u under the window w are:

    C_t = f_t C_{t-1} + i_t phi(W_k x_t) (W_v x_t)^T        z_t = f_t z_{t-1} + i_t phi(W_k x_t)
    h_u = phi(W_q x_u)^T C_q / phi(W_q x_u)^T z_q,   q = u + w             the delayed readout
    r_u = a . SiLU(h_u)

Because phi > 0, the denominator needs no guard, and a factor common to C and z cancels. The weight of token j at query
q is exp(sum_{j < s <= q} log f_s + log i_j), up to such a factor, which is chosen to make the largest weight 1 (the
stabilised form). The kernel libraries of mLSTM normalise by max(|q . z|, exp(-m)) instead, which gives other results;
therefore this module contains its own chunkwise form. There is no output gate. r has no additive constant, because a
constant would cancel in every comparison.

Two settings are off by default. `norm` is an RMS norm of h_u per kv head; it is optional in equation 42 of the full
paper, and absent from equation 11 of that paper and from appendix F of the workshop paper. `skip` adds W_s x_u to h_u,
with W_s = 0 at the start. W_v has D / 2 columns, as in both papers, so C has D / 2 values per feature. Section 2 of
the workshop paper also writes a D x D memory, which `value: full` gives.

Our choices, because the papers do not give them: initially, W_q and W_k copy the first numbers of the key, and W_v the
first numbers of the value, with noise of 0.02; a = 0; log i = 0 (a constant cancels); the forget gate's bias goes from
3 to 6 over the kv heads, and its weights are 0; both gates are soft-capped at 15 (`softcap: null` turns this off).

Sizes in shapes: B sequences, H or Hkv kv heads, S tokens, D dimensions of a key, F features, V numbers of a memory's
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.scorers.base import Scorer, per_head, project
from sparse_rl.methods.kvpop.scorers.config import MLSTMConfig

NOISE = 0.02
TINY = torch.finfo(torch.float32).tiny
EMPTY = -1e30  # log of the largest weight in an empty memory; finite, because -inf - -inf is NaN


class MLSTM(Scorer):
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
        """Return the data that the tokens x [B, Hkv, S, 2 D] write into the memory."""
        log_input, forget = project(x, self.gates).unbind(-1)
        forget = forget + self.forget_bias.float()[:, None]
        value = x[..., self.dim :] if self.value is None else project(x, self.value)
        return Parts(
            self._features(project(x, self.key)), value, self._capped(log_input), F.logsigmoid(self._capped(forget))
        )

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
    """Data that tokens write into the memory.

    key, value : [B, H, S, F], all positive, and [B, H, S, V]
    log_input, log_forget : [B, H, S], logarithms of the gates
    """

    key: Tensor
    value: Tensor
    log_input: Tensor
    log_forget: Tensor


@dataclass
class State:
    """The LSTM's state of B sequences; its size does not grow.

    memory : [B, H, F, V + 1], C and, as the last column, z; both are divided by exp(top)
    top : float64 [B, H], log of the largest weight; float64, because the logs of the gates add up over a whole sequence
    """

    memory: Tensor
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
    """Return a projection [Hkv, 2 D, width] of [k; v].

    At the start it copies `width` numbers of [k; v], from index `first` on, and adds noise.
    """
    weight = torch.randn(heads, 2 * dim, width) * NOISE
    weight[:, first : first + width] += torch.eye(width)
    return nn.Parameter(weight)
