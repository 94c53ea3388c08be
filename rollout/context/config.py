"""The settings of one-shot compaction: the `prompt_cache` block of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sparse_rl.config import Configuration, Fraction, NonNegativeInt, Positive, PositiveInt, Seed
from sparse_rl.errors import UserError

QueryKind = Literal["context", "repeat", "self_study", "random"]


@dataclass(frozen=True, kw_only=True)
class PromptCacheConfig(Configuration):
    """
    policy : am, what stays gets biases and values that stand for what went; evict, it stays as it was
    ratio : of the context's tokens that stay; first and last do not count
    queries : the reference queries: context, those of its own tokens; repeat, those of its tokens read once more behind
        it; self_study, those of what the model writes about it; random, normal ones of the same norm
    select : attention, the keys that receive most of it; omp, orthogonal matching pursuit of the attention mass
    aggregate : of the attention of the reference queries
    ridge : of the values' fit, as for the policy am
    fit : ridge, or paper, the paper's own solvers
    first, last : tokens at the context's beginning and end that stay as they are (a chat template's)
    most_queries : of a kv head; of more, so many are drawn
    study_samples, study_tokens : self_study: how often each of its prompts is answered, in so many tokens at most
    seed : of what is drawn
    """

    policy: Literal["am", "evict"] = "am"
    ratio: Fraction = 0.1
    queries: list[QueryKind] = field(default_factory=lambda: ["repeat"])
    select: Literal["attention", "omp"] = "attention"
    aggregate: Literal["rms", "mean", "max"] = "rms"
    ridge: Positive = 1e-3
    fit: Literal["ridge", "paper"] = "ridge"
    first: NonNegativeInt = 1
    last: NonNegativeInt = 0
    most_queries: PositiveInt = 50_000
    study_samples: PositiveInt = 4
    study_tokens: PositiveInt = 256
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.queries:
            raise UserError("name at least one, for example [repeat]", "queries")

    def kept(self, tokens: int) -> int:
        """How many of so many tokens between `first` and `last` stay. Raises UserError where there are too few."""
        between = tokens - self.first - self.last
        if between < 1:
            raise UserError(f"the context has {tokens} tokens, and first + last are {self.first + self.last}", "ratio")
        return max(1, round(self.ratio * between))
