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
        prompts about the context; random, normally distributed queries with the mean norm of the context's queries
        (the model's own query norm is not applied); window, queries of the context's last `window` tokens
    window : number of tokens of the query kind window (SnapKV's observation window)
    select : attention keeps the keys that receive the most attention; omp chooses keys by orthogonal matching pursuit
        of the attention mass; omp_fast is omp with 8 keys in a step, which takes less time (AM-OMP-fast)
    aggregate : statistic of the attention of all reference queries to a key: root mean square, mean or max
    pool : the attention to a key is averaged over this number of neighbouring keys, centred on that key (SnapKV)
    ridge : weight that pulls the fitted values towards the old values, in units of the attention's mean square
    fit : ridge fits by ridge regression; paper uses the paper's own solvers
    first, last : number of tokens at the context's beginning and end that are kept unchanged (a chat template's)
    layers : equal, every layer keeps the same number of entries; pyramid, the number falls from the first layer to the
        last, as in PyramidKV, and `ratio` sets the mean over the layers
    budgets : path of a file of head budgets (budgets.py); None means that all heads of a layer keep the same number
    chunk : am divides a longer context into equal parts of at most this number of tokens. Each part is fitted
        separately, with the same reference queries, and keeps its share of the entries. A fit needs memory for
        (number of reference queries) x chunk numbers. The attention output of the whole context is the mean of the
        parts' outputs, weighted by mass; so if mass and output are right in every part, they are right for the whole
        context. Under evict, all tokens of the context compete with each other; with omp and omp_fast, they compete in parts
    most_queries : maximum number of reference queries of a kv head; if there are more, a random subset is used
    study_samples, study_tokens : for self_study, the number of answers to each prompt, and their maximum length in
        tokens
    seed : seed of random queries, of the subset of queries and of self-study
    """

    policy: Literal["am", "evict", "full", "none"] = "am"
    ratio: Fraction = 0.1
    queries: list[QueryKind] = field(default_factory=lambda: ["repeat"])
    window: PositiveInt = 32
    select: Literal["attention", "omp", "omp_fast"] = "attention"
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
            raise UserError("name at least one kind of queries, for example [repeat]", "queries")
        if self.pool > 1 and self.chooses and self.pursues:
            wrong = f"select: {self.select} has no scores to average"
            raise UserError(f"{wrong}; use select: attention, or pool: 1", "pool")
        if self.budgets is not None and self.layers == "pyramid":
            raise UserError("head budgets already set how much each layer keeps; use layers: equal with them", "layers")

    @property
    def chooses(self) -> bool:
        """True if the policy selects tokens, for which it needs reference queries."""
        return self.policy in ("am", "evict")

    @property
    def pursues(self) -> bool:
        """True if keys are chosen by orthogonal matching pursuit."""
        return self.select != "attention"

    @property
    def in_parts(self) -> bool:
        """True if the tokens of a long context compete in parts of at most `chunk` tokens."""
        return self.policy == "am" or (self.policy == "evict" and self.pursues)

    def between(self, tokens: int) -> int:
        """Return the number of tokens between the first `first` and the last `last` tokens of a context.

        tokens : length of the context

        Raises UserError if there are no tokens in between.
        """
        between = tokens - self.first - self.last
        if between < 1:
            raise UserError(
                f"the context has {tokens} tokens, but first + last is {self.first + self.last}; lower one of them",
                "first",
            )
        return between

    def kept(self, tokens: int) -> int:
        """Return the mean number of entries that a kv head keeps between the first `first` and the last `last` ones.

        tokens : length of the context

        Raises UserError if the context has at most `first` + `last` tokens.
        """
        between = self.between(tokens)
        if self.chooses:
            return max(1, round(self.ratio * between))
        return between if self.policy == "full" else 0
