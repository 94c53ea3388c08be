"""What all scorers share: the decay of each kv head, float32 whatever the model computes in, and no gradient into it.

gamma is learned per kv head between two bounds,

    log gamma = log gamma_min + sigmoid(alpha) (log gamma_max - log gamma_min)

and gets its gradient from the boundary loss, in which two tokens of different age meet.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sparse_rl.scorers.config import GAMMA, DecayingConfig, ScorerConfig

NOT_DECAYED = ("alpha", "bias", "forget_bias", "scale")  # by weight decay


class Scorer(nn.Module):
    """Of one layer. A subclass writes `score`; all of it starts at a score of 0, which ranks by recency alone.

    Parameters
    ----------
    config : its settings (config.py)
    heads : kv heads
    dim : of a key, and of a value
    """

    def __init__(self, config: ScorerConfig, *, heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        if isinstance(config, DecayingConfig):
            low, high = map(math.log, GAMMA)
            share = 0.5 if config.gamma is None else (math.log(config.gamma) - low) / (high - low)
            self.alpha = nn.Parameter(torch.full((heads,), math.log(share / (1 - share))))

    def forward(self, key: torch.Tensor, value: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, log gamma): float32 [B, Hkv, S], [Hkv].

        key, value : [B, Hkv, S, D], keys after RoPE, as the cache holds them; no gradient flows into them
        window : w; token u is scored as query u + w arrives, and may depend on the tokens up to there. Tokens that
            never leave the window have a score of no meaning.
        """
        with torch.autocast(key.device.type, enabled=False):
            scores = self.score(torch.cat([key.detach(), value.detach()], dim=-1).float(), window)
            return scores, self.log_decay().to(scores.device)

    def score(self, x: torch.Tensor, window: int) -> torch.Tensor:
        """[B, Hkv, S, 2 D] -> [B, Hkv, S]"""
        raise NotImplementedError

    def log_decay(self) -> torch.Tensor:
        low, high = (math.log(bound) for bound in GAMMA)
        return low + self.alpha.float().sigmoid() * (high - low)

    def state_bytes(self) -> int:
        """Of one sequence in decoding, beside the scores of the entries held."""
        return 0


class Recency(Scorer):
    """No parameters: the most recent tokens rank best, which is StreamingLLM. Trained so, it is StreamingLLM+."""

    def score(self, x: torch.Tensor, window: int) -> torch.Tensor:
        return torch.arange(x.shape[2], device=x.device, dtype=torch.float32).expand(x.shape[:3])

    def log_decay(self) -> torch.Tensor:
        return torch.zeros(self.heads)


def per_head(*shape: int, scale: float = 0.0) -> nn.Parameter:
    """A parameter [Hkv, ...]: zeros, or normal numbers of this scale."""
    return nn.Parameter(torch.randn(*shape) * scale if scale else torch.zeros(*shape))


def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[B, Hkv, S, I] by a head's [Hkv, I, O]: [B, Hkv, S, O]."""
    return x @ weight.float()
