"""kind: perplexity, the perplexity of a text over models × cache policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rollout.config import SamplingConfig
from sparse_rl.config import PathText, PositiveInt
from sparse_rl.recipe.kinds.swept import SweptRecipe


@dataclass(frozen=True, kw_only=True)
class PerplexityRecipe(SweptRecipe):
    """Perplexity of a text, decoded token by token, over models × cache policies.

    text : UTF-8 file, which is cut into pieces of prompt_tokens + completion_tokens tokens
    prompt_tokens : number of tokens of a piece that are prefilled with full attention and not counted
    completion_tokens : number of the following tokens of a piece, which are decoded under the cache
    pieces : maximum number of pieces, taken from the start of the text; null means all
    """

    kind: ClassVar[str] = "perplexity"
    wanting: ClassVar[str] = "has no text to decode; it needs kind: perplexity"
    completion_key: ClassVar[str] = "completion_tokens"
    text: PathText
    prompt_tokens: PositiveInt = 1024
    completion_tokens: PositiveInt = 1024
    pieces: PositiveInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_model_len()

    def sampling(self, samples: int = 1) -> SamplingConfig:
        return SamplingConfig(self.completion_tokens, n=samples, seed=self.seed)

    def prompt_bounds(self) -> list[int | None]:
        return [self.prompt_tokens]

    def sequences(self) -> int | None:
        return self.pieces
