"""The base of all scorers: a decay for each kv head, float32 for any dtype of the model, no gradient into the model.

gamma is learned per kv head between two bounds,

    log gamma = log gamma_min + sigmoid(alpha) (log gamma_max - log gamma_min)

and gets its gradient from the boundary loss, which compares tokens of different age.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparse_rl.methods.kvpop.scorers.config import GAMMA, DecayingConfig, ScorerConfig

NOT_DECAYED = ("alpha", "bias", "forget_bias", "scale")  # parameters without weight decay


class Scorer(nn.Module):
    """The scorer of one layer: for every kv head, it predicts how much each token matters after leaving the window.

    A subclass implements `score`, and also `read` if a score depends on more than its own token. A new scorer gives
    scores of 0, which rank by recency alone.

    Training scores all tokens of a text at once (`forward`); decoding scores one after another (`follow`). Both give
    the same scores, up to rounding.

    config : the scorer's settings (config.py)
    heads : number of kv heads
    dim : dimensions of a key, and of a value

    delayed : True if a token's score is known only when the token leaves the window, not when it is inserted
    """

    delayed: bool = False

    def __init__(self, config: ScorerConfig, *, heads: int, dim: int) -> None:
        super().__init__()
        self.config, self.heads, self.dim = config, heads, dim
        if isinstance(config, DecayingConfig):
            low, high = map(math.log, GAMMA)
            share = 0.5 if config.gamma is None else (math.log(config.gamma) - low) / (high - low)
            self.alpha = nn.Parameter(torch.full((heads,), math.log(share / (1 - share))))

    def forward(self, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """The scores of all tokens of texts, and log gamma: float32 [B, Hkv, S] and [Hkv].

        key, value : [B, Hkv, S, D], keys after RoPE, as the cache holds them; no gradient flows into them
        window : w; token u is scored as query u + w arrives, and its score may depend on all tokens up to u + w. Scores
            of tokens that never leave the window are meaningless
        """
        with torch.autocast(key.device.type, enabled=False):
            scores = self.score(torch.cat([key.detach(), value.detach()], dim=-1).float(), window)
            return scores, self.log_decay().to(scores.device)

    def score(self, x: Tensor, window: int) -> Tensor:
        """The scores of all tokens of texts: float32 [B, Hkv, S].

        x : float32 [B, Hkv, S, 2 D], [k; v] of each token
        window : w; token u is scored as query u + w arrives
        """
        raise NotImplementedError

    # ---- decoding -------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Tensor]:
        """A layer's memory of one sequence, at the start of the sequence: name -> [Hkv, ...], on the CPU."""
        return {}

    @torch.no_grad()
    def follow(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Read T tokens, and score one token as each of them arrives: float32 [R, Hkv, T].

        memory : name -> [R, Hkv, ...], updated in place
        x : [R, Hkv, T, 2 D], [k; v] of the tokens that arrive
        asked : [R, Hkv, T, 2 D], [k; v] of the tokens to score: the same tokens, or the tokens that leave the window if
            the score is delayed
        positions : int64 [R, T], positions of the tokens to score
        lengths : int64 [R], number of tokens of each row, the rest is padding; None means all T
        """
        with torch.autocast(x.device.type, enabled=False):
            return self.read(memory, x.float(), asked.float(), positions, lengths)

    def read(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None
    ) -> Tensor:
        """Implements `follow`: the same arguments and scores float32 [R, Hkv, T], with `x` and `asked` in float32.

        memory : name -> [R, Hkv, ...], updated in place; x, asked : [R, Hkv, T, 2 D]; positions : int64 [R, T]
        lengths : int64 [R]; None means all T
        """
        return self.score(asked, 0)

    def log_decay(self) -> Tensor:
        """log gamma of each kv head, float32 [Hkv] <= 0, which each step of age adds to a score."""
        low, high = (math.log(bound) for bound in GAMMA)
        return low + self.alpha.float().sigmoid() * (high - low)

    def state_bytes(self) -> int:
        """Bytes of a layer's memory of one sequence in decoding, besides the scores of the entries held."""
        return sum(value.nbytes for value in self.memory().values())


class Recency(Scorer):
    """Ranks the most recent tokens best, without parameters: StreamingLLM; a model trained with it, StreamingLLM+."""

    def score(self, x: Tensor, window: int) -> Tensor:
        return torch.arange(x.shape[2], device=x.device, dtype=torch.float32).expand(x.shape[:3])

    def read(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None
    ) -> Tensor:
        return positions[:, None].float().expand(asked.shape[:3])

    def log_decay(self) -> Tensor:
        return torch.zeros(self.heads)


def head_digests(weights: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Name -> a digest of each kv head of these parameters [Hkv, ...], as float32: equal only if all bits are equal."""
    return {
        name: [
            hashlib.blake2b(head.numpy().tobytes(), digest_size=12).hexdigest()
            for head in weight.detach().float().cpu()
        ]
        for name, weight in weights.items()
    }


def per_head(*shape: int, scale: float = 0.0) -> nn.Parameter:
    """A parameter [Hkv, ...]: zeros, or normal random numbers with this standard deviation."""
    return nn.Parameter(torch.randn(*shape) * scale if scale else torch.zeros(*shape))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [B, Hkv, S, I] by its kv head's weights, [Hkv, I, O], as float32: [B, Hkv, S, O]."""
    rows, heads, count, _ = x.shape
    by_head = x.transpose(0, 1).reshape(heads, rows * count, -1)  # broadcasting would copy the weights B times
    return (by_head @ weight.float()).view(heads, rows, count, -1).transpose(0, 1)
