"""The settings of one-shot compaction: the `prompt_cache` block of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from sparse_rl.config import Configuration, Fraction, NonNegativeInt, PathText, Positive, PositiveInt, Rule, Seed
from sparse_rl.errors import UserError

QueryKind = Literal["context", "repeat", "self_study", "random", "window"]
OddInt = Annotated[PositiveInt, Rule("that is odd", lambda v: v % 2 == 1)]


@dataclass(frozen=True, kw_only=True)
class PromptCacheConfig(Configuration):
    """How a context is compacted once.

    policy : am, what stays gets biases and values that stand for what went; evict, it stays as it was; full, everything
        stays; none, only first and last do (the last two are baselines, and of the other keys take these two alone)
    ratio : of the context's tokens that stay; first and last do not count
    queries : the reference queries: context, those of its own tokens; repeat, those of its tokens read once more behind
        it; self_study, those of what the model writes about it; random, normal ones of the same norm; window, those of
        its last `window` tokens
    window : tokens of the query kind window, SnapKV's observation window
    select : attention, the keys that receive most of it; omp, orthogonal matching pursuit of the attention mass
    aggregate : how the attention of all reference queries to a key becomes one number: root mean square, mean or max
    pool : the attention that a key receives is averaged over so many neighbours, itself the middle one (SnapKV)
    ridge : of the values' fit, as for the policy am
    fit : ridge, or paper, the paper's own solvers
    first, last : tokens at the context's beginning and end that stay as they are (a chat template's)
    layers : equal, all layers keep as many; pyramid, the first most and the last least, as PyramidKV; the mean is ratio
    budgets : a file of head budgets (budgets.py); null: all heads of a layer keep as many
    chunk : am: of a longer context equal parts of at most so many tokens are fitted each on its own, with its share of
        what stays, in memory for reference queries x chunk numbers. If the mass and the output of every part are right,
        so are those of all: attention over all is the mixture of the parts' outputs by their masses. Where nothing is
        fitted tokens compete with those of the whole context
    most_queries : of a kv head; of more, so many are drawn
    study_samples, study_tokens : self_study: how often each of its prompts is answered, in so many tokens at most
    seed : of what is drawn: random queries, those taken of too many, and self-study
    """

    policy: Literal["am", "evict", "full", "none"] = "am"
    ratio: Fraction = 0.1
    queries: list[QueryKind] = field(default_factory=lambda: ["repeat"])
    window: PositiveInt = 32
    select: Literal["attention", "omp"] = "attention"
    aggregate: Literal["rms", "mean", "max"] = "rms"
    pool: OddInt = 1
    ridge: Positive = 1e-3
    fit: Literal["ridge", "paper"] = "ridge"
    first: NonNegativeInt = 1
    last: NonNegativeInt = 0
    layers: Literal["equal", "pyramid"] = "equal"
    budgets: PathText | None = None
    chunk: PositiveInt = 4096
    most_queries: PositiveInt = 50_000
    study_samples: PositiveInt = 4
    study_tokens: PositiveInt = 256
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chooses and not self.queries:
            raise UserError("name at least one, for example [repeat]", "queries")
        if self.pool > 1 and self.policy == "am" and self.select == "omp":
            raise UserError("select: omp has no scores to average; use select: attention, or pool: 1", "pool")
        if self.budgets is not None and self.layers == "pyramid":
            raise UserError("head budgets say what each layer keeps; use layers: equal with them", "layers")

    @property
    def chooses(self) -> bool:
        """Whether some tokens are chosen over others, for which there are reference queries."""
        return self.policy in ("am", "evict")

    def between(self, tokens: int) -> int:
        """How many of so many tokens stand between `first` and `last`. Raises UserError where there are none."""
        between = tokens - self.first - self.last
        if between < 1:
            raise UserError(f"the context has {tokens} tokens, and first + last are {self.first + self.last}", "first")
        return between

    def kept(self, tokens: int) -> int:
        """How many of those between `first` and `last` stay, in the mean over heads. Raises UserError as `between`."""
        between = self.between(tokens)
        if self.chooses:
            return max(1, round(self.ratio * between))
        return between if self.policy == "full" else 0
