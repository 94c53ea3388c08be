"""The base class of all scorers. Scorers compute in float32 for any dtype of the model; no gradient reaches the model.

Scores decay with age, at a rate gamma. A number alpha, learned for each kv head, sets gamma between two bounds:

    log gamma = log gamma_min + sigmoid(alpha) (log gamma_max - log gamma_min)

The gradient of alpha comes from the boundary loss, which compares the decayed scores of tokens of different age.

Sizes in shapes: B or R rows (sequences), Hkv kv heads, S or T tokens, D dimensions of a key and of a value.
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

    A subclass implements `score`; it also implements `read` if the score of a token depends on other tokens. An
    untrained scorer gives all tokens the score 0, so that they are ranked by recency alone. `forward` scores all tokens
    of a text, for training; `follow` scores one token after another, for decoding. Both give the same scores, up to
    rounding.

    config : the scorer's settings (config.py)
    heads : number of kv heads
    dim : dimensions of a key, and of a value
    delayed : True if a token's score is known only when the token leaves the window, not when it arrives
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
        """Return the scores of all tokens of the texts, float32 [B, Hkv, S], and log gamma of each kv head, [Hkv].

        key, value : [B, Hkv, S, D], keys after RoPE, as the cache holds them; no gradient flows into them
        window : w; token u is scored when query u + w arrives, and its score may depend on all tokens up to u + w. The
            scores of tokens that never leave the window are meaningless
        """
        with torch.autocast(key.device.type, enabled=False):
            scores = self.score(torch.cat([key.detach(), value.detach()], dim=-1).float(), window)
            return scores, self.log_decay().to(scores.device)

    def score(self, x: Tensor, window: int) -> Tensor:
        """Return the scores of all tokens of the texts: float32 [B, Hkv, S].

        x : float32 [B, Hkv, S, 2 D], key and value of each token, concatenated
        window : w; token u is scored when query u + w arrives
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
        """Do the work of `follow`, without autocast: return the scores, float32 [R, Hkv, T].

        `memory` is name -> [R, Hkv, ...]; x and asked are float32 [R, Hkv, T, 2 D]; positions is int64 [R, T]; lengths
        is int64 [R] or None.
        """
        return self.score(asked, 0)

    def log_decay(self) -> Tensor:
        """Return log gamma of each kv head, float32 [Hkv], <= 0. Each step of age adds log gamma to a token's score."""
        low, high = (math.log(bound) for bound in GAMMA)
        return low + self.alpha.float().sigmoid() * (high - low)

    def state_bytes(self) -> int:
        """Return the bytes of a layer's memory of one sequence in decoding, without the scores of the entries."""
        return sum(value.nbytes for value in self.memory().values())


class Recency(Scorer):
    """Ranks the most recent tokens best, without parameters.

    A cache under this scorer is StreamingLLM; a model trained under such a cache is the baseline StreamingLLM+.
    """

    def score(self, x: Tensor, window: int) -> Tensor:
        return torch.arange(x.shape[2], device=x.device, dtype=torch.float32).expand(x.shape[:3])

    def read(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None
    ) -> Tensor:
        return positions[:, None].float().expand(asked.shape[:3])

    def log_decay(self) -> Tensor:
        return torch.zeros(self.heads)


def head_digests(weights: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the digests of named parameters of shape [Hkv, ...]: name -> one digest for each kv head.

    Two digests are equal only if all bits of the heads' parameters are equal in float32.
    """
    return {
        name: [
            hashlib.blake2b(head.numpy().tobytes(), digest_size=12).hexdigest()
            for head in weight.detach().float().cpu()
        ]
        for name, weight in weights.items()
    }


def per_head(*shape: int, scale: float = 0.0) -> nn.Parameter:
    """Return a parameter of shape [Hkv, ...]: normal random numbers times `scale`; zeros if `scale` is 0."""
    return nn.Parameter(torch.randn(*shape) * scale if scale else torch.zeros(*shape))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [B, Hkv, S, I] by the weights [Hkv, I, O] of each kv head, in float32. Returns [B, Hkv, S, O]."""
    rows, heads, count, _ = x.shape
    by_head = x.transpose(0, 1).reshape(heads, rows * count, -1)  # broadcasting would copy the weights B times
    return (by_head @ weight.float()).view(heads, rows, count, -1).transpose(0, 1)
