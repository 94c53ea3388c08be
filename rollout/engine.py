"""What an engine is: prompts in, sampled completions with their log-probs and eviction traces out.

This file knows neither torch modules nor policies' insides; hf.py is the specification of how it is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from sparse_rl.policies import Policy
from sparse_rl.trace import EvictionTrace


@dataclass(frozen=True)
class SamplingConfig:
    """How to sample.

    temperature 0 is greedy (log-probs are then those at temperature 1). Sampling is seeded per (seed, prompt, sample
    index): the place in the batch, the batch's size and its order change nothing. seed None draws a fresh one.
    stop_token_ids None means the model's own end-of-sequence tokens (with ignore_eos none); a stop token is part of the
    completion.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    n: int = 1
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be >= 1 or null, got {self.top_k}")
        if self.n < 1:
            raise ValueError(f"n must be >= 1, got {self.n}")

    @property
    def truncated_support(self) -> bool:
        """Whether top-p or top-k cuts the distribution, so that `logprobs` differ from the model's own."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k is not None)


@dataclass
class Rollout:
    """One sampled sequence.

    logprobs : one per completion token, of the distribution that was sampled from (temperature, top-p, top-k)
    model_logprobs : the same before top-p and top-k; this is what replay is compared with
    trace : len(trace) = prompt + completion
    finish_reason : "stop" (a stop token ends the completion) or "length" (truncated)
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    model_logprobs: list[float]
    trace: EvictionTrace
    finish_reason: Literal["stop", "length"]


def check_given(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
    """What `Engine.simulate` refuses."""
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; there must be one for each")
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if not len(prompt) or not len(completion):
            what = "completion" if len(prompt) else "prompt"
            raise ValueError(f"{what} {i} is empty; it needs at least one token")


class Engine(Protocol):
    """Samples with eviction active and records every eviction.

    max_batch : sequences sampled at a time
    shares_weights : whether it samples from the caller's live module, so that nothing needs to be synchronised
    """

    policy: Policy
    max_batch: int
    shares_weights: bool

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> list[Rollout]:
        """len(prompts) * n rollouts, prompt-major. Raises ValueError on an empty prompt."""
        ...

    def simulate(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Rollout]:
        """What `generate` would have recorded, had it sampled these completions: their log-probs and evictions.

        One rollout per prompt, by the very computation of decoding. Raises ValueError on an empty prompt or completion.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace weights by their names in a Hugging Face checkpoint."""
        ...

    def close(self) -> None: ...
