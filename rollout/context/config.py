"""Settings of one-shot compaction: the `prompt_cache` block of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from sparse_rl.config import Configuration, Fraction, NonNegativeInt, PathText, Positive, PositiveInt, Rule, Seed
from sparse_rl.errors import UserError

RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)  # of sensitivity curves; at ratio 0 a head keeps one entry
BASE = 0.05  # ratio of all other heads
QueryKind = Literal["context", "repeat", "self_study", "random", "window"]
ON_POLICY = {"repeat", "self_study"}  # kinds of queries whose texts continue the context, and see its compacted entries
OddInt = Annotated[PositiveInt, Rule("that is odd", lambda v: v % 2 == 1)]


@dataclass(frozen=True)
class Part:
    """Tokens `start` to `end` of the `between` tokens of a context that compete, counted from the first of them."""

    start: int
    end: int
    between: int

    def share(self, count: int) -> int:
        """Return the number of entries that the part keeps if all parts together keep `count`."""
        return count * self.end // self.between - count * self.start // self.between


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
    on_policy : True computes the queries of repeat and self_study in each layer while the layers below it are compacted
        already (AM section 3.1, C.4). One pass over these texts computes queries and compacts; it is repeated for each
        ratio. The texts of self-study are sampled with the full cache. Other kinds of queries do not change
    chunk : am divides a longer context into equal parts of at most this number of tokens. Each part is fitted
        separately, with the same reference queries, and keeps its share of the entries. A fit needs memory for
        (number of reference queries) x chunk numbers. The attention output of the whole context is the mean of the
        parts' outputs, weighted by mass; so if mass and output are right in every part, they are right for the whole
        context. Under evict, all tokens of the context compete with each other; with omp and omp_fast, they compete in
        parts
    chunking : kv, a long context is read as a whole, and its entries are divided into parts; text, each part of its
        tokens is read alone, between the first `first` and the last `last` tokens, with reference queries of its own,
        and is compacted alone, also under evict. RoPE then turns the kept keys to their positions in the context (AM
        section 3.5, C.3)
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
    on_policy: bool = False
    chunk: PositiveInt = 4096
    chunking: Literal["kv", "text"] = "kv"
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
        if self.on_policy and self.chooses and ON_POLICY.isdisjoint(self.queries):
            wrong = "only queries of repeat and self_study can be on-policy"
            raise UserError(f"{wrong}; add one of them to queries, or use on_policy: false", "on_policy")
        if self.on_policy and self.by_text:
            raise UserError("queries cannot be on-policy with chunking: text; use chunking: kv", "on_policy")

    @property
    def chooses(self) -> bool:
        """True if the policy selects tokens, for which it needs reference queries."""
        return self.policy in ("am", "evict")

    @property
    def pursues(self) -> bool:
        """True if keys are chosen by orthogonal matching pursuit."""
        return self.select != "attention"

    @property
    def by_text(self) -> bool:
        """True if the parts of a long context are read separately."""
        return self.chooses and self.chunking == "text"

    @property
    def in_parts(self) -> bool:
        """True if the tokens of a long context compete in parts of at most `chunk` tokens."""
        return self.by_text or self.policy == "am" or (self.policy == "evict" and self.pursues)

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

    def parts(self, tokens: int) -> list[Part]:
        """Return the equal parts in which the tokens between the first `first` and the last `last` ones compete.

        tokens : length of the context

        Raises UserError if the context has at most `first` + `last` tokens.
        """
        between = self.between(tokens)
        number = math.ceil(between / self.chunk) if self.in_parts else 1
        return [Part(between * n // number, between * (n + 1) // number, between) for n in range(number)]

    def kept(self, tokens: int) -> int:
        """Return the mean number of entries that a kv head keeps between the first `first` and the last `last` ones.

        tokens : length of the context

        Raises UserError if the context has at most `first` + `last` tokens.
        """
        between = self.between(tokens)
        if self.chooses:
            return max(1, round(self.ratio * between))
        return between if self.policy == "full" else 0
