"""What all scorers share: the decay of each kv head, float32 whatever the model computes in, and no gradient into it.

gamma is learned per kv head between two bounds,

    log gamma = log gamma_min + sigmoid(alpha) (log gamma_max - log gamma_min)

and gets its gradient from the boundary loss, in which two tokens of different age meet.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparse_rl.methods.kvpop.scorers.config import GAMMA, DecayingConfig, ScorerConfig

NOT_DECAYED = ("alpha", "bias", "forget_bias", "scale")  # by weight decay


class Scorer(nn.Module):
    """The scorer of one layer: how much each token will matter once it has left the window, for every kv head.

    A subclass writes `score`, and `read` where a score depends on more than its token; all of it starts at a score of
    0, which ranks by recency alone.

    Training scores all tokens of a text at once (`forward`), decoding one after another (`follow`). Both give the same
    scores, but for rounding.

    config : its settings (config.py)
    heads : kv heads
    dim : of a key, and of a value

    delayed : a token's score is known only as it leaves the window, not yet as it is inserted
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
        window : w; token u is scored as query u + w arrives, and may depend on the tokens up to there. Tokens that
            never leave the window have a score of no meaning.
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
        """What a layer remembers of one sequence, as that begins: name -> [Hkv, ...], on the CPU."""
        return {}

    @torch.no_grad()
    def follow(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Take in T tokens, and score one token as each of them arrives: float32 [R, Hkv, T].

        memory : name -> [R, Hkv, ...], updated in place
        x : [k; v] of the tokens that arrive, [R, Hkv, T, 2 D]
        asked : of those that are scored: the same, or where the score is delayed those that leave the window
        positions : int64 [R, T], of those that are scored
        lengths : int64 [R], the tokens of each row; what stands behind them is padding. None: all T
        """
        with torch.autocast(x.device.type, enabled=False):
            return self.read(memory, x.float(), asked.float(), positions, lengths)

    def read(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None
    ) -> Tensor:
        """What `follow` gives, float32 [R, Hkv, T], of the same arguments, `x` and `asked` in float32.

        memory : name -> [R, Hkv, ...], updated in place; x, asked : [R, Hkv, T, 2 D]; positions : int64 [R, T]
        lengths : int64 [R]; None: all T
        """
        return self.score(asked, 0)

    def log_decay(self) -> Tensor:
        """log gamma of each kv head, float32 [Hkv] <= 0: what each step of age adds to a score."""
        low, high = (math.log(bound) for bound in GAMMA)
        return low + self.alpha.float().sigmoid() * (high - low)

    def state_bytes(self) -> int:
        """Bytes that one layer remembers of one sequence in decoding, beside the scores of the entries held."""
        return sum(value.nbytes for value in self.memory().values())


class Recency(Scorer):
    """No parameters: the most recent tokens rank best, which is StreamingLLM. Trained so, it is StreamingLLM+."""

    def score(self, x: Tensor, window: int) -> Tensor:
        return torch.arange(x.shape[2], device=x.device, dtype=torch.float32).expand(x.shape[:3])

    def read(
        self, memory: dict[str, Tensor], x: Tensor, asked: Tensor, positions: Tensor, lengths: Tensor | None
    ) -> Tensor:
        return positions[:, None].float().expand(asked.shape[:3])

    def log_decay(self) -> Tensor:
        return torch.zeros(self.heads)


def head_digests(weights: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Name -> a digest of each kv head of these parameters [Hkv, ...], as float32: equal only where all bits are."""
    return {
        name: [
            hashlib.blake2b(head.numpy().tobytes(), digest_size=12).hexdigest()
            for head in weight.detach().float().cpu()
        ]
        for name, weight in weights.items()
    }


def per_head(*shape: int, scale: float = 0.0) -> nn.Parameter:
    """A parameter [Hkv, ...]: zeros, or normal numbers of this scale."""
    return nn.Parameter(torch.randn(*shape) * scale if scale else torch.zeros(*shape))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, Hkv, S, I] times the weights of its kv head, [Hkv, I, O], as float32: [B, Hkv, S, O]."""
    rows, heads, count, _ = x.shape
    by_head = x.transpose(0, 1).reshape(heads, rows * count, -1)  # a product that broadcasts copies the weights B times
    return (by_head @ weight.float()).view(heads, rows, count, -1).transpose(0, 1)
