"""Settings of one-shot compaction: the `prompt_cache` block of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from sparse_rl.config import Configuration, Fraction, NonNegativeInt, PathText, Positive, PositiveInt, Rule, Seed
from sparse_rl.errors import UserError

QueryKind = Literal["context", "repeat", "self_study", "random", "window"]
OddInt = Annotated[PositiveInt, Rule("that is odd", lambda v: v % 2 == 1)]


@dataclass(frozen=True, kw_only=True)
class PromptCacheConfig(Configuration):
    """Settings of the one-time compaction of a context.

    policy : am, the kept entries get biases and values that stand for the evicted ones; evict, the kept entries do not
        change; full, everything is kept; none, only the first `first` and the last `last` tokens are kept. full and
        none are baselines, and use no other settings than first and last
    ratio : share of the context's tokens that is kept, not counting its first `first` and last `last` tokens
    queries : kinds of reference queries: context, queries of the context's tokens; repeat, queries of the same tokens
        when the model reads the context a second time, after the first; self_study, queries of the model's answers to
        prompts about the context; random, normally distributed queries with the mean norm of the context's queries,
        without the model's query norm; window, queries of the context's last `window` tokens
    window : number of tokens of the query kind window (SnapKV's observation window)
    select : attention, the keys that receive the most attention; omp, orthogonal matching pursuit of the attention
        mass, whose keys evict keeps without biases and new values
    aggregate : statistic of the attention of all reference queries to a key: root mean square, mean or max
    pool : number of neighbouring keys, centred on the key itself, over which its attention is averaged (SnapKV)
    ridge : weight that pulls the fitted values towards the old values, in units of the attention's mean square
    fit : ridge fits by ridge regression; paper uses the paper's own solvers
    first, last : number of tokens at the context's beginning and end that are kept unchanged (a chat template's tokens)
    layers : equal, every layer keeps the same number of entries; pyramid, the number falls from the first layer to the
        last, as in PyramidKV, with ratio as the mean
    budgets : path of a file of head budgets (budgets.py); None means that all heads of a layer keep the same number
    chunk : am fits a longer context in equal parts of at most this many tokens, each part separately and with its share
        of the kept entries; a fit needs memory for (number of reference queries) x chunk numbers. If mass and output of
        attention are right in every part, they are right for the whole context, whose output is the mean of the parts'
        outputs, weighted by mass. Every part uses the same reference queries. Under evict all tokens of the context
        compete with each other, except with select: omp, which chooses in the same parts as am
    most_queries : maximum number of reference queries of a kv head; if there are more, a random subset is used
    study_samples, study_tokens : for self_study, the number of answers to each prompt, and their maximum length in
        tokens
    seed : seed of random queries, of the subset of queries and of self-study
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
        if self.pool > 1 and self.chooses and self.select == "omp":
            raise UserError("select: omp has no scores to average; use select: attention, or pool: 1", "pool")
        if self.budgets is not None and self.layers == "pyramid":
            raise UserError("head budgets already set how much each layer keeps; use layers: equal with them", "layers")

    @property
    def chooses(self) -> bool:
        """True if the policy selects tokens, for which it needs reference queries."""
        return self.policy in ("am", "evict")

    @property
    def in_parts(self) -> bool:
        """True if the tokens of a long context compete in parts of at most `chunk` tokens."""
        return self.policy == "am" or (self.policy == "evict" and self.select == "omp")

    def between(self, tokens: int) -> int:
        """Return the number of a context's tokens without its first `first` and its last `last` ones.

        tokens : length of the context

        Raises UserError if there are no tokens in between.
        """
        between = tokens - self.first - self.last
        if between < 1:
            raise UserError(f"the context has {tokens} tokens, but first + last are {self.first + self.last}", "first")
        return between

    def kept(self, tokens: int) -> int:
        """Return the mean number of entries that a kv head keeps, without the first `first` and the last `last` ones.

        tokens : length of the context

        Raises UserError if the context is no longer than `first` + `last`.
        """
        between = self.between(tokens)
        if self.chooses:
            return max(1, round(self.ratio * between))
        return between if self.policy == "full" else 0
