"""Settings of one-shot compaction: the `prompt_cache` block of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from sparse_rl.config import Configuration, Fraction, NonNegativeInt, PathText, Positive, PositiveInt, Rule, Seed
from sparse_rl.errors import UserError

RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)  # of sensitivity curves; at ratio 0 a head keeps one entry
BASE = 0.05  # ratio of all other heads
QueryKind = Literal["context", "repeat", "self_study", "question", "window", "random", "random_plain"]
# Kinds of queries that a trace can record: those of the context's own tokens.
RECORDED: tuple[QueryKind, ...] = ("context", "window")
# Kinds of queries whose texts continue the context, and see its compacted entries.
ON_POLICY = {"repeat", "self_study", "question"}
SummaryKind = Literal["plain", "detailed", "for_questions", "concise", "shortest"]
OddInt = Annotated[PositiveInt, Rule("that is odd", lambda v: v % 2 == 1)]


@dataclass(frozen=True)
class Part:
    """Tokens `start` to `end` of the `between` tokens between the first and the last tokens of a context, counted from
    the first of them.
    """

    start: int
    end: int
    between: int

    def share(self, count: int) -> int:
        """Return the number of entries that the part keeps if all parts together keep `count`."""
        return count * self.end // self.between - count * self.start // self.between


@dataclass(frozen=True, kw_only=True)
class CartridgeConfig(Configuration):
    """Settings of the training of a cartridge.

    steps : number of optimiser steps
    batch : number of conversations in a step
    rate : learning rate of Adam
    """

    steps: PositiveInt = 300
    batch: PositiveInt = 8
    rate: Positive = 0.02


@dataclass(frozen=True, kw_only=True)
class PromptCacheConfig(Configuration):
    """Settings of the one-time compaction of a context.

    policy : am, the kept entries get biases and values that stand for the evicted ones; evict, the kept entries do not
        change; cartridge, entries are trained by gradient descent on the answers of self-study; full, everything is
        kept; none, only the first `first` and the last `last` tokens are kept. cartridge, full and none use first, last
        and the settings of summaries; cartridge also uses ratio and the settings of self-study
    ratio : share of the context's tokens that is kept, not counting its first `first` and last `last` tokens
    queries : kinds of reference queries: context, queries of the context's tokens; repeat, queries of an instruction to
        repeat the context, and of the tokens that compete when the model reads them a second time; self_study, queries
        of conversations about the context that the model has with itself; question, queries of one question that the
        model writes about the context; window, queries of the last `window` tokens of the context or of the part;
        random, normally distributed queries times the weights of the model's query norm, or, for a model without one,
        with the mean norm of the context's queries; random_plain, standard normal queries
    window : number of tokens of the query kind window (SnapKV's observation window)
    select : attention keeps the keys that receive the most attention; omp chooses keys by orthogonal matching pursuit
        of the attention mass; omp_fast is omp with 8 keys in a step, which takes less time (AM-OMP-fast)
    aggregate : statistic of the attention of all reference queries to a key: root mean square, mean or max
    pool, pooling : the attention to a key is replaced by the mean or the maximum over this number of neighbouring keys,
        centred on that key (SnapKV)
    ridge : weight that pulls the fitted values towards the old values, in units of the attention's mean square
    fit : ridge fits by ridge regression; paper uses the paper's own solvers
    fit_biases, fit_values : False leaves the biases at 0, or the values as they are; evict does both. The keys do not
        depend on them
    first, last : number of tokens at the context's beginning and end that are kept unchanged (a chat template's)
    heads : equal, every kv head keeps the same number of entries; pyramid, the number falls from the first layer to the
        last, as in PyramidKV; global, the entries of all kv heads of all layers compete by their attention, and every
        head keeps at least one, as in KVzip; partition, the heads with the largest head budgets keep everything, and
        the others one entry, similar to DuoAttention. `ratio` is the mean over the heads. But with `budgets` the mean
        is lower if a head's budget exceeds all its entries, and with partition it is rounded to whole heads
    budgets : path of a file of head budgets (budgets.py), which `heads: equal` and `heads: partition` use; None means
        that there are none
    on_policy : True computes the queries of repeat, self_study and question in each layer while the layers below it are
        compacted already (AM section 3.1, C.4). One pass over these texts computes queries and compacts; it is repeated
        for each ratio. The texts are sampled with the full cache. Other kinds of queries do not change
    chunk : am divides a longer context into equal parts of at most this number of tokens. Each part is compacted on its
        own: it has reference queries of its own, which see the first `first` tokens, the part and the last `last`
        tokens, and it keeps its share of the entries (AM section 3.5, C.3). A fit needs memory for three float64 arrays
        of queries x tokens of the part. Under evict with `select: attention`, the context is not divided, unless
        `chunks` or `chunking: text` is set
    chunks : number of equal parts, under any policy that chooses entries; None means that `chunk` determines it
    chunking : kv, a long context is read as a whole, and its entries are divided into parts; text, each part of its
        tokens is read alone, between the first `first` and the last `last` tokens, also under evict. RoPE then turns
        the kept keys to their positions in the context
    summary : the model first writes a summary of the context, which takes the context's place; `ratio` then counts the
        summary's tokens. The value names the request: plain, detailed, for_questions, concise or shortest. With
        `chunks`, each of the parts is summarized alone, and the summaries follow each other; the summary is compacted
        in parts of at most `chunk` tokens. None means no summary
    summary_tokens : maximum number of tokens of a summary
    most_queries : maximum number of reference queries of a kv head, for each part; if there are more, a random subset
        is used
    study_samples, study_tokens : for self_study, the number of answers to each conversation starter; for self_study and
        question, the maximum number of tokens of an answer and of the model's questions
    cartridge : settings of the training of a cartridge
    seed : seed of random queries, of the subset of queries, of self-study and of summaries
    """

    policy: Literal["am", "evict", "cartridge", "full", "none"] = "am"
    ratio: Fraction = 0.1
    queries: list[QueryKind] = field(default_factory=lambda: ["repeat"])
    window: PositiveInt = 32
    select: Literal["attention", "omp", "omp_fast"] = "attention"
    aggregate: Literal["rms", "mean", "max"] = "rms"
    pool: OddInt = 1
    pooling: Literal["mean", "max"] = "mean"
    ridge: Positive = 1e-3
    fit: Literal["ridge", "paper"] = "ridge"
    fit_biases: bool = True
    fit_values: bool = True
    first: NonNegativeInt = 1
    last: NonNegativeInt = 0
    heads: Literal["equal", "pyramid", "global", "partition"] = "equal"
    budgets: PathText | None = None
    on_policy: bool = False
    chunk: PositiveInt = 4096
    chunks: PositiveInt | None = None
    chunking: Literal["kv", "text"] = "kv"
    summary: SummaryKind | None = None
    summary_tokens: PositiveInt = 1024
    most_queries: PositiveInt = 50_000
    study_samples: PositiveInt = 1
    study_tokens: PositiveInt = 256
    cartridge: CartridgeConfig = field(default_factory=CartridgeConfig)
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.chooses:
            return
        if not self.queries:
            raise UserError("name at least one kind of queries, for example [repeat]", "queries")
        if self.pool > 1 and self.pursues:
            wrong = f"select: {self.select} has no scores to combine"
            raise UserError(f"{wrong}; use select: attention, or pool: 1", "pool")
        if self.on_policy and ON_POLICY.isdisjoint(self.queries):
            wrong = "only queries of repeat, self_study and question can be on-policy"
            raise UserError(f"{wrong}; add one of them to queries, or use on_policy: false", "on_policy")
        if self.on_policy and self.by_text:
            raise UserError("queries cannot be on-policy with chunking: text; use chunking: kv", "on_policy")
        if self.heads in ("pyramid", "global") and self.budgets is not None:
            wrong = "head budgets already set how much each head keeps"
            raise UserError(f"{wrong}; use heads: equal or heads: partition with them", "heads")
        if self.heads == "partition" and self.budgets is None:
            raise UserError("a partition of the heads needs head budgets; set budgets: FILE", "heads")
        if self.heads == "global" and self.pursues:
            wrong = f"select: {self.select} has no scores by which heads could compete"
            raise UserError(f"{wrong}; use select: attention, or heads: equal", "heads")
        if self.heads == "global" and self.on_policy and ON_POLICY.issuperset(self.queries):
            wrong = "heads cannot compete by on-policy queries, which a layer gets only after the layers below it"
            raise UserError(f"{wrong}; use on_policy: false, or add the queries context", "heads")

    @property
    def chooses(self) -> bool:
        """True if the policy selects tokens, for which it needs reference queries."""
        return self.policy in ("am", "evict")

    @property
    def keeps_all(self) -> bool:
        """True if the whole context stays as it is."""
        return self.policy == "full" and self.summary is None

    @property
    def sized(self) -> bool:
        """True if `ratio` sets the number of entries."""
        return self.chooses or self.policy == "cartridge"

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

    @property
    def fits(self) -> bool:
        """True if the kept entries get new biases or new values."""
        return self.policy == "am" and (self.fit_biases or self.fit_values)

    def check_trainable(self) -> None:
        """Raise UserError if no trainer can replay completions after contexts that are compacted in this way."""
        if self.summary is not None:
            raise UserError("a summary takes the place of the prompt's own tokens; remove it in training", "summary")
        if self.policy == "cartridge":
            raise UserError("training cannot remake a cartridge; use am, evict, full or none", "policy")
        if self.by_text:
            raise UserError("training cannot remake parts that are read alone; use chunking: kv", "chunking")
        if not self.fits:
            return
        if self.fit == "paper":
            raise UserError("training cannot repeat the paper's solvers; use fit: ridge", "fit")
        if other := [kind for kind in self.queries if kind not in RECORDED]:
            wrong = f"a trace cannot record queries of {other[0]}, because they are not of the context's own tokens"
            raise UserError(f"{wrong}; in training use [context], [window] or both, or policy: evict", "queries")

    def between(self, tokens: int) -> int:
        """Return the number of tokens between the first `first` and the last `last` ones of a context of `tokens`
        tokens. Raises UserError if there are none.
        """
        between = tokens - self.first - self.last
        if between < 1:
            raise UserError(
                f"the context has {tokens} tokens, but first + last is {self.first + self.last}; lower one of them",
                "first",
            )
        return between

    def parts(self, tokens: int) -> list[Part]:
        """Return the equal parts in which the tokens of `between` compete."""
        between = self.between(tokens)
        number = math.ceil(between / self.chunk) if self.in_parts else 1
        if self.chunks is not None and (self.chooses or self.summary is not None):
            number = min(self.chunks, between)
        return [Part(between * n // number, between * (n + 1) // number, between) for n in range(number)]

    def kept(self, tokens: int) -> int:
        """Return the mean number of entries that a kv head keeps of the tokens of `between`."""
        between = self.between(tokens)
        if self.sized:
            return max(1, round(self.ratio * between))
        return between if self.policy == "full" else 0


@dataclass(frozen=True, kw_only=True)
class TrainedPromptCache(PromptCacheConfig):
    """Settings for compacting the context of each prompt once for all its completions, with the weights that sample.

    queries : kinds of reference queries. Under am, only context (the context's tokens) and window (its last `window`
        tokens) can be replayed in training
    first, last : number of further tokens kept unchanged at the start and at the end of the context's text; tokens that
        the chat template puts before the text are always kept
    """

    queries: list[QueryKind] = field(default_factory=lambda: ["context"])
    first: NonNegativeInt = 0
